"""Maps the kernels that onnxruntime runs to the tensor names of the model.

onnxruntime saves the graph that it runs, and times its nodes. Most outputs of fused nodes keep their names.
Outputs in another layout (NCHWc, or after a moved Transpose) have new names but the same values. These are
mapped too, because onnxruntime converts the layout back at the end of a submodel.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
import onnxruntime

from edgekit_offload.profiling.model_profile import KernelTime
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.measurement.job import NodeTiming
from edgekit_runtime.offload.measurement.job_runner import make_inputs
from edgekit_runtime.sessions.ort import OrtOptions, make_settings
from edgekit_runtime.tensors import DTYPES, Array

_NCHWC_DOMAIN: Final = "com.microsoft.nchwc"
# onnxruntime names a node of the blocked layout after the output of the node that it replaces, with a number
# if that name was taken.
_NCHWC_NAME: Final = re.compile(r"(?P<output>.+)_nchwc(_token_\d+)?")
_OTHER_RUNS: Final = 3  # with other values, under which sizes that depend on values change
_FACTORS: Final = (0.0, 1.0, -30.0)
_NUMBER: Final = re.compile(r"_token_\d+$")
# These run on 8 bits as on floats, so the widening and narrowing nodes around them are dropped.
_MOVING_OPS: Final = frozenset(
    {"Concat", "Flatten", "Gather", "MaxPool", "Pad", "Reshape", "Resize", "Slice", "Squeeze", "Transpose"}
)
_MOST_ACTIVATIONS: Final = 1
# These change the memory layout of a tensor, not its values.
_LAYOUT_OPS: Final = frozenset({"ReorderInput", "ReorderOutput", "Transpose", "Cast", "Identity"})


def read_kernels(
    model: onnx.ModelProto,
    optimised: onnx.ModelProto,
    nodes: Sequence[NodeTiming],
    *,
    overhead_s: float,
    scale: float,
) -> tuple[tuple[KernelTime, ...], dict[str, int]]:
    """Return the kernels of a profile, and a dict from each tensor that they write to its size in bytes.

    Args:
        model: The model that was passed to onnxruntime.
        optimised: The graph that onnxruntime made from it.
        nodes: The times of the nodes of `optimised`.
        overhead_s: The time that profiling added to each node.
        scale: A factor for all times after subtracting `overhead_s`.

    Raises:
        CutError: The times belong to another graph.
    """
    own = tensors_of(model)
    names = _find_own_names(model, optimised, own)
    weights = {tensor.name: tensor_bytes(tensor) for tensor in optimised.graph.initializer}
    weights |= {node.output[0]: 0 for node in optimised.graph.node if node.op_type == "Constant"}
    kernels: list[KernelTime] = []
    sizes: dict[str, int] = {}
    for node, timing in zip(optimised.graph.node, _match(optimised, nodes), strict=True):
        outputs = [tensor for tensor in node.output if tensor]
        if len(outputs) == len(timing.output_bytes):
            pairs = zip(outputs, timing.output_bytes, strict=True)
            # Another layout may be padded, so its size says nothing about the model's tensor.
            sizes |= {tensor: size for tensor, size in pairs if tensor not in names}
        reads = [tensor for tensor in node.input if tensor and tensor not in weights]
        kernels.append(
            KernelTime(
                name=timing.name,
                op=node.op_type,
                reads=tuple(dict.fromkeys(names.get(tensor, tensor) for tensor in reads)),
                writes=tuple(dict.fromkeys(names.get(tensor, tensor) for tensor in outputs)),
                seconds=(timing.timing.seconds - overhead_s) * scale,
                spread=timing.timing.spread,
                weights_bytes=sum(weights.get(tensor, 0) for tensor in set(node.input)),
            )
        )
    return tuple(kernels), sizes


def tensors_of(model: onnx.ModelProto) -> frozenset[str]:
    """Return the names of a model's inputs, without weights, and of all tensors that its nodes write."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input} - weights
    return frozenset(inputs | {tensor for node in model.graph.node for tensor in node.output if tensor})


def find_obstacle(model: onnx.ModelProto) -> str:
    """Return the reason why a model cannot be split, or an empty text if it can."""
    for node in model.graph.node:
        if has_subgraph(node):
            return f"the model has control flow, node '{node.name}' ({node.op_type})"
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in weights and any(
            not dimension.HasField("dim_value") for dimension in value.type.tensor_type.shape.dim[1:]
        ):
            return (
                f"input '{value.name}' has free sizes beside the batch; export it with fixed ones to split it"
            )
    return ""


def has_subgraph(node: onnx.NodeProto) -> bool:
    return any(attribute.HasField("g") or len(attribute.graphs) > 0 for attribute in node.attribute)


def measure_sizes(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    *,
    weights: Mapping[str, bytes | memoryview],
    inputs: Mapping[str, Array],
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the sizes of tensors in bytes, and the names of those that cannot be sent.

    The model is run on this machine. Sequences and texts have no size and cannot be sent. Tensors whose shape
    depends on input values cannot be sent, because submodels have fixed shapes. Empty tensors that are not
    inputs cannot be sent, because their size may depend on the data.

    Args:
        model: The model. The tensors are added to its outputs.
        tensors: The names of tensors in the model.
        weights: A dict from the location of an external data file to its content.
        inputs: The inputs by name. If there are none, they are generated with free dimensions of 1.

    Raises:
        CutError: onnxruntime rejects the model.
    """
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in present)
    settings = make_settings(OrtOptions(optimise=False))
    if weights:
        files = [memoryview(content) for content in weights.values()]
        settings.add_external_initializers_from_files_in_memory(list(weights), files, list(map(len, files)))
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
        )
        feeds = inputs or make_inputs(session)
        facts = [_describe_values(session, tensors, feeds)]
    except Exception as cause:  # its exceptions have no other common base
        raise CutError(f"the sizes of the model's tensors cannot be measured: {cause}") from cause
    for seed in range(_OTHER_RUNS):
        scaled = {name: vary_values(value, seed) for name, value in feeds.items()}
        with contextlib.suppress(Exception):  # a model may refuse such values
            facts.append(_describe_values(session, tensors, scaled))
    sizes: dict[str, int] = {}
    fixed: set[str] = set()
    for name, *described in zip(tensors, *facts, strict=True):
        if None not in described:
            size_bytes, shape = described[0] or (0, ())
            sizes[name] = size_bytes
            if len(set(described)) == 1 and (0 not in shape or name in feeds):
                fixed.add(name)
    return sizes, frozenset(tensors) - fixed


def _describe_values(
    session: onnxruntime.InferenceSession, tensors: Sequence[str], feeds: Mapping[str, Array]
) -> list[tuple[int, tuple[int, ...]] | None]:
    """Return bytes and shape of each plain tensor in a run, None for others; values would take gigabytes."""
    values = session.run(list(tensors), dict(feeds))
    return [(value.nbytes, value.shape) if is_plain(value) else None for value in values]


def vary_values(values: Array, seed: int) -> Array:
    """Return floats multiplied by random factors, some of which are zero. Other arrays are not changed."""
    if values.dtype.kind != "f":
        return values
    factors = np.random.default_rng(seed).choice(_FACTORS, values.shape)
    return np.asarray(values * factors).astype(values.dtype)


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor that can be sent. Sequences, optionals and texts cannot be sent."""
    return isinstance(value, np.ndarray) and value.dtype.name in DTYPES


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the size of a weight in bytes from its dtype and shape. Its data may be external."""
    return _count_bytes(tensor.data_type, tensor.dims)


def _count_bytes(kind: int, shape: Iterable[int]) -> int:
    count = int(np.prod(list(shape), dtype=object))
    try:
        return count * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
    except (KeyError, ValueError):  # for strings and packed types
        return count


def _match(optimised: onnx.ModelProto, nodes: Sequence[NodeTiming]) -> list[NodeTiming]:
    """Return the time of each node of a graph, in the order of the graph."""
    graph = optimised.graph.node
    if [node.op_type for node in graph] == [node.op for node in nodes]:
        return list(nodes)
    by_name = {(node.name, node.op): node for node in nodes}
    timings = [by_name.get((node.name, node.op_type)) for node in graph]
    matched = [node for node in timings if node is not None]
    if len(matched) < len(graph) or len(by_name) < len(nodes):
        raise CutError(
            f"profile: onnxruntime timed {len(nodes)} nodes, its optimised graph has {len(graph)},"
            " and they do not fit together; whole-model candidates only"
        )
    return matched


def _find_own_names(
    model: onnx.ModelProto, optimised: onnx.ModelProto, own: frozenset[str]
) -> dict[str, str]:
    """Return the model's name of each optimised tensor that holds the same values in another layout."""
    origins = _Origins(model, own)
    weights = {tensor.name for tensor in optimised.graph.initializer}
    names: dict[str, str] = {}

    def own_name(tensor: str) -> str | None:
        return tensor if tensor in own else names.get(tensor)

    for node in optimised.graph.node:
        for position, tensor in enumerate(node.output):
            if not tensor or tensor in own:
                continue
            if origins.is_layout(node) and node.input[0] not in weights:
                origin = own_name(node.input[0])
            else:
                origin = origins.find(node, position)
            if origin is not None:
                names[tensor] = origin
    # A tensor with a new name that only a change of layout separates from a tensor of the model.
    for node in reversed(optimised.graph.node):
        if origins.is_layout(node) and node.input[0] not in weights and own_name(node.input[0]) is None:
            target = own_name(node.output[0])
            if target is not None:
                names[node.input[0]] = target
    return names


class _Origins:
    """The nodes of a model from which the nodes of its optimised graph came, by their names."""

    def __init__(self, model: onnx.ModelProto, own: frozenset[str]) -> None:
        self._own = own
        self._by_name = {node.name: node for node in model.graph.node if node.name}
        self._maker = {tensor: node for node in model.graph.node for tensor in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            for tensor in node.input:
                self._readers[tensor].append(node)

    def is_layout(self, node: onnx.NodeProto) -> bool:
        """Return whether onnxruntime added a node to change a layout."""
        return node.op_type in _LAYOUT_OPS and self._find(node) is None

    def find(self, node: onnx.NodeProto, position: int) -> str | None:
        """Return the model's tensor with the values of an output of an optimised node, if known."""
        if node.domain == _NCHWC_DOMAIN:
            named = _NCHWC_NAME.fullmatch(node.name)
            if named is not None and named["output"] in self._own:
                return named["output"]
        origin = self._find(node)
        if origin is None or position >= len(origin.output):
            return None
        source = self._maker.get(origin.input[0]) if origin.input else None
        is_widened = source is not None and source.op_type == "DequantizeLinear"
        if node.op_type.startswith("QLinear") or (is_widened and node.op_type in _MOVING_OPS):
            return self._find_quantized(origin.output[position])
        return origin.output[position] if origin.op_type == node.op_type else None

    def _find(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        return self._by_name.get(node.name) or self._by_name.get(_NUMBER.sub("", node.name))

    def _find_quantized(self, tensor: str) -> str | None:
        """Return the 8-bit form of a tensor, behind its QuantizeLinear or behind an activation and that."""
        for _ in range(_MOST_ACTIVATIONS + 1):
            readers = self._readers[tensor]
            if len(readers) != 1 or not readers[0].output:
                return None
            tensor = readers[0].output[0]
            if readers[0].op_type == "QuantizeLinear":
                return tensor
        return None
