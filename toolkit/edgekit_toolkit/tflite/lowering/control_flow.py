"""Control flow without control: both branches of an `If`, and every step of a `Scan` or `Loop`."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

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
    """Compute both branches and choose; results without a common fixed shape are refused later."""
    condition = body.input(0).reshape()
    yes, no = (_written_in(body, body.attribute(f"{name}_branch")) for name in ("then", "else"))
    for name in body.node.outputs:
        body.graph.shape(name)  # refuses branches whose results differ in shape
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
    _check_steps(steps)
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


@lowers("Loop")
def _loop(body: Body) -> list[Value]:
    graph = body.attribute("body")
    count = body.value(0)
    condition = body.value(1)
    if count is None or (body.has(1) and (condition is None or not condition.all())):
        raise RefusedError("its number of steps depends on the data")
    if not _goes_on(graph):
        raise RefusedError("its condition is computed in each step")
    steps = int(count.reshape(()))
    _check_steps(steps)
    carried = [body.input(number) for number in range(2, len(body.node.inputs))]
    rows: list[list[Value]] = []
    for step in range(steps):
        moment = body.stored(np.array(step, np.int64))
        _, *results = _written_in(body, graph, [moment, body.stored(np.array(True)), *carried])
        rows.append(results[len(carried) :])
        carried = results[: len(carried)]
    return [*carried, *(_stacked(column, 0) for column in zip(*rows, strict=True))]


def _check_steps(steps: int) -> None:
    if not 0 < steps <= MAX_STEPS:
        raise RefusedError(f"{steps} steps are not in 1 to {MAX_STEPS}, which are written out")


def _goes_on(graph: onnx.GraphProto) -> bool:
    """Whether the condition that the body of a Loop returns is constant, or the one that it is passed."""
    name = graph.output[0].name
    producers = {output: node for node in graph.node for output in node.output}
    while name in producers and producers[name].op_type == "Identity":
        name = producers[name].input[0]
    if name in producers and producers[name].op_type == "Constant":
        return bool(numpy_helper.to_array(producers[name].attribute[0].t).all())
    stored = {tensor.name: tensor for tensor in graph.initializer}
    return name == graph.input[1].name or (
        name in stored and bool(numpy_helper.to_array(stored[name]).all())
    )


def _stacked(values: Sequence[Value], axis: int) -> Value:
    slices = [value.op("Unsqueeze", np.array([axis])) for value in values]
    return slices[0].op("Concat", *slices[1:], axis=axis)
