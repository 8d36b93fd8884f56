"""Rules: the forms in which an operator can work, and the resulting forms of its inputs and outputs.

A rule's *work form* orders the axes of one tensor of the node (its result, or its first input); the rest
follows from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from edgekit_toolkit.tflite.layout.forms import (
    NEW,
    Form,
    Shape,
    broadcast_form,
    channels_last,
    core,
    plain,
    reshaped,
    without_axes,
)
from edgekit_toolkit.tflite.view import Graph, Node

MAX_KERNEL_RANK: Final = 5


@dataclass(frozen=True, slots=True)
class Rule:
    """The forms in which an operator can work.

    Attributes:
        start: work form that is always possible.
        shape: ONNX sizes of the tensor whose axes a work form orders.
        reads: returns for a work form the form in which each input is read.
        writes: returns for a work form the form of each output.
        allows: returns whether a work form is possible. None: only `start` is.
        proposes: returns the work form that gives a result in a form, None if there is none. If `proposes` is
            None, the work form equals the result's form.
    """

    start: Form
    shape: Shape
    reads: Callable[[Form], tuple[Form, ...]]
    writes: Callable[[Form], tuple[Form, ...]]
    allows: Callable[[Form], bool] | None = None
    proposes: Callable[[Form], Form | None] | None = None


MakeRule: TypeAlias = Callable[[Node, Graph], Rule]


def as_onnx(node: Node, graph: Graph) -> Rule:
    """Return the rule of an operator that reads and writes all tensors with their axes as in ONNX."""
    reads = tuple(plain(_rank(graph, name)) for name in node.inputs)
    writes = tuple(plain(_rank(graph, name)) for name in node.outputs)
    return Rule((), (), lambda _: reads, lambda _: writes)


def elementwise(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the result; smaller operands are broadcast as in ONNX."""
    shape = graph.shape(node.outputs[0])
    ranks = [_rank(graph, name) for name in node.inputs]

    def reads(form: Form) -> tuple[Form, ...]:
        return tuple(broadcast_form(form, rank) for rank in ranks)

    return Rule(plain(len(shape)), shape, reads, lambda form: (form,) * len(node.outputs), _fits_kernels)


def axiswise(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the first input.

    Results, and inputs of equal rank, get this form; other inputs stay as in ONNX.
    """
    shape = graph.shape(node.inputs[0])
    reads = _first_and_alike(node, graph)
    return Rule(plain(len(shape)), shape, reads, lambda form: (form,) * len(node.outputs), _fits_kernels)


def _fits_kernels(form: Form) -> bool:
    """Whether inserted axes leave a form within the axes that most kernels and XNNPACK take."""
    return NEW not in form or len(form) <= MAX_KERNEL_RANK


def axis_last(axis: int) -> MakeRule:
    """Return a maker of rules for operators that work along one axis: it must be the last in the form.

    `axis`: the operator's axis if a node has no attribute `axis`.
    """

    def make(node: Node, graph: Graph) -> Rule:
        rule = axiswise(node, graph)
        rank = len(rule.shape)
        softmax_axis = node.attributes.get("axis", axis) % max(rank, 1)
        start = (*(a for a in range(rank) if a != softmax_axis), softmax_axis) if rank else ()
        return Rule(start, rule.shape, rule.reads, rule.writes, lambda form: form[-1:] == start[-1:])

    return make


def removing(axes: tuple[int, ...], node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the first input; `axes` are removed from the results' forms."""
    shape = graph.shape(node.inputs[0])

    def writes(form: Form) -> tuple[Form, ...]:
        return (without_axes(form, axes),) * len(node.outputs)

    return Rule(plain(len(shape)), shape, _first_and_alike(node, graph), writes, _fits_kernels)


def _first_and_alike(node: Node, graph: Graph) -> Callable[[Form], tuple[Form, ...]]:
    """Return how inputs are read: an input with the rank of the first shares its form."""
    ranks = [_rank(graph, name) for name in node.inputs]
    return lambda form: tuple(form if rank == ranks[0] else plain(rank) for rank in ranks)


def spatial(node: Node, graph: Graph) -> Rule:
    """Return the rule of an operator that reads one tensor and writes results with channels last."""
    form = channels_last(_rank(graph, node.inputs[0]))
    return Rule(form, graph.shape(node.inputs[0]), lambda _: (form,), lambda _: (form,) * len(node.outputs))


def regrouping(node: Node, graph: Graph) -> Rule:
    """Return a rule of a reshape: an input form is allowed if the output can have the same bytes."""
    before, after = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])

    def writes(form: Form) -> tuple[Form, ...]:
        return (reshaped(form, before, after) or plain(len(after)),)

    def allows(form: Form) -> bool:
        return reshaped(form, before, after) is not None

    def proposes(form: Form) -> Form | None:
        return reshaped(form, after, before)

    return Rule(plain(len(before)), before, lambda form: (form,), writes, allows, proposes)


def flattening(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the input whose first axis is the batch; the result is [N, K]."""
    shape = graph.shape(node.inputs[0])

    def allows(form: Form) -> bool:
        return shape[0] == 1 or core(form, shape)[:1] == (0,)

    result = plain(_rank(graph, node.outputs[0]))
    return Rule(plain(len(shape)), shape, lambda form: (form,), lambda _: (result,), allows)


def _rank(graph: Graph, name: str) -> int:
    return len(graph.shape(name)) if name else 0
