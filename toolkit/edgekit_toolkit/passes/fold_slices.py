"""Replaces slices of every second row and column before a convolution by a convolution with stride 2.

Detectors such as YOLOX and YOLOv5 up to release 5 start with such slices, which they call "focus". The slices
and the Concat copy the whole image. A convolution with stride 2 and a kernel of twice the size computes the
same without copies. This graph

    Slice (4 times, [3, H/2, W/2]), Concat [12, H/2, W/2], Conv 3x3

becomes one Conv 6x6 with stride 2 on the image [3, H, W].
"""

import numpy as np
import onnx
from onnx import helper

from edgekit_toolkit.onnx_graph.index import (
    GraphIndex,
    add_constant,
    attribute,
    replace_nodes,
    rewrite_all,
)

_TO_THE_END = 1 << 30


def run(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in which convolutions with stride 2 replace slices before convolutions."""
    return rewrite_all(model, _rewrite_one)


def _rewrite_one(graph: onnx.GraphProto) -> bool:
    index = GraphIndex(graph)
    for node in graph.node:
        join = index.producers.get(node.input[0]) if node.op_type == "Conv" else None
        weight = None if join is None else index.constant(node.input[1])
        if join is None or weight is None or not _is_plain(node) or weight.ndim != 4:
            continue
        if (
            join.op_type != "Concat"
            or attribute(join, "axis") != 1
            or not index.only_feeds(join.output[0], node)
        ):
            continue
        parts = [_offsets(index, name) for name in join.input]
        sources = {source for source, _, _ in parts}
        if len(sources) != 1 or weight.shape[1] % len(parts) or any(row < 0 for _, row, _ in parts):
            continue
        # Of an odd size, slices from 0 alone have a row more than the convolution would.
        if 1 not in {row for _, row, _ in parts} or 1 not in {column for _, _, column in parts}:
            continue
        channels = weight.shape[1] // len(parts)
        height, width = 2 * weight.shape[2], 2 * weight.shape[3]
        wide = np.zeros((len(weight), channels, height, width), weight.dtype)
        for number, (_, row, column) in enumerate(parts):
            wide[:, :, row::2, column::2] += weight[:, number * channels : (number + 1) * channels]
        inputs = [*sources, add_constant(index, f"{node.input[1]}_wide", wide), *node.input[2:]]
        conv = helper.make_node(
            "Conv",
            inputs,
            list(node.output),
            name=node.name,
            kernel_shape=[height, width],
            strides=[2, 2],
            pads=[2 * pad for pad in attribute(node, "pads", [0] * 4)],
        )
        replace_nodes(graph, [join, node], [conv])
        return True
    return False


def _is_plain(conv: onnx.NodeProto) -> bool:
    """Whether a convolution has no groups, strides or gaps."""
    steps = [*attribute(conv, "strides", []), *attribute(conv, "dilations", []), attribute(conv, "group", 1)]
    return set(steps) == {1} and attribute(conv, "auto_pad", b"NOTSET") == b"NOTSET"


def _offsets(index: GraphIndex, name: str) -> tuple[str, int, int]:
    """Return the tensor that a slice takes every second row and column of, and the first row and column.

    A row of -1 is none: it is not such a part.
    """
    first = {2: -1, 3: -1}
    while (node := index.producers.get(name)) is not None and node.op_type == "Slice":
        limits = [index.constant(limit) for limit in node.input[1:]]
        if len(limits) != 4 or any(limit is None for limit in limits):
            break
        starts, ends, axes, steps = (np.asarray(limit).tolist() for limit in limits)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            if first.get(axis) != -1 or start not in (0, 1) or end < _TO_THE_END or step != 2:
                return name, -1, -1
            first[axis] = start
        name = node.input[0]
    return name, *((first[2], first[3]) if min(first.values()) >= 0 else (-1, -1))
