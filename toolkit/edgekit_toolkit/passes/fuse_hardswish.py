"""Replaces hard-swish, x * clip(x + 3, 0, 6) / 6, by `Mul(x, HardSigmoid(x))`.

This needs two operators instead of four. If the division by 6 is missing, because it was folded or moved,
`HardSigmoid` is multiplied by 6. The operator `HardSwish` is not used, because onnxruntime expands it, and
TensorRT's parser also expects the expanded form.

Source: A. Howard et al., Searching for MobileNetV3, section 5.2, equation 6.
"""

import numpy as np
import onnx
from onnx import helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    fresh_name,
    replace_nodes,
    rewrite_all,
)


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` with HardSigmoid and Mul instead of each hard-swish."""
    return rewrite_all(model, _fuse_one)


def _fuse_one(graph: onnx.GraphProto) -> bool:
    index = GraphIndex(graph)
    for clip in graph.node:
        if clip.op_type != "Clip" or len(clip.input) != 3 or _scalar(index, clip.input[1]) != 0:
            continue
        if _scalar(index, clip.input[2]) != 6:
            continue
        add = index.producers.get(clip.input[0])
        if add is None or add.op_type != "Add" or not index.only_feeds(add.output[0], clip):
            continue
        three = [at for at in (0, 1) if _scalar(index, add.input[at]) == 3]
        if len(three) != 1:
            continue
        _write(index, add, clip, add.input[1 - three[0]])
        return True
    return False


def _write(index: GraphIndex, add: onnx.NodeProto, clip: onnx.NodeProto, source: str) -> None:
    """Replace clip(source + 3, 0, 6), and a following x * and / 6 if they are its only readers."""
    gate = fresh_name(index, f"{clip.output[0]}_gate")
    sigmoid = helper.make_node("HardSigmoid", [source], [gate], name=clip.name, alpha=1 / 6, beta=0.5)
    readers = index.consumers(clip.output[0])
    mul = readers[0] if len(readers) == 1 and clip.output[0] not in index.outputs else None
    if mul is not None and mul.op_type == "Mul" and sorted(mul.input) == sorted([source, clip.output[0]]):
        after = index.consumers(mul.output[0])
        div = after[0] if len(after) == 1 and mul.output[0] not in index.outputs else None
        if div is not None and _divides_by_6(index, div, mul.output[0]):
            product = helper.make_node("Mul", [source, gate], [div.output[0]], name=mul.name)
            replace_nodes(index.graph, [add, clip, mul, div], [sigmoid, product])
            return
    six = add_constant(index, f"{clip.output[0]}_six", np.asarray(6, np.float32))
    scale = helper.make_node("Mul", [gate, six], [clip.output[0]], name=clip.name and f"{clip.name}_scale")
    replace_nodes(index.graph, [add, clip], [sigmoid, scale])


def _divides_by_6(index: GraphIndex, node: onnx.NodeProto, name: str) -> bool:
    if node.op_type == "Div":
        return node.input[0] == name and _scalar(index, node.input[1]) == 6
    if node.op_type != "Mul":
        return False
    values = [_scalar(index, other) for other in node.input if other != name]
    return len(values) == 1 and values[0] is not None and abs(values[0] * 6 - 1) < 1e-6


def _scalar(index: GraphIndex, name: str) -> float | None:
    """Return the value of a float32 constant that changes neither shape nor type of its operand, or None."""
    value = index.constant(name)
    if value is None or value.dtype != np.float32 or value.shape not in {(), (1,)}:
        return None
    return float(value.reshape(()))
