"""ONNX to TFLite: the order of the steps, and the list of everything that is not covered."""

from collections.abc import Mapping

import numpy as np
import onnx

from edgekit_toolkit.tflite.builder import TENSOR_TYPES, Builder, Tensor
from edgekit_toolkit.tflite.forms import Form, plain
from edgekit_toolkit.tflite.fusion import fuse
from edgekit_toolkit.tflite.layout import plan_forms
from edgekit_toolkit.tflite.ops import OPERATORS
from edgekit_toolkit.tflite.prepare import check_operators, prepare
from edgekit_toolkit.tflite.refusal import ConversionError, Refusal, RefusedError, refuse_all
from edgekit_toolkit.tflite.registry import Operator
from edgekit_toolkit.tflite.rules import Rule
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.values import Values, View, find_views
from edgekit_toolkit.tflite.view import Graph, Node, graph_of
from edgekit_toolkit.tflite.writer import check_size, write


def convert(model: onnx.ModelProto, dims: Mapping[str, int]) -> bytes:
    """Return `model` as a TFLite file that takes and gives the same tensors.

    Names, order, element types and shapes of inputs and outputs stay as they are in ONNX; images that the
    model takes as [N, C, H, W] are transposed inside. The model is not changed.

    Args:
        model: float32; constants should be folded (see `passes.pipeline.optimise`).
        dims: size of each free dimension of the inputs, by name.

    Raises:
        ConversionError: nodes that are not covered (all are named), a free dimension without a size, or
            weights that are too large for one file.
        BackendError: ai-edge-litert is not installed.
    """
    graph = fuse(graph_of(prepare(model, dims)))
    check_operators(graph.nodes)
    views = find_views(graph)
    rules, refusals = _rules(graph, views)
    if refusals:
        raise refuse_all(refusals)
    forms = plan_forms(graph, rules, views)
    builder = Builder()
    inputs, outputs = _write_nodes(graph, builder, views, list(zip(rules, forms, strict=True)))
    check_size(builder)
    return write(builder, inputs, outputs)


def _rules(graph: Graph, views: Mapping[str, View]) -> tuple[list[Rule | None], tuple[Refusal, ...]]:
    rules: list[Rule | None] = []
    refusals = []
    for node in graph.nodes:
        rule = None
        if not node.outputs or node.outputs[0] not in views:
            try:
                rule = _operator(node).rule(node, graph)
            except RefusedError as refused:
                refusals.append(_refusal(node, refused))
        rules.append(rule)
    return rules, tuple(refusals)


def _operator(node: Node) -> Operator:
    if node.op_type not in OPERATORS:
        raise RefusedError("its result depends on sizes or values that are not known before the model runs")
    return OPERATORS[node.op_type]


def _write_nodes(
    graph: Graph, builder: Builder, views: Mapping[str, View], plan: list[tuple[Rule | None, Form]]
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Write all nodes; returns names and tensors of the inputs and of the outputs.

    A node that is refused leaves its outputs as if it had made them, so that every refusal is found.
    """
    values = Values(graph, views, builder)
    inputs = [(name, _input(graph, builder, name)) for name in graph.inputs]
    for name, tensor in inputs:
        values.give(name, plain(len(tensor.shape)), tensor)
    refusals = []
    for node, (rule, form) in zip(graph.nodes, plan, strict=True):
        if rule is None:
            continue
        try:
            OPERATORS[node.op_type].emit(Step(node, graph, builder, values, (rule, form)))
        except RefusedError as refused:
            refusals.append(_refusal(node, refused))
            _stand_in(node, graph, builder, values, rule.writes(form))
    if refusals:
        raise refuse_all(tuple(refusals))
    return inputs, _outputs(graph, builder, values)


def _refusal(node: Node, refused: RefusedError) -> Refusal:
    return Refusal(node.operator, node.place, str(refused))


def _stand_in(node: Node, graph: Graph, builder: Builder, values: Values, forms: tuple[Form, ...]) -> None:
    for name, form in zip(node.outputs, forms, strict=True):
        if name:
            shape = graph.shapes.get(name, ())
            held = [1 if axis < 0 else max(shape[axis], 1) for axis in form]
            tensor = Tensor(len(builder.tensors), tuple(held), np.dtype(np.float32))
            builder.tensors.append(tensor)
            values.give(name, form, tensor)


def _input(graph: Graph, builder: Builder, name: str) -> Tensor:
    dtype, shape = graph.dtype(name), graph.shape(name)
    if dtype.name not in TENSOR_TYPES or 0 in shape:
        raise ConversionError(
            f"input '{name}' ({dtype.name} {list(shape)}): expected elements of {', '.join(TENSOR_TYPES)} and"
            " no dimension of size 0; export the model with a float32 input"
        )
    return builder.tensor(shape, dtype, name)


def _outputs(graph: Graph, builder: Builder, values: Values) -> list[tuple[str, Tensor]]:
    """Return the tensors of the outputs, each one of its own and under its own name."""
    taken: set[int] = {tensor.index for tensor in builder.tensors if tensor.name in graph.inputs}
    outputs = []
    for name in graph.outputs:
        tensor = values.read(name, plain(len(graph.shape(name))))
        if tensor.index in taken or tensor.data is not None:
            tensor = builder.copy(tensor, tensor.shape)
        taken.add(tensor.index)
        tensor.name = name
        outputs.append((name, tensor))
    return outputs
