"""Reductions over axes. The axes of the input may be stored in any order."""

from edgekit_toolkit.tflite.layout.rules import Rule, axiswise, removing
from edgekit_toolkit.tflite.ops.sums import emit_reduction
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node

_KINDS = {
    "ReduceMean": "MEAN",
    "ReduceSum": "SUM",
    "ReduceMax": "REDUCE_MAX",
    "ReduceMin": "REDUCE_MIN",
    "ReduceProd": "REDUCE_PROD",
}


def reduced_axes(node: Node, graph: Graph) -> tuple[int, ...]:
    """Return the axes of the first input that a node reduces, sorted and non-negative.

    The result is empty if the node reduces no axis.

    Raises:
        RefusedError: The axes are not constant.
    """
    rank = len(graph.shape(node.inputs[0]))
    axes = node.attributes.get("axes")
    if axes is None and node.input(1):
        if not graph.is_constant(node.input(1)):
            raise RefusedError("the axes must be constant, and are computed in the graph")
        axes = graph.constants[node.input(1)].reshape(-1).tolist()
    if not axes:
        return () if node.attributes.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({int(axis) % rank for axis in axes}))


def _rule(node: Node, graph: Graph) -> Rule:
    axes = reduced_axes(node, graph)
    if node.attributes.get("keepdims", 1) == 1:
        return axiswise(node, graph)
    return removing(axes, node, graph)


@writes(*_KINDS, rule=_rule)
def write_reduce(step: Step) -> None:
    """Write MEAN, SUM or another reduction.

    Reductions that TFLite lacks, such as ReduceL2 and ReduceLogSum, have already been replaced by these.
    """
    step.require("float32", "int32", "int64")
    tensor = step.read(0)
    axes = [step.axis(axis) for axis in reduced_axes(step.node, step.graph)]
    if not axes:
        step.give(step.builder.copy(tensor, tensor.shape))
        return
    keep = step.attribute("keepdims", 1) == 1
    step.give(emit_reduction(step, _KINDS[step.node.op_type], tensor, axes, keep=keep))
