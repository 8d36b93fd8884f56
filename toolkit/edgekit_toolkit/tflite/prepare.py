"""Prepares a model for the conversion: fixes sizes, computes constants and infers shapes."""

from collections.abc import Iterable, Mapping
from typing import Final

import onnx

from edgekit_runtime.errors import EdgekitError
from edgekit_toolkit.onnx_graph.index import copy_model, opset
from edgekit_toolkit.onnx_graph.shapes import with_shapes
from edgekit_toolkit.onnx_graph.specs import dimension, real_inputs
from edgekit_toolkit.passes import fold_constants, resolve_conditions
from edgekit_toolkit.passes.file_form import TARGET_OPSET, convert_opset
from edgekit_toolkit.tflite.kernel_types import widen
from edgekit_toolkit.tflite.lowering import lower
from edgekit_toolkit.tflite.lowering.body import LOWERINGS
from edgekit_toolkit.tflite.ops import OPERATORS
from edgekit_toolkit.tflite.refusal import ConversionError, Refusal, refuse_all
from edgekit_toolkit.tflite.view import Node, node_of

NO_MAPPING: Final = "there is no mapping to TFLite"
# Protobuf cannot serialise more, and shape inference works on serialised models.
MAX_MODEL_BYTES: Final = (1 << 31) - 1
MIN_OPSET: Final = 13
# Operators that vanish when constants are computed. One that remains depends on the inputs.
CONSTANT_OPERATORS: Final = frozenset({"Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size"})


def prepare(model: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    """Return a copy of a model that is ready to be written as TFLite.

    Free dimensions get the sizes `dims`, nodes with constant inputs are computed, operators that TFLite lacks
    are replaced, and all shapes are inferred.

    Raises:
        ConversionError: A free dimension has no size, the model is too large, or its shapes or opset are
            unknown.
    """
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise ConversionError(
            f"the model has {model.ByteSize()} bytes, and at most {MAX_MODEL_BYTES} can be written as TFLite;"
            " choose a smaller model for a device"
        )
    bound = _bound(model, dims)
    if opset(bound) < MIN_OPSET:
        bound = _converted(bound)
    try:
        folded = _folded(bound)
        while resolve_conditions.inline_branches(folded.graph):  # sizes are known here
            folded = _folded(folded)
        shaped = with_shapes(folded, {})
        while lower(shaped):
            shaped = with_shapes(_folded(shaped), {})
        return with_shapes(widen(shaped), {})
    except EdgekitError as cause:
        check_operators(node_of(node) for node in model.graph.node)
        raise ConversionError(f"the model cannot be written as TFLite: {cause}") from cause


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    return fold_constants.run(with_shapes(model, {}), max_grown_bytes=MAX_MODEL_BYTES)


def _converted(model: onnx.ModelProto) -> onnx.ModelProto:
    try:
        return convert_opset(model)
    except Exception as cause:  # the converter's exceptions have no common base
        check_operators(node_of(node) for node in model.graph.node)
        raise ConversionError(
            f"the model is in opset {opset(model)}, and cannot be converted to {TARGET_OPSET}:"
            f" {cause}; export it with opset_version={TARGET_OPSET}"
        ) from cause


def check_operators(nodes: Iterable[Node]) -> None:
    """Raise ConversionError with all unsupported operators, if there are any."""
    supported = OPERATORS.keys() | LOWERINGS.keys() | CONSTANT_OPERATORS
    refusals = tuple(
        Refusal(node.operator, node.place, NO_MAPPING)
        for node in nodes
        if node.domain or node.op_type not in supported
    )
    if refusals:
        raise refuse_all(refusals)


def _bound(model: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    bound = copy_model(model)
    missing: dict[str, str] = {}
    for value in real_inputs(bound.graph):
        if value.type.WhichOneof("value") != "tensor_type":
            raise ConversionError(f"input '{value.name}' is no tensor; TFLite takes tensors only")
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            name = dimension(value.name, axis, size)
            if isinstance(name, str):
                if name not in dims:
                    missing[name] = value.name
                else:
                    size.dim_value = dims[name]
    if missing:
        listed = ", ".join(f"'{name}' of input '{source}'" for name, source in missing.items())
        options = " ".join(f"--dim {name}=VALUE" for name in missing)
        raise ConversionError(
            f"TFLite holds fixed sizes, and these dimensions are free: {listed}; give {options}"
        )
    return bound
