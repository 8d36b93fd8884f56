"""Infers the shapes of all tensors of a model for given sizes of the free dimensions.

Exporters often compute paddings and target shapes in the graph, which ONNX shape inference cannot follow. So
integer arithmetic on small constants and shapes is evaluated first.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.control_flow import body_model, output_types
from edgekit_toolkit.onnx_graph.index import attribute, copy_model, set_items
from edgekit_toolkit.onnx_graph.specs import dimension, real_inputs
from edgekit_toolkit.onnx_graph.traversal import bodies

# Enough for any shape, axes or padding. Weights are larger or floating-point.
_MAX_FOLDED_ELEMENTS = 256
_SHAPE_ARITHMETIC = {
    "Add",
    "And",
    "Cast",
    "Concat",
    "Constant",
    "ConstantOfShape",
    "Div",
    "Equal",
    "Gather",
    "Identity",
    "Mod",
    "Mul",
    "Not",
    "ReduceProd",
    "Reshape",
    "Slice",
    "Squeeze",
    "Sub",
    "Transpose",
    "Unsqueeze",
    "Where",
}


def with_shapes(model: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """Return a copy of `model` with the free dimensions set to `dims` and with all shapes inferred.

    Raises:
        ModelError: A free dimension has no size in `dims`, or shapes contradict each other.
    """
    bound = copy_model(model)
    # Before version 4 an initializer had to be an input too, and folding makes initializers that are not.
    bound.ir_version = max(bound.ir_version, 4)
    _bind(bound.graph, dims)
    stated: dict[str, onnx.TypeProto] = {}
    while True:
        # Stale dynamic shapes would hide shapes that inference can find now.
        known = (onnx.ValueInfoProto(name=name, type=kind) for name, kind in stated.items())
        set_items(bound.graph.value_info, known)
        produced = {name for node in bound.graph.node for name in node.output}
        for value in bound.graph.output:
            if value.name in produced:  # that of an input or a weight is stated, not inferred
                value.type.tensor_type.ClearField("shape")
        bound = _inferred(bound)
        if _fold(bound):
            continue
        more = _control_flow_types(bound, stated)
        if not more:
            return bound
        stated |= more


def _control_flow_types(
    model: onnx.ModelProto, known_types: Mapping[str, onnx.TypeProto]
) -> dict[str, onnx.TypeProto]:
    """Return the types of the outputs of control flow that follow from its bodies; inference finds few."""
    graph = model.graph
    types = {value.name: value.type for value in (*graph.input, *graph.value_info, *graph.output)}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    types_by_output: dict[str, onnx.TypeProto] = {}
    for node in graph.node:
        if not bodies(node) or all(name in known_types or not name for name in node.output):
            continue
        try:
            inner_models = [body_model(model, node, body, types, initializers) for body in bodies(node)]
            shaped = [with_shapes(inner, {}) for inner in inner_models]
            types_by_output |= output_types(node, shaped, types, initializers)
        except ModelError:  # not known yet, or never: a caller that needs the shape reports it
            continue
    return {name: kind for name, kind in types_by_output.items() if name not in known_types}


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with inferred shapes, through the values of shape arithmetic where that works.

    Raises:
        ModelError: shapes contradict each other.
    """
    try:
        return shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except (shape_inference.InferenceError, ValueError) as error:
        reason = str(error).partition("\n")[0]
    # onnx 1.23 follows values wrongly where vectors of different lengths are combined, and then sees a fault.
    try:
        return shape_inference.infer_shapes(model, strict_mode=True)
    except (shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"shapes cannot be inferred: {reason}") from error


def _bind(graph: onnx.GraphProto, dims: Mapping[str, int]) -> None:
    for value in real_inputs(graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            name = dimension(value.name, axis, dim)
            if isinstance(name, int):
                continue
            if dims.get(name, 0) < 1:
                raise ModelError(
                    f"input {value.name!r}: axis {axis}: expected a size of at least 1 for the free dimension"
                    f" {name!r}, got {dims.get(name, 'none')}; bind it, for instance {name}=1"
                )
            dim.dim_value = dims[name]


def _fold(model: onnx.ModelProto) -> bool:
    """Replace shape arithmetic with known inputs by constants, in place; False if there is none."""
    graph = model.graph
    shapes = {
        value.name: value.type.tensor_type.shape
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.HasField("shape")  # without it the number of axes is unknown, not 0
    }
    values = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if math.prod(tensor.dims) <= _MAX_FOLDED_ELEMENTS
    }
    opsets = {item.domain: item.version for item in model.opset_import}
    nodes = []
    for node in graph.node:
        result = _value(node, values, shapes, opsets)
        if result is None:
            nodes.append(node)
        else:
            values[node.output[0]] = result
            graph.initializer.append(numpy_helper.from_array(result, node.output[0]))
    folded = len(nodes) < len(graph.node)
    set_items(graph.node, nodes)
    return folded


def _value(
    node: onnx.NodeProto,
    values: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, onnx.TensorShapeProto],
    opsets: dict[str, int],
) -> NDArray[Any] | None:
    if node.domain not in {"", "ai.onnx"} or len(node.output) != 1:
        return None
    if node.op_type in {"Shape", "Size"}:
        shape = shapes.get(node.input[0])
        if shape is None or not all(dim.HasField("dim_value") for dim in shape.dim):
            return None
        if node.op_type == "Size":
            return np.array(math.prod(dim.dim_value for dim in shape.dim), np.int64)
        bounds = slice(attribute(node, "start", 0), attribute(node, "end"))  # since opset 15
        return np.array([dim.dim_value for dim in shape.dim][bounds], np.int64)
    if node.op_type not in _SHAPE_ARITHMETIC or not all(name in values for name in node.input if name):
        return None
    if node.op_type == "ConstantOfShape" and math.prod(values[node.input[0]].tolist()) > _MAX_FOLDED_ELEMENTS:
        return None
    feeds = {name: values[name] for name in node.input if name}
    try:
        (result,) = ReferenceEvaluator(node, opsets=opsets).run(None, feeds)
    except (LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        # The reference lacks some old versions of operators; nodes that it cannot evaluate stay in the graph.
        return None
    array = np.asarray(result)
    return array if array.size <= _MAX_FOLDED_ELEMENTS else None
