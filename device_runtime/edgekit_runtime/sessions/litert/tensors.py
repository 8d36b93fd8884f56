"""Reads the inputs and outputs of a `.tflite` model from an interpreter."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.litert.quantized import CODE_DTYPES, Quantization
from edgekit_runtime.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """An input or output of a model.

    Attributes:
        spec: The specification of the tensor in the session.
        shape: The shape of the tensor that was allocated after loading.
        codes: The quantization to convert to and from float32, or None for no conversion.
    """

    spec: TensorSpec
    index: int
    shape: tuple[int, ...]
    codes: Quantization | None


def read_tensors(
    interpreter: Any, *, float_io: bool
) -> tuple[tuple[ModelTensor, ...], tuple[ModelTensor, ...]]:
    """Return the inputs and the outputs of the first subgraph.

    Args:
        interpreter: An interpreter of ai-edge-litert or tflite-runtime.
        float_io: Whether the session converts quantized tensors from and to float32.

    Raises:
        BackendError: A tensor has an unsupported type, an invalid quantization or a name that is not text, or
            two tensors have the same name.
    """
    try:
        return _read(interpreter, float_io=float_io)
    except (ValueError, TypeError, RuntimeError) as cause:  # a name that is not UTF-8, an unknown type
        raise BackendError(f"backend 'litert': the inputs and outputs cannot be read: {cause}") from cause


def _read(interpreter: Any, *, float_io: bool) -> tuple[tuple[ModelTensor, ...], tuple[ModelTensor, ...]]:
    details = (interpreter.get_input_details(), interpreter.get_output_details())
    named = _signature(interpreter, details) or tuple(_by_tensor_name(side) for side in details)
    inputs, outputs = (
        tuple(_read_tensor(name, detail, float_io=float_io) for name, detail in side.items())
        for side in named
    )
    return inputs, outputs


def _by_tensor_name(details: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    named: dict[str, Mapping[str, Any]] = {}
    for detail in details:
        name = detail["name"]
        if name in named and named[name]["index"] != detail["index"]:
            raise BackendError(
                f"backend 'litert': two tensors have the name '{name}', and there is no signature that tells"
                " them apart; rename one"
            )
        named[name] = detail
    return named


def _signature(
    interpreter: Any, details: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[dict[str, Mapping[str, Any]], ...] | None:
    """Return the tensor details by the names of the only signature, or None if it cannot be used."""
    keys = list(interpreter.get_signature_list())
    if len(keys) != 1 or not keys[0]:  # the engine treats an empty key as none
        return None
    runner = interpreter.get_signature_runner(keys[0])
    named = (runner.get_input_details(), runner.get_output_details())
    for side, tensors in zip(named, details, strict=True):
        # A signature may belong to another subgraph, or leave out an input; only `invoke` runs it all.
        if {_identity(detail) for detail in side.values()} != {_identity(detail) for detail in tensors}:
            return None
    return named


def _identity(detail: Mapping[str, Any]) -> tuple[int, str]:
    return detail["index"], detail["name"]


def _read_tensor(name: str, detail: Mapping[str, Any], *, float_io: bool) -> ModelTensor:
    dtype = np.dtype(detail["dtype"]).name
    shape = tuple(int(size) for size in detail["shape"])
    # Files of old converters have no signature of shapes.
    signature = [int(size) for size in detail["shape_signature"]] or list(shape)
    free = tuple(f"{name}_{axis}" if size < 0 else size for axis, size in enumerate(signature))
    stored = _read_quantization(name, dtype, detail)
    codes = stored if float_io else None
    try:
        spec = TensorSpec(name, dtype if codes is None else "float32", free)
    except DataError as cause:
        raise BackendError(f"backend 'litert': {cause}") from cause
    return ModelTensor(spec, int(detail["index"]), shape, codes)


def _read_quantization(name: str, dtype: str, detail: Mapping[str, Any]) -> Quantization | None:
    parameters = detail["quantization_parameters"]
    scales, zero_points = parameters["scales"], parameters["zero_points"]
    if len(scales) == 0 or dtype not in CODE_DTYPES:
        return None
    if len(scales) > 1 or len(zero_points) != 1:
        raise BackendError(
            f"backend 'litert': '{name}' has {len(scales)} scales and {len(zero_points)} zero points,"
            " expected one each; inputs and outputs have one scale a tensor"
        )
    return Quantization(name, dtype, float(scales[0]), int(zero_points[0]))
