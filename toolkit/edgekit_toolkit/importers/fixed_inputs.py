"""Binds inputs of an ONNX model to constants, so that passes can fold the nodes that depend on them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.tensors import DTYPES, TensorSpec
from edgekit_toolkit.importers.model_file import SourceModel, errors_with_path
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.specs import tensor_specs

_MIN_IR_VERSION = 4  # before, an initializer had to be an input too


def fix_inputs(source: SourceModel[Model], values: Mapping[str, JsonValue]) -> SourceModel[Model]:
    """Return the model with these inputs converted to initializers.

    `values` is a dict from input name to a number for all elements, or to nested lists in the input's shape.

    Raises:
        ModelError: An input is unknown or cannot have its value, no input would remain, or the model is a
            `.tflite`.
    """
    if not values:
        return source
    with errors_with_path(source.path):
        if not isinstance(source.model, OnnxModel):
            raise ModelError("--fix binds inputs of ONNX models, not of a .tflite; give the ONNX model")
        specs = {spec.name: spec for spec in source.inputs}
        if unknown := values.keys() - specs.keys():
            raise ModelError(f"--fix: no input is named '{min(unknown)}'; inputs are {', '.join(specs)}")
        if len(values) == len(specs):
            raise ModelError("--fix binds every input: the model would always give the same; leave one free")
        proto = copy_model(source.model.proto)
        free = [value for value in proto.graph.input if value.name not in values]
        del proto.graph.input[:]
        proto.graph.input.extend(free)
        proto.graph.initializer.extend(
            numpy_helper.from_array(_constant(specs[name], value), name) for name, value in values.items()
        )
        proto.ir_version = max(proto.ir_version, _MIN_IR_VERSION)
        inputs, outputs = tensor_specs(proto)
    return replace(source, model=OnnxModel(proto), inputs=inputs, outputs=outputs)


def _constant(spec: TensorSpec, value: JsonValue) -> NDArray[Any]:
    dtype = DTYPES[spec.dtype]
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise ModelError(f"--fix {spec.name}: {error}") from error
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype) if array.dtype.kind in "biuf" else array
    is_exact = dtype.kind == "f" or np.array_equal(result, array)
    if result.dtype != dtype or not is_exact or not np.isfinite(result).all():
        raise ModelError(f"--fix {spec.name}: {value} is not {spec.dtype}, which the input takes")
    sizes = [size for size in spec.shape if isinstance(size, int)]
    if result.ndim == 0 and len(sizes) == len(spec.shape):
        result = np.full(sizes, result, dtype)
    try:
        spec.check(result)
    except DataError as error:
        raise ModelError(f"--fix: {error}; give nested lists of that shape, such as [[1, 2]]") from error
    return result
