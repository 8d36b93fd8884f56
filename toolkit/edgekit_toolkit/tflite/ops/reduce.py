"""Reductions over axes, for any form of the input."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
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
    """Return the axes that a node reduces, none negative.

    Raises:
        RefusedError: they are computed in the graph.
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


@writes(*_KINDS, "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", rule=_rule)
def write_reduce(step: Step) -> None:
    """Write MEAN, SUM and the like, with the operators before and after it for norms and logarithms."""
    kind = step.node.op_type
    tensor = step.read(0)
    if step.dtype(0) != np.float32 and not (kind in _KINDS and step.dtype(0).name in {"int32", "int64"}):
        raise RefusedError(f"it has no TFLite kernel for {step.dtype(0)}, for float32 it has")
    if kind == "ReduceLogSumExp":
        _write_log_sum_exp(step, tensor)
        return
    if kind == "ReduceL1":
        tensor = step.emit("ABS", [tensor], tensor.shape, Options("AbsOptions"))
    elif kind in {"ReduceL2", "ReduceSumSquare"}:
        tensor = step.binary("MUL", tensor, tensor)
    result = _reduced(step, _KINDS.get(kind, "SUM"), tensor)
    if kind == "ReduceL2":
        result = step.emit("SQRT", [result], result.shape)
    elif kind == "ReduceLogSum":
        result = step.emit("LOG", [result], result.shape)
    step.give(result)


def _reduced(step: Step, kind: str, tensor: Tensor, keep: bool | None = None) -> Tensor:
    axes = [step.axis(axis) for axis in reduced_axes(step.node, step.graph)]
    keep = step.attribute("keepdims", 1) == 1 if keep is None else keep
    if not axes:
        return step.builder.copy(tensor, tensor.shape)
    return emit_reduction(step, kind, tensor, axes, keep=keep)


def _write_log_sum_exp(step: Step, tensor: Tensor) -> None:
    """Write max + log(sum(exp(x - max))), which does not overflow."""
    largest = _reduced(step, "REDUCE_MAX", tensor, keep=True)
    shifted = step.binary("SUB", tensor, largest)
    powers = step.emit("EXP", [shifted], shifted.shape, Options("ExpOptions"))
    sums = _reduced(step, "SUM", powers, keep=True)
    result = step.binary("ADD", step.emit("LOG", [sums], sums.shape), largest)
    step.give(step.builder.reshape(result, step.held()))
