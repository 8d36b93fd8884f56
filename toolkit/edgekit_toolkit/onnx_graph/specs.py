"""The specs of the inputs and outputs of an ONNX model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import onnx
from onnx import helper

from edgekit_runtime.errors import DataError, ModelError
from edgekit_runtime.tensors import DTYPES, TensorSpec

UNNAMED_DIMENSIONS = frozenset({"", "?"})  # some exporters write `?` for every dimension

BATCH_NAME: Final = re.compile(r"n|b|bs|batch.*", re.IGNORECASE)
# Names of a leading dimension that does not count samples.
SIZE_NAME: Final = re.compile(
    r"[chwtl]|channels?|height|width|(.*[_-])?(seq|len|time|frame|step|token)\w*", re.IGNORECASE
)


def tensor_specs(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the specs of the inputs and the specs of the outputs.

    A graph input that is also an initializer is not included. A free dimension without a name is named after
    the tensor and the axis, such as `x_0`.

    Raises:
        ModelError: A tensor is a sequence or map, has an unknown rank, or a type that numpy does not support.
    """
    return input_specs(model), tuple(_spec(value, "output") for value in model.graph.output)


def input_specs(model: onnx.ModelProto) -> tuple[TensorSpec, ...]:
    """Return the specs of the inputs, see `tensor_specs`.

    Raises:
        ModelError: An input has a type that `tensor_specs` does not support.
    """
    return tuple(_spec(value, "input") for value in real_inputs(model.graph))


def common_specs(first: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return specs that hold for two models, in the order of the first model.

    A dimension is free only if it is free in both models.

    Raises:
        DataError: The models differ in the names, dtypes, ranks or fixed sizes of their tensors.
    """
    named = {spec.name: spec for spec in other}
    if named.keys() != {spec.name for spec in first}:
        raise DataError(f"has the tensors {sorted(named)}, expected {sorted(spec.name for spec in first)}")
    return tuple(_common(spec, named[spec.name]) for spec in first)


def _common(first: TensorSpec, other: TensorSpec) -> TensorSpec:
    alike = len(first.shape) == len(other.shape) and all(
        size == own or isinstance(size, str) or isinstance(own, str)
        for size, own in zip(first.shape, other.shape, strict=True)
    )
    if first.dtype != other.dtype or not alike:
        raise DataError(
            f"tensor '{first.name}' is {other.dtype} {list(other.shape)}, expected {first.dtype}"
            f" {list(first.shape)}"
        )
    shape = (
        own if isinstance(size, str) and isinstance(own, int) else size
        for size, own in zip(first.shape, other.shape, strict=True)
    )
    return replace(first, shape=tuple(shape))


def real_inputs(graph: onnx.GraphProto) -> Sequence[onnx.ValueInfoProto]:
    """Return the inputs of the graph that are not initializers."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in stored]


def dimension(name: str, axis: int, size: onnx.TensorShapeProto.Dimension) -> int | str:
    """Return the size of one dimension of tensor `name`, or the name of the dimension if it is free."""
    if size.HasField("dim_value") and size.dim_value >= 0:  # -1 is some exporters' word for free
        return size.dim_value
    return f"{name}_{axis}" if size.dim_param in UNNAMED_DIMENSIONS else size.dim_param


def free_dims(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the unique names of the free dimensions, in the order of the inputs and axes."""
    return tuple(dict.fromkeys(size for spec in inputs for size in spec.shape if isinstance(size, str)))


def batch_dims(inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the names of the free dimensions that are batch sizes.

    These are dimensions whose names match `BATCH_NAME`. In an input without such a dimension, the first
    dimension is a batch size if it is free and its name does not match `SIZE_NAME`.
    """
    batch = set()
    for spec in inputs:
        free = [size for size in spec.shape if isinstance(size, str)]
        named = {name for name in free if BATCH_NAME.fullmatch(name)}
        batch |= named
        if not named and free and spec.shape[0] == free[0] and not SIZE_NAME.fullmatch(free[0]):
            batch.add(free[0])
    return tuple(name for name in free_dims(inputs) if name in batch)


def bound_shape(spec: TensorSpec, dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with the sizes in `dims`. A free first dimension without a size becomes 1.

    Raises:
        DataError: Another free dimension has no size in `dims`.
    """
    shape = []
    for axis, size in enumerate(spec.shape):
        if isinstance(size, str):
            if size not in dims and axis > 0:
                raise DataError(
                    f"input '{spec.name}' {list(spec.shape)}: dimension '{size}' is free; give it a size with"
                    f" --dim {size}=VALUE"
                )
            size = dims.get(size, 1)  # noqa: PLW2901 - the bound size takes the place of the name
        shape.append(size)
    return tuple(shape)


def _spec(value: onnx.ValueInfoProto, role: str) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        kind_name = (kind or "nothing").removesuffix("_type").replace("_", " ")
        raise ModelError(f"{role} '{value.name}' holds a {kind_name}, expected a tensor; export without it")
    tensor = value.type.tensor_type
    dtype = _dtype_name(tensor.elem_type)
    if dtype not in DTYPES:
        raise ModelError(
            f"{role} '{value.name}' holds {dtype}, which numpy arrays cannot; export the model with one of"
            f" {', '.join(DTYPES)} there"
        )
    if not tensor.HasField("shape"):
        raise ModelError(
            f"{role} '{value.name}' has no known number of dimensions; export the model with shapes (free"
            " dimensions may stay free)"
        )
    shape = tuple(dimension(value.name, axis, size) for axis, size in enumerate(tensor.shape.dim))
    try:
        return TensorSpec(value.name, dtype, shape)
    except DataError as err:  # no name, or more dimensions than numpy can hold
        raise ModelError(f"{role}: {err}; export the model again") from err


def _dtype_name(element_type: int) -> str:
    if element_type == onnx.TensorProto.STRING:
        return "strings"
    try:
        return str(helper.tensor_dtype_to_np_dtype(element_type).name)
    except KeyError:
        return f"element type {element_type}"
