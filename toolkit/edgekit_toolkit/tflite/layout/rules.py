"""The layout rules of operators. A rule states the forms (see `forms`) in which an operator can work.

The *work form* of a node is the form of its result or of its first input, depending on the operator. It
determines the forms of the other tensors of the node.
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
        start: A work form that is always possible.
        shape: The ONNX shape of the tensor to which the work form applies.
        reads: Returns the form of each input for a work form.
        writes: Returns the form of each output for a work form.
        allows: Returns whether a work form is possible. If it is None, only `start` is possible.
        proposes: Returns the work form for which the result has a given form, or None if there is none. If
            `proposes` itself is None, the work form equals the form of the result.
    """

    start: Form
    shape: Shape
    reads: Callable[[Form], tuple[Form, ...]]
    writes: Callable[[Form], tuple[Form, ...]]
    allows: Callable[[Form], bool] | None = None
    proposes: Callable[[Form], Form | None] | None = None


MakeRule: TypeAlias = Callable[[Node, Graph], Rule]


def as_onnx(node: Node, graph: Graph) -> Rule:
    """Return the rule of an operator that keeps the ONNX order of axes in all its tensors."""
    reads = tuple(plain(_rank(graph, name)) for name in node.inputs)
    writes = tuple(plain(_rank(graph, name)) for name in node.outputs)
    return Rule((), (), lambda _: reads, lambda _: writes)


def elementwise(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the result. Smaller operands are broadcast as in ONNX."""
    shape = graph.shape(node.outputs[0])
    ranks = [_rank(graph, name) for name in node.inputs]

    def reads(form: Form) -> tuple[Form, ...]:
        return tuple(broadcast_form(form, rank) for rank in ranks)

    return Rule(plain(len(shape)), shape, reads, lambda form: (form,) * len(node.outputs), _fits_kernels)


def axiswise(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the first input.

    The results and the inputs of equal rank have the same form. Other inputs keep the ONNX order.
    """
    shape = graph.shape(node.inputs[0])
    reads = _first_and_alike(node, graph)
    return Rule(plain(len(shape)), shape, reads, lambda form: (form,) * len(node.outputs), _fits_kernels)


def _fits_kernels(form: Form) -> bool:
    """Whether inserted axes leave a form within the axes that most kernels and XNNPACK take."""
    return NEW not in form or len(form) <= MAX_KERNEL_RANK


def axis_last(axis: int) -> MakeRule:
    """Return a function that makes rules for operators along one axis, which must be stored last.

    `axis` is the default for nodes without an attribute `axis`.
    """

    def make(node: Node, graph: Graph) -> Rule:
        rule = axiswise(node, graph)
        rank = len(rule.shape)
        softmax_axis = node.attributes.get("axis", axis) % max(rank, 1)
        start = (*(a for a in range(rank) if a != softmax_axis), softmax_axis) if rank else ()
        return Rule(start, rule.shape, rule.reads, rule.writes, lambda form: form[-1:] == start[-1:])

    return make


def removing(axes: tuple[int, ...], node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the first input. The results have this form without `axes`."""
    shape = graph.shape(node.inputs[0])

    def writes(form: Form) -> tuple[Form, ...]:
        return (without_axes(form, axes),) * len(node.outputs)

    return Rule(plain(len(shape)), shape, _first_and_alike(node, graph), writes, _fits_kernels)


def _first_and_alike(node: Node, graph: Graph) -> Callable[[Form], tuple[Form, ...]]:
    """Return how inputs are read: an input with the rank of the first shares its form."""
    ranks = [_rank(graph, name) for name in node.inputs]
    return lambda form: tuple(form if rank == ranks[0] else plain(rank) for rank in ranks)


def spatial(node: Node, graph: Graph) -> Rule:
    """Return the rule of an operator with one input, which reads and writes channels-last tensors."""
    form = channels_last(_rank(graph, node.inputs[0]))
    return Rule(form, graph.shape(node.inputs[0]), lambda _: (form,), lambda _: (form,) * len(node.outputs))


def regrouping(node: Node, graph: Graph) -> Rule:
    """Return the rule of a reshape. It allows the input forms for which no data are moved."""
    before, after = graph.shape(node.inputs[0]), graph.shape(node.outputs[0])

    def writes(form: Form) -> tuple[Form, ...]:
        return (reshaped(form, before, after) or plain(len(after)),)

    def allows(form: Form) -> bool:
        return reshaped(form, before, after) is not None

    def proposes(form: Form) -> Form | None:
        return reshaped(form, after, before)

    return Rule(plain(len(before)), before, lambda form: (form,), writes, allows, proposes)


def flattening(node: Node, graph: Graph) -> Rule:
    """Return a rule that allows any form of the input with the batch axis first. The result is [N, K]."""
    shape = graph.shape(node.inputs[0])

    def allows(form: Form) -> bool:
        return shape[0] == 1 or core(form, shape)[:1] == (0,)

    result = plain(_rank(graph, node.outputs[0]))
    return Rule(plain(len(shape)), shape, lambda form: (form,), lambda _: (result,), allows)


def _rank(graph: Graph, name: str) -> int:
    return len(graph.shape(name)) if name else 0
