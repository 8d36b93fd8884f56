"""The TFLite tensors of ONNX values, and the values that are only views of others.

Operators such as Transpose, Squeeze or Unsqueeze only rename the axes of a value, so no tensor is made for
their result. Data are moved only when a node reads the value in a new form.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from edgekit_toolkit.tflite.builder import Builder, Tensor
from edgekit_toolkit.tflite.layout.forms import NEW, Form, complete, conversion_cost, core, held_shape, plain
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.view import Graph, Node


@dataclass(frozen=True, slots=True)
class View:
    """A value that is equal to another value except for the order of axes and axes of size 1.

    Attributes:
        root: The name of the value that is stored in a tensor.
        axes: The axis of the root for each axis of the view, or `NEW` for an added axis of size 1.
    """

    root: str
    axes: Form

    def to_root(self, form: Form) -> Form:
        return tuple(NEW if axis == NEW else self.axes[axis] for axis in form)

    def from_root(self, form: Form) -> Form:
        """Return the form in which a tensor stores the view, if it stores the root in `form`.

        Added axes are inserted after the preceding axis.
        """
        names = {axis: index for index, axis in enumerate(self.axes) if axis != NEW}
        return complete([names.get(axis, NEW) for axis in form], len(self.axes))


def find_views(graph: Graph) -> dict[str, View]:
    """Return the values that are only views, by name. Their roots are not views."""
    views: dict[str, View] = {}
    for node in graph.nodes:
        axes = _renaming(node, graph)
        if axes is None:
            continue
        source = views.get(node.inputs[0])
        root = node.inputs[0] if source is None else source.root
        views[node.outputs[0]] = View(root, axes if source is None else source.to_root(axes))
    return views


def _renaming(node: Node, graph: Graph) -> Form | None:
    """Return for each axis of a node's output the axis of its first input; None if it computes."""
    if node.domain or not node.inputs or graph.is_constant(node.inputs[0]):
        return None
    source, result = node.inputs[0], node.outputs[0]
    if source not in graph.shapes or result not in graph.shapes:
        return None
    before, after = graph.shapes[source], graph.shapes[result]
    if node.op_type == "Dropout" and not _is_idle(node, graph):
        return None
    if node.op_type in {"Identity", "Dropout"} or (
        node.op_type == "Cast" and graph.dtypes.get(source) == graph.dtypes.get(result)
    ):
        return plain(len(before))
    if node.op_type == "Transpose":
        return tuple(node.attributes.get("perm", reversed(plain(len(before)))))
    if node.op_type in {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand"}:
        longer = [axis for axis, size in enumerate(before) if size != 1]
        if [before[axis] for axis in longer] == [size for size in after if size != 1]:
            remaining = iter(longer)
            return tuple(NEW if size == 1 else next(remaining) for size in after)
    return None


def _is_idle(node: Node, graph: Graph) -> bool:
    """Whether a Dropout drops nothing, and nobody reads its mask."""
    training = graph.constants.get(node.input(2))
    is_off = not node.input(2) or (training is not None and not training.any())
    return is_off and not any(graph.is_read(name) for name in node.outputs[1:])


class Values:
    """The TFLite tensors of the values of the ONNX model. A value can have a tensor in several forms."""

    def __init__(self, graph: Graph, views: Mapping[str, View], builder: Builder) -> None:
        self._graph = graph
        self._views = views
        self._builder = builder
        self._tensors: dict[str, dict[Form, Tensor]] = {}

    def give(self, name: str, form: Form, tensor: Tensor) -> None:
        """Record that `tensor` stores the value `name` in `form`.

        Raises:
            RefusedError: The tensor's shape differs from the result of ONNX's shape inference.
        """
        expected = held_shape(form, self._graph.shape(name))
        if tensor.shape != expected:
            raise RefusedError(
                f"TFLite computes '{name}' with the held shape {list(tensor.shape)}, and ONNX's shape"
                f" inference says {list(expected)}"
            )
        if not tensor.name:
            letters = "".join("_" if axis == NEW else str(axis) for axis in form)
            tensor.name = name if form == plain(len(form)) else f"{name};{letters}"
        self._tensors.setdefault(name, {})[form] = tensor

    def is_held(self, name: str) -> bool:
        """Return whether there is a tensor for the value `name`, or for its root if it is a view."""
        view = self._views.get(name)
        return (name if view is None else view.root) in self._tensors

    def read(self, name: str, form: Form) -> Tensor:
        """Return a tensor with the value `name` in `form`. If there is none, operators are added to make it.

        Raises:
            RefusedError: The shape is unknown, or TFLite lacks the element type.
            KeyError: There is no tensor for the value yet, see `is_held`.
        """
        if self._graph.is_constant(name) and name not in self._tensors:
            constant = self._builder.constant(self._graph.constants[name], name)
            self._tensors[name] = {plain(len(constant.shape)): constant}
        view = self._views.get(name)
        root = name if view is None else view.root
        root_form = form if view is None else view.to_root(form)
        shape = self._graph.shape(root)
        tensors = self._tensors[root]
        if root_form not in tensors:
            source = min(tensors, key=lambda other: conversion_cost(other, root_form, shape))
            tensors[root_form] = self._converted(tensors[source], source, root_form, shape)
        return tensors[root_form]

    def _converted(self, tensor: Tensor, source: Form, target: Form, shape: tuple[int, ...]) -> Tensor:
        if core(source, shape) != core(target, shape):
            if sorted(source) != sorted(target):
                short = [axis for axis in target if axis == NEW or shape[axis] == 1]
                source = (*short, *core(source, shape))
                tensor = self._builder.reshape(tensor, held_shape(source, shape))
            tensor = self._builder.transpose(tensor, _order(source, target))
        return self._builder.reshape(tensor, held_shape(target, shape))


def _order(source: Form, target: Form) -> list[int]:
    """Return the places in `source` of the axes of `wanted`; inserted axes are taken in order."""
    positions: dict[int, list[int]] = {}
    for index, axis in enumerate(source):
        positions.setdefault(axis, []).append(index)
    return [positions[axis].pop(0) for axis in target]
