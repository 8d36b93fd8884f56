"""Replaces control flow by computing both branches of an `If` and all steps of a `Scan`."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import helper

from edgekit_toolkit.passes.resolve_conditions import rename_tensors
from edgekit_toolkit.tflite.lowering.body import Body, Value, lowers
from edgekit_toolkit.tflite.refusal import RefusedError

MAX_STEPS: Final = 128


def _written_in(body: Body, graph: onnx.GraphProto, arguments: Sequence[Value] = ()) -> list[Value]:
    """Write the nodes of an inner graph into the body; returns the values of its outputs."""
    inner = onnx.GraphProto()
    inner.CopyFrom(graph)
    mark = f"{next(name for name in body.node.outputs if name)};{len(body.nodes)}"
    own = [tensor.name for tensor in inner.initializer]
    own += [name for node in inner.node for name in node.output if name]
    names = {name: f"{mark}_{name}" for name in own}
    names |= {value.name: argument.name for value, argument in zip(inner.input, arguments, strict=True)}
    rename_tensors(inner, names)
    body.constants.extend(inner.initializer)
    body.nodes.extend(inner.node)
    types = [value.type.tensor_type.elem_type for value in inner.output]
    return [
        Value(value.name, body, helper.tensor_dtype_to_np_dtype(kind))
        for value, kind in zip(inner.output, types, strict=True)
    ]


@lowers("If")
def _if(body: Body) -> list[Value]:
    """Compute both branches and choose."""
    if any(name not in body.graph.shapes for name in body.node.outputs):
        raise RefusedError(
            "its branches have no result of one known shape: fix the input that decides (--fix NAME=VALUE)"
        )
    condition = body.input(0).reshape()
    yes, no = (_written_in(body, body.attribute(f"{name}_branch")) for name in ("then", "else"))
    return [condition.where(a, b) for a, b in zip(yes, no, strict=True)]


@lowers("Scan")
def _scan(body: Body) -> list[Value]:
    graph, scans = body.attribute("body"), body.attribute("num_scan_inputs")
    states = len(body.node.inputs) - scans
    in_axes = body.attribute("scan_input_axes", [0] * scans)
    backwards = body.attribute("scan_input_directions", [0] * scans)
    sequences = [body.input(states + number) for number in range(scans)]
    shapes = [body.shape(states + number) for number in range(scans)]
    steps = shapes[0][in_axes[0]]
    if steps > MAX_STEPS:
        raise RefusedError(f"{steps} steps are more than the {MAX_STEPS} that are written out")
    carried = [body.input(number) for number in range(states)]
    rows: list[list[Value]] = []
    for step in range(steps):
        moments = [steps - 1 - step if is_back else step for is_back in backwards]
        elements = [
            sequence.op("Gather", np.array(moment, np.int64), axis=axis)
            for sequence, axis, moment in zip(sequences, in_axes, moments, strict=True)
        ]
        results = _written_in(body, graph, [*carried, *elements])
        carried = results[:states]
        rows.append(results[states:])
    out_axes = body.attribute("scan_output_axes", [0] * len(rows[0]))
    out_back = body.attribute("scan_output_directions", [0] * len(rows[0]))
    columns = zip(zip(*rows, strict=True), out_axes, out_back, strict=True)
    return [*carried, *(_stacked(column[::-1] if back else column, axis) for column, axis, back in columns)]


def _stacked(values: Sequence[Value], axis: int) -> Value:
    slices = [value.op("Unsqueeze", np.array([axis])) for value in values]
    return slices[0].op("Concat", *slices[1:], axis=axis)
