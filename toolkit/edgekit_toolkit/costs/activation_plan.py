"""Memory of the activations: a simulation of onnxruntime's buffer plan and its arena.

Sub-graphs of control flow and buffers that a kernel takes from the C library are not modelled.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final

import onnx

from edgekit_toolkit.costs.ort_arena import Arena, Block
from edgekit_toolkit.onnx_graph.index import attribute, reads
from edgekit_toolkit.onnx_graph.ort_graph import BLOCKED_DOMAIN, EngineGraph, EngineTensor

_RUNS: Final = 3  # a second run may need more, as the arena is split by then. A third seldom does
# Kernels whose output is another view of their input.
_VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Dropout"})
# Kernels that may overwrite their first input if nothing reads it later. Add and the like are not among them
# on the CPU.
_IN_PLACE: Final = frozenset(
    {"Cast", "Celu", "Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "LogSoftmax"}
    | {"QuickGelu", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu"}
)
_SUMMAND_INPUT: Final = 3  # input of a convolution with a fused addition, which adds to it in place
_VARIADIC: Final = frozenset({"Max", "Mean", "Min", "Sum"})
# Scratch of one thread in a convolution that expands its input in segments: 128 x 128 floats.
_SEGMENT_BYTES: Final = 128 * 128 * 4
_SYMMETRIC_CHANNELS: Final = 16  # int8 kernels that need no int32 buffer take channels in such groups


def activation_memory(graph: EngineGraph, threads: int = 1) -> int:
    """Return the resident bytes of onnxruntime's arena after a few runs: activations, scratch and outputs.

    Intermediate tensors with data-dependent shapes count as 0 bytes. `threads` is the number of threads of
    one inference, at least 1.
    """
    buffers = _plan_buffers(graph)
    last_use: dict[str, int] = {}
    for step, node in enumerate(graph.nodes):
        for name in (*reads(node), *node.output):
            last_use[buffers.get(name, name)] = step
    ends: dict[int, list[str]] = {}
    for name, step in last_use.items():
        ends.setdefault(step, []).append(name)
    arena = Arena()
    packed = [
        _tensor(graph, node.input[index]).size_bytes for node in graph.nodes for index in _packed_input(node)
    ]
    for size in packed:
        arena.allocate(size)
    for _ in range(_RUNS):
        _run(graph, buffers, ends, arena, threads)
    return arena.resident_bytes - sum(packed)


def _run(
    graph: EngineGraph, buffers: Mapping[str, str], ends: Mapping[int, list[str]], arena: Arena, threads: int
) -> None:
    live: dict[str, Block] = {}
    for step, node in enumerate(graph.nodes):
        for name in node.output:
            if name and name not in buffers and graph.tensors[name].size_bytes:
                live[name] = arena.allocate(graph.tensors[name].size_bytes)
        scratch = [arena.allocate(size) for size in scratch_bytes(node, graph, threads) if size]
        for block in scratch:
            arena.release(block)
        for name in ends.get(step, ()):
            if name in live and name not in graph.outputs:
                arena.release(live.pop(name))
    # The caller drops the outputs before the next run.
    for block in live.values():
        arena.release(block)


def _plan_buffers(graph: EngineGraph) -> dict[str, str]:
    """Return the tensors that use the buffer of another one: name -> the tensor that owns the buffer.

    Source: onnxruntime, core/framework/allocation_planner.cc, ComputeSingleStreamReusePlan.
    """
    owners: dict[str, str] = {}
    # Never free: tensors that the caller or the session owns.
    uses = dict.fromkeys((*graph.weights, *graph.inputs, *graph.outputs), 1)
    for node in graph.nodes:
        for name in reads(node):
            uses[name] = uses.get(name, 0) + 1
    unread = {name for node in graph.nodes for name in node.output if name and name not in uses}
    free: list[str] = []  # owners of free buffers, the latest first
    for node in graph.nodes:
        for position, name in enumerate(node.output):
            if not name or name in graph.outputs:
                continue
            owner = _reusable_input(node, position, graph, owners, uses)
            if owner is None and graph.tensors[name].shape:
                owner = next((other for other in free if graph.tensors[other] == graph.tensors[name]), None)
                if owner is not None:
                    free.remove(owner)
            if owner is not None:
                owners[name] = owner
                uses[owner] += uses.get(name, 0)
        for name in (*reads(node), *(name for name in node.output if name in unread)):
            owner = owners.get(name, name)
            uses[owner] = uses.get(owner, 1) - 1
            if uses[owner] == 0 and owner in graph.tensors:
                free.insert(0, owner)
    return owners


def _reusable_input(
    node: onnx.NodeProto,
    position: int,
    graph: EngineGraph,
    owners: Mapping[str, str],
    uses: Mapping[str, int],
) -> str | None:
    if position > 0:
        return None
    if node.op_type in _VIEWS:
        viewed: str = node.input[0]
        return owners.get(viewed, viewed)
    if node.op_type in _IN_PLACE:
        index = 0
    elif node.op_type == "FusedConv" or (node.op_type == "Conv" and node.domain == BLOCKED_DOMAIN):
        index = _SUMMAND_INPUT
    else:
        return None
    if index >= len(node.input) or node.input[index] not in graph.tensors:
        return None
    name: str = node.input[index]
    owner = owners.get(name, name)
    tensor = graph.tensors[name]
    same_size = tensor.shape is not None and tensor == graph.tensors[node.output[0]]
    return owner if same_size and uses[owner] == 1 else None


def _packed_input(node: onnx.NodeProto) -> tuple[int, ...]:
    """Return which input the kernel packs into the arena while the model is loaded, if any."""
    return {"ConvTranspose": (1,), "QLinearConv": (3,)}.get(node.op_type, ())


def scratch_bytes(node: onnx.NodeProto, graph: EngineGraph, threads: int) -> Iterator[int]:
    """Yield the sizes of the arena buffers that the kernel of `node` takes while it runs, in bytes.

    Source: onnxruntime, core/mlas/lib/convolve.cpp (MlasConvPrepare) and, in core/providers/cpu,
    nn/conv_transpose.cc, quantization/qlinearconv.cc and math/element_wise_ops.cc (Compute).
    """
    if node.op_type in {"Conv", "FusedConv"} and node.domain != BLOCKED_DOMAIN:
        yield from _conv_scratch(node, graph, threads)
    elif node.op_type == "ConvTranspose":
        data, weight = _tensor(graph, node.input[0]), _tensor(graph, node.input[1])
        if data.shape and weight.shape:
            yield math.prod(weight.shape[1:]) * math.prod(data.shape[2:]) * 4
    elif node.op_type in _VARIADIC and len(node.input) > 2:
        yield _tensor(graph, node.output[0]).size_bytes  # the result so far
    elif node.op_type == "QLinearConv":
        yield from _int8_conv_scratch(node, graph)


def _conv_scratch(node: onnx.NodeProto, graph: EngineGraph, threads: int) -> Iterator[int]:
    weight, out = _tensor(graph, node.input[1]).shape, _tensor(graph, node.output[0]).shape
    if not weight or not out or (math.prod(weight[2:]) == 1 and not _moves(node)):
        return  # a pointwise convolution is one matrix product
    positions = math.prod(out[2:])
    if weight[0] // attribute(node, "group", 1) > positions:
        yield positions * math.prod(weight[1:]) * 4
    else:
        yield threads * _SEGMENT_BYTES


def _int8_conv_scratch(node: onnx.NodeProto, graph: EngineGraph) -> Iterator[int]:
    data, out = _tensor(graph, node.input[0]), _tensor(graph, node.output[0])
    weight = _tensor(graph, node.input[3]).shape
    if not data.shape or not out.shape or not weight:
        return
    last = bool(attribute(node, "channels_last", 0))
    positions = math.prod(out.shape[1:-1] if last else out.shape[2:])
    kernel = math.prod(weight[2:])
    groups = attribute(node, "group", 1)
    depthwise = weight[1] == 1 and weight[0] == groups
    # The symmetric kernels scale to int8 as they go; the others leave int32 sums.
    symmetric = (
        weight[0] % _SYMMETRIC_CHANNELS == 0
        if depthwise
        else groups == 1 and weight[0] >= _SYMMETRIC_CHANNELS
    )
    if not symmetric:
        yield 4 * weight[0] * positions
    if not last:
        yield from (data.size_bytes // data.shape[0], out.size_bytes // out.shape[0])
    if depthwise or (symmetric and (kernel > 1 or _moves(node))):
        yield 8 * kernel * positions  # a pointer a tap
    elif kernel > 1 or _moves(node):
        yield weight[1] * kernel * positions


def _moves(node: onnx.NodeProto) -> bool:
    """Whether a convolution has strides or padding."""
    padded = any(attribute(node, "pads", ())) or attribute(node, "auto_pad", b"NOTSET").startswith(b"SAME")
    return padded or any(stride != 1 for stride in attribute(node, "strides", ()))


def _tensor(graph: EngineGraph, name: str) -> EngineTensor:
    return graph.weights.get(name) or graph.tensors[name]
