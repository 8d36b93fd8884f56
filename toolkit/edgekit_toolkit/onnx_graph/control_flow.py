"""Extracts the bodies of `If`, `Loop` and `Scan` as models, and computes the number of iterations of a loop.

Control flow that depends on the input data is refused with an error.
"""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.index import attribute, opset
from edgekit_toolkit.onnx_graph.traversal import bodies

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
# A condition that counts is followed step by step. Texts and recordings have fewer steps.
_MAX_FOLLOWED_STEPS: Final = 20_000
_SCAN_OPSET: Final = 9  # before, Scan had a batch and sequence lengths

Types = Mapping[str, onnx.TypeProto]
Values = Mapping[str, NDArray[Any]]


def captured(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the tensors that the body of a control flow node reads from outer graphs."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    outer: set[str] = set()
    for node in graph.node:
        outer |= {name for name in node.input if name and name not in own}
        for inner in bodies(node):
            outer |= captured(inner) - own
        own |= set(node.output)
    return outer | ({value.name for value in graph.output} - own)


def body_model(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    body: onnx.GraphProto,
    types: Types,
    initializers: Mapping[str, onnx.TensorProto],
) -> onnx.ModelProto:
    """Return the body of a control flow node as a model.

    The outer tensors that it reads become initializers if they are constant, and otherwise inputs.

    Args:
        model: The model that contains `node`.
        node: The node with control flow.
        body: One of the graphs of `node`.
        types: The known types of outer tensors, by name.
        initializers: The outer constants, by name.

    Raises:
        ModelError: The body reads a tensor of unknown type.
    """
    known_types = dict(types)
    for name, tensor in initializers.items():
        known_types[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    own = _input_types(node, known_types)
    outer = sorted(captured(body))
    if any(name not in known_types for name in outer):
        raise _untyped(node)
    inner = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    inner.graph.CopyFrom(body)
    del inner.graph.input[:]
    for value, kind in zip(body.input, own, strict=True):
        inner.graph.input.append(onnx.ValueInfoProto(name=value.name, type=kind))
    for name in outer:
        if name in initializers:
            inner.graph.initializer.append(initializers[name])
        else:
            inner.graph.input.append(onnx.ValueInfoProto(name=name, type=types[name]))
    return inner


def _input_types(node: onnx.NodeProto, types: Types) -> list[onnx.TypeProto]:
    if node.op_type == "If":
        return []
    names = [name for name in (node.input[2:] if node.op_type == "Loop" else node.input) if name]
    if any(name not in types for name in names):
        raise _untyped(node)
    state_types = [types[name] for name in names]
    if node.op_type == "Loop":
        counter = helper.make_tensor_type_proto(onnx.TensorProto.INT64, [])
        return [counter, helper.make_tensor_type_proto(onnx.TensorProto.BOOL, []), *state_types]
    scanned = attribute(node, "num_scan_inputs", 0)
    states, sequences = state_types[: len(state_types) - scanned], state_types[len(state_types) - scanned :]
    axes = attribute(node, "scan_input_axes", [0] * scanned)
    return [*states, *(_without(kind, axis) for kind, axis in zip(sequences, axes, strict=True))]


def _without(kind: onnx.TypeProto, axis: int) -> onnx.TypeProto:
    """The type of one step of a sequence along `axis`."""
    step = onnx.TypeProto()
    step.CopyFrom(kind)
    if step.tensor_type.HasField("shape"):
        del step.tensor_type.shape.dim[axis]
    return step


def check_steady(node: onnx.NodeProto, body: onnx.ModelProto) -> None:
    """Raise `ModelError` unless every state of a loop has a known shape that no iteration changes."""
    graph, first = body.graph, 1 if node.op_type == "Loop" else 0
    count = _state_count(node)
    pairs = zip(graph.input[2 * first :][:count], graph.output[first:][:count], strict=True)
    for before, after in pairs:
        if sizes_of(before.type) is None or sizes_of(before.type) != sizes_of(after.type):
            name = node.name or node.output[0]
            raise ModelError(
                f"node {name!r}: state {before.name!r} of {node.op_type} has no size that stays from step to"
                " step, so its work cannot be counted; measure on the device instead"
            )


def _state_count(node: onnx.NodeProto) -> int:
    if node.op_type == "Loop":
        return len(node.input) - 2
    return len(node.input) - int(attribute(node, "num_scan_inputs", 0))


def sizes_of(kind: onnx.TypeProto) -> tuple[int, ...] | None:
    """Return the shape of a tensor type, or None if a size is unknown."""
    tensor = kind.tensor_type
    if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    return tuple(dim.dim_value for dim in tensor.shape.dim)


def output_types(
    node: onnx.NodeProto,
    inner_models: Sequence[onnx.ModelProto],
    types: Types,
    initializers: Mapping[str, onnx.TensorProto],
) -> dict[str, onnx.TypeProto]:
    """Return the types of the outputs of a control flow node, by name. Outputs of unknown shape are left out.

    Args:
        node: An If, Loop or Scan node.
        inner_models: The models of its bodies from `body_model`, with inferred shapes.
        types: The known types of outer tensors, by name.
        initializers: The outer constants, by name.

    Raises:
        ModelError: The number of iterations is unknown, or a state of the loop changes its shape.
    """
    outputs = [[value.type for value in inner.graph.output] for inner in inner_models]
    if node.op_type == "If":
        branches = zip(node.output, *outputs, strict=True)
        same = ((name, first) for name, first, other in branches if sizes_of(first) == sizes_of(other))
        return {name: kind for name, kind in same if sizes_of(kind) is not None}
    check_steady(node, inner_models[0])
    (kinds,) = outputs
    if node.op_type == "Loop":
        kinds = kinds[1:]
    count, types_by_output = _state_count(node), {}
    for index, (name, kind) in enumerate(zip(node.output, kinds, strict=True)):
        sizes = sizes_of(kind)
        if not name or sizes is None:
            continue
        if index >= count:
            axes = attribute(node, "scan_output_axes", [0] * (len(kinds) - count))
            steps = find_steps(node, inner_models[0], types, initializers)
            axis = axes[index - count] % (len(sizes) + 1)
            sizes = (*sizes[:axis], steps, *sizes[axis:])
        types_by_output[name] = helper.make_tensor_type_proto(kind.tensor_type.elem_type, sizes)
    return types_by_output


def find_steps(
    node: onnx.NodeProto, body: onnx.ModelProto, types: Types, initializers: Mapping[str, onnx.TensorProto]
) -> int:
    """Return the number of iterations of a Loop or Scan node.

    Raises:
        ModelError: The number of iterations depends on the input data.
    """
    if node.op_type == "Scan":
        return _scan_steps(node, types, opset(body))
    read = set(node.input)
    values = {
        name: numpy_helper.to_array(initializer) for name, initializer in initializers.items() if name in read
    }
    return _loop_steps(node, body, values)


def _scan_steps(node: onnx.NodeProto, types: Types, version: int) -> int:
    """Return the length of the sequences."""
    scanned = attribute(node, "num_scan_inputs", 0)
    axes = attribute(node, "scan_input_axes", [0] * scanned)
    if version >= _SCAN_OPSET and scanned and node.input[-scanned] in types:
        dims = types[node.input[-scanned]].tensor_type.shape.dim
        if len(dims) > axes[0] and dims[axes[0]].HasField("dim_value"):
            return int(dims[axes[0]].dim_value)
    raise _unknown(node)


def _loop_steps(node: onnx.NodeProto, body: onnx.ModelProto, values: Values) -> int:
    """The constant trip count, or the step at which a condition on counters ends the loop."""
    limit: float = math.inf
    if node.input[0]:
        if node.input[0] not in values:
            raise _unknown(node)
        limit = int(values[node.input[0]].item())
    if len(node.input) > 1 and node.input[1]:
        if node.input[1] not in values:
            raise _unknown(node)
        if not values[node.input[1]].item():
            return 0
    if math.isfinite(limit) and _always_goes_on(body.graph):
        return int(limit)
    return _follow(node, body, values, limit)


def _always_goes_on(body: onnx.GraphProto) -> bool:
    producers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in producers and producers[name].op_type == "Identity":
        name = producers[name].input[0]
    stored = [numpy_helper.to_array(tensor) for tensor in body.initializer if tensor.name == name]
    return bool(stored[0].all()) if stored else name == body.input[1].name


def _follow(node: onnx.NodeProto, body: onnx.ModelProto, values: Values, limit: float) -> int:
    """Return the step at which the condition ends the loop, by running the nodes that it depends on.

    Raises:
        ModelError: it depends on more than constants and counters.
    """
    graph = body.graph
    states = {value.name: index for index, value in enumerate(graph.input[: len(node.input)])}
    constants = {tensor.name for tensor in graph.initializer}
    needed = {graph.output[0].name}
    while True:  # a counter may depend on another counter
        nodes = _ancestors(graph, needed)
        produced = {name for node in nodes for name in node.output}
        read = ({name for node in nodes for name in node.input if name} | needed) - produced - constants
        counters = sorted(read - {graph.input[0].name, graph.input[1].name})
        if not read <= states.keys() or any(node.input[states[name]] not in values for name in counters):
            raise _unknown(node)
        grown = needed | {graph.output[states[name] - 1].name for name in counters}
        if grown == needed:
            break
        needed = grown
    after = [graph.output[states[name] - 1] for name in counters]
    before = [graph.input[states[name]] for name in counters]
    step = helper.make_graph(nodes, "step", [*graph.input[:2], *before], [graph.output[0], *after])
    step.initializer.extend(graph.initializer)
    run = ReferenceEvaluator(helper.make_model(step, opset_imports=body.opset_import))
    state: dict[str, Any] = {name: values[node.input[states[name]]] for name in counters}
    for count in range(_MAX_FOLLOWED_STEPS):
        if count >= limit:
            return count
        first = {graph.input[0].name: np.int64(count), graph.input[1].name: np.array(True)}
        goes_on, *made_values = run.run(None, {**first, **state})
        state = dict(zip(counters, made_values, strict=True))
        if not np.asarray(goes_on).item():
            return count + 1
    raise _unknown(node)


def _ancestors(graph: onnx.GraphProto, targets: Set[str]) -> list[onnx.NodeProto]:
    """Return the nodes that `wanted` depends on, in order."""
    needed, ancestors = set(targets), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            ancestors.append(node)
            needed |= {name for name in node.input if name} | {
                name for body in bodies(node) for name in captured(body)
            }
    return ancestors[::-1]


def _untyped(node: onnx.NodeProto) -> ModelError:
    return ModelError(
        f"node {node.name or node.output[0]!r}: expected known types of all that {node.op_type} reads;"
        " measure on the device instead"
    )


def _unknown(node: onnx.NodeProto) -> ModelError:
    return ModelError(
        f"node {node.name or node.output[0]!r}: how often {node.op_type} runs its body depends on the data,"
        " so its work cannot be counted; measure on the device instead"
    )
