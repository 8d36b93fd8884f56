"""Converts ONNX to TFLite in several steps, and lists all nodes that are not supported.

The module needs the schema in LiteRT. Importing it raises `EngineMissingError` if LiteRT is not installed.
"""

from collections.abc import Mapping

import numpy as np
import onnx

from edgekit_runtime.errors import EdgekitError, ModelError
from edgekit_toolkit.onnx_graph.functions import inline_functions
from edgekit_toolkit.tflite.builder import TENSOR_TYPES, Builder, Tensor
from edgekit_toolkit.tflite.fusion import fuse
from edgekit_toolkit.tflite.layout.assignment import plan_forms
from edgekit_toolkit.tflite.layout.forms import Form, held_shape, plain
from edgekit_toolkit.tflite.layout.rules import Rule
from edgekit_toolkit.tflite.layout.values import Values, View, find_views
from edgekit_toolkit.tflite.ops import OPERATORS
from edgekit_toolkit.tflite.prepare import CONSTANT_OPERATORS, NO_MAPPING, prepare
from edgekit_toolkit.tflite.refusal import (
    REFUSED,
    ConversionError,
    Refusal,
    RefusedError,
    UnknownTensorError,
    describe_failure,
    refuse_all,
)
from edgekit_toolkit.tflite.registry import Operator
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node, graph_of
from edgekit_toolkit.tflite.writer import write


def convert(model: onnx.ModelProto, dims: Mapping[str, int]) -> bytes:
    """Return `model` as a TFLite file with the same inputs and outputs.

    Names, order, element types and shapes of inputs and outputs do not change. Image inputs [N, C, H, W] are
    transposed inside the file. An unsupported operator is replaced if ONNX defines it by simpler operators.
    The model is not modified.

    Args:
        model: A float32 model. Constants should be folded (see `passes.optimiser.optimise`).
        dims: The size of each free dimension of the inputs, by name.

    Raises:
        ConversionError: Nodes are not supported (all are named), a free dimension has no size, or the weights
            are too large for one file.
    """
    try:
        return _convert(model, dims)
    except ConversionError as error:
        try:
            written_out = inline_functions(model, {refusal.operator for refusal in error.refusals})
            if written_out is not None:
                return convert(written_out, dims)  # a function may be made of functions
        except ModelError:
            pass  # the first error names the operators that the user knows
        raise
    except EdgekitError:
        raise
    except Exception as error:  # what a mapping of ours did not expect
        raise ConversionError(
            f"the model cannot be written as TFLite: the converter fails on it ({describe_failure(error)})."
            " Package it for onnxruntime (--backend ort), and report this with the model"
        ) from error


def _convert(model: onnx.ModelProto, dims: Mapping[str, int]) -> bytes:
    graph = fuse(graph_of(prepare(model, dims)))
    views = find_views(graph)
    rules, refusals = _rules(graph, views)
    forms = plan_forms(graph, rules, views)
    builder = Builder()
    values = Values(graph, views, builder)
    inputs = _inputs(graph, builder, values)
    refusals |= _write_nodes(graph, builder, values, list(zip(rules, forms, strict=True)))
    if refusals:
        raise refuse_all(tuple(refusals[index] for index in sorted(refusals)))
    return write(builder, inputs, _outputs(graph, builder, values))


def _rules(graph: Graph, views: Mapping[str, View]) -> tuple[list[Rule | None], dict[int, Refusal]]:
    """Return the rule of each node (None for views and refused nodes), and the refusals by index.

    A node is not refused for a tensor that is unknown only because another node was refused.
    """
    rules: list[Rule | None] = []
    refusals = {}
    unknown = set[str]()
    for index, node in enumerate(graph.nodes):
        rule = None
        if node.outputs[0] not in views:
            try:
                rule = _operator(node).rule(node, graph)
            except Exception as refused:  # see `_refusal`
                if not (isinstance(refused, UnknownTensorError) and unknown.intersection(node.inputs)):
                    refusals[index] = _refusal(node, refused)
                unknown.update(node.outputs)
        rules.append(rule)
    return rules, refusals


def _operator(node: Node) -> Operator:
    if REFUSED in node.attributes:
        raise RefusedError(node.attributes[REFUSED].decode())
    if node.op_type in CONSTANT_OPERATORS and not node.domain:
        raise RefusedError("its result depends on sizes or values that are not known before the model runs")
    if node.op_type not in OPERATORS or node.domain:
        raise RefusedError(NO_MAPPING)
    return OPERATORS[node.op_type]


def _write_nodes(
    graph: Graph, builder: Builder, values: Values, plan: list[tuple[Rule | None, Form]]
) -> dict[int, Refusal]:
    """Write all nodes; returns the refusals by place.

    A refused node still gets output tensors, so that every refusal is found.
    """
    refusals = {}
    for index, (node, (rule, form)) in enumerate(zip(graph.nodes, plan, strict=True)):
        if rule is None:
            _stand_in(node, graph, builder, values)
            continue
        try:
            OPERATORS[node.op_type].emit(Step(node, graph, builder, values, (rule, form)))
        except Exception as refused:  # see `_refusal`
            refusals[index] = _refusal(node, refused)
            _stand_in(node, graph, builder, values, rule.writes(form))
    return refusals


def _refusal(node: Node, refused: Exception) -> Refusal:
    """Return the refusal of a node, also if its mapping fails on attributes that it did not expect."""
    expected = isinstance(refused, RefusedError)
    reason = str(refused) if expected else f"its mapping fails on it ({describe_failure(refused)})"
    return Refusal(node.operator, node.place, reason)


def _stand_in(
    node: Node, graph: Graph, builder: Builder, values: Values, forms: tuple[Form, ...] = ()
) -> None:
    """Add tensors for a refused node's outputs of known shapes; a view is held by its root."""
    for slot, name in enumerate(node.outputs):
        if name and name in graph.shapes and not values.is_held(name):
            form = forms[slot] if forms else plain(len(graph.shapes[name]))
            tensor = Tensor(len(builder.tensors), held_shape(form, graph.shapes[name]), np.dtype(np.float32))
            builder.tensors.append(tensor)
            values.give(name, form, tensor)


def _inputs(graph: Graph, builder: Builder, values: Values) -> list[tuple[str, Tensor]]:
    inputs = []
    for name in graph.inputs:
        try:
            dtype, shape = graph.dtype(name), graph.shape(name)
        except RefusedError as refused:
            raise ConversionError(f"input '{name}' cannot be taken: {refused}") from refused
        if 0 in shape:
            raise ConversionError(
                f"input '{name}' {list(shape)} has a dimension of size 0, and TFLite holds no empty inputs;"
                " take --backend ort, or give samples or --dim with sizes of at least 1"
            )
        if dtype.name not in TENSOR_TYPES:
            raise ConversionError(
                f"input '{name}' ({dtype.name} {list(shape)}): expected elements of"
                f" {', '.join(TENSOR_TYPES)}; export the model with float32 inputs"
            )
        tensor = builder.tensor(shape, dtype, name)
        values.give(name, plain(len(shape)), tensor)
        inputs.append((name, tensor))
    return inputs


def _outputs(graph: Graph, builder: Builder, values: Values) -> list[tuple[str, Tensor]]:
    """Return the tensors of the outputs, each a separate one under its own name."""
    available: set[int] = {tensor.index for tensor in builder.tensors if tensor.name in graph.inputs}
    outputs = []
    for name in graph.outputs:
        try:
            tensor = values.read(name, plain(len(graph.shape(name))))
        except RefusedError as refused:
            raise ConversionError(f"output '{name}' cannot be given: {refused}") from refused
        if tensor.index in available or tensor.data is not None:
            tensor = builder.copy(tensor, tensor.shape)
        available.add(tensor.index)
        tensor.name = name
        outputs.append((name, tensor))
    return outputs
