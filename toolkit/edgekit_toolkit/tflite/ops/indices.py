"""The indices of the largest and smallest elements: ArgMax, ArgMin and TopK."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.layout.rules import Rule, axis_last, axiswise, removing
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node

_INDEX = np.dtype(np.int32)


def _arg_rule(node: Node, graph: Graph) -> Rule:
    axis = node.attributes.get("axis", 0) % len(graph.shape(node.inputs[0]))
    if node.attributes.get("keepdims", 1) == 1:
        return axiswise(node, graph)
    return removing((axis,), node, graph)


@writes("ArgMax", "ArgMin", rule=_arg_rule)
def write_arg(step: Step) -> None:
    """Write ARG_MAX or ARG_MIN. The first of equal elements is selected."""
    if step.attribute("select_last_index", 0):
        raise RefusedError("select_last_index=1 is not covered: TFLite takes the first of equal elements")
    kind, table = {"ArgMax": ("ARG_MAX", "ArgMaxOptions"), "ArgMin": ("ARG_MIN", "ArgMinOptions")}[
        step.node.op_type
    ]
    tensor, axis = step.read(0), step.axis(step.attribute("axis", 0))
    shape = (*tensor.shape[:axis], *tensor.shape[axis + 1 :])
    options = Options(table, {"outputType": 4})  # TensorType.INT64
    result = step.emit(kind, [tensor, step.number(axis, _INDEX)], shape, options, dtype=np.dtype(np.int64))
    step.give(step.builder.reshape(result, step.held()))


@writes("TopK", rule=axis_last(-1))
def write_top_k(step: Step) -> None:
    """Write TOPK_V2. For the smallest elements, the input and the resulting values are negated."""
    count = int(step.constant(1, "k").reshape(()))
    tensor, smallest = step.read(0), not step.attribute("largest", 1)
    if tensor.dtype != np.float32:
        raise RefusedError(f"elements of {tensor.dtype} are not covered, only float32")
    if smallest:
        tensor = step.unary("NEG", tensor, Options("NegOptions"))
    shape = (*tensor.shape[:-1], count)
    outputs = [(shape, tensor.dtype), (shape, _INDEX)]
    inputs = [tensor, step.number(count, _INDEX)]
    values, indices = step.builder.operator("TOPK_V2", inputs, outputs, Options("TopKV2Options"))
    if smallest:
        values = step.unary("NEG", values, Options("NegOptions"))
    if step.node.outputs[0]:
        step.give(values, 0)
    if len(step.node.outputs) > 1 and step.node.outputs[1]:
        step.give(step.emit("CAST", [indices], shape, Options("CastOptions"), dtype=np.dtype(np.int64)), 1)
