"""Golden tensors: recorded inputs with the outputs that a device must reproduce within a tolerance.

Values lie in artifacts as little-endian, C-contiguous arrays without a header. Float inputs may be stored as
8-bit codes, since real inputs (pixels, quantized features) often are such codes and then take a quarter of
the space.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from edgekit_runtime.canonical import Fields, JsonValue
from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import DTYPES, TensorSpec

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def _check_number(value: object, what: str, *, low: float) -> None:
    # A comparison, since math.isfinite() overflows on the huge integers that JSON allows.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= _FLOAT32_MAX:
        raise DataError(f"{what} is {value!r}, expected a finite number of at least {low:g}")


def _decode(
    data: bytes | memoryview, dtype: str, shape: tuple[int, ...], name: str
) -> np.ndarray[Any, np.dtype[Any]]:
    expected_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if len(data) != expected_bytes:
        raise DataError(f"golden tensor '{name}': got {len(data)} bytes, expected {expected_bytes}")
    stored = np.frombuffer(data, DTYPES[dtype].newbyteorder("<")).reshape(shape)
    return stored.astype(
        DTYPES[dtype]
    )  # a copy: native byte order, and no view of a mapping that gets closed


@dataclass(frozen=True, slots=True)
class Codes:
    """How 8-bit codes stand for float32 values: `float32(code) * float32(scale) + float32(offset)`.

    Attributes:
        dtype: `uint8` or `int8`.
        scale, offset: rounded to float32 before use; each of the two operations rounds to float32.

    Raises:
        DataError: a field has the wrong type or value.
    """

    dtype: str
    scale: float
    offset: float
    extra: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.dtype not in ("uint8", "int8"):
            raise DataError(f"codes: dtype is {self.dtype!r}, expected uint8 or int8")
        _check_number(self.scale, "codes: scale", low=-_FLOAT32_MAX)
        _check_number(self.offset, "codes: offset", low=-_FLOAT32_MAX)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON object of this."""
        return {**self.extra, "dtype": self.dtype, "scale": self.scale, "offset": self.offset}

    @classmethod
    def from_json(cls, value: object, where: str) -> "Codes":
        """Return the codes that a parsed JSON object states."""
        fields = Fields(value, where, DataError)
        dtype, scale, offset = fields.take("dtype"), fields.take("scale"), fields.take("offset")
        return cls(dtype, scale, offset, fields.rest())


@dataclass(frozen=True, slots=True)
class GoldenInput:
    """One recorded input.

    Attributes:
        name, dtype, shape: what the session is fed with; every size is stated.
        path: of the artifact with the values.
        codes: how they are stored, or None when they are stored in `dtype`.

    Raises:
        DataError: a field has the wrong type or value.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    codes: Codes | None = None
    extra: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_golden(self.name, self.dtype, self.shape, self.path)
        if self.codes is not None and self.dtype != "float32":
            raise DataError(f"golden tensor '{self.name}': codes need dtype float32, got {self.dtype}")

    @property
    def size_bytes(self) -> int:
        """Size of the artifact."""
        return math.prod(self.shape) * DTYPES[self.codes.dtype if self.codes else self.dtype].itemsize

    def decode(self, data: bytes | memoryview) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the input, dtype and shape as stated.

        Raises:
            DataError: `data` has another size.
        """
        if self.codes is None:
            return _decode(data, self.dtype, self.shape, self.name)
        codes = _decode(data, self.codes.dtype, self.shape, self.name).astype(np.float32)
        result: np.ndarray[Any, np.dtype[Any]] = codes * np.float32(self.codes.scale) + np.float32(
            self.codes.offset
        )
        return result

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON object of this input."""
        spec = TensorSpec(self.name, self.dtype, self.shape, self.extra).to_json()
        return {**spec, "path": self.path, "codes": self.codes.to_json() if self.codes else None}

    @classmethod
    def from_json(cls, value: object, where: str) -> "GoldenInput":
        """Return the golden input that a parsed JSON object states."""
        fields = Fields(value, where, DataError)
        path, codes = fields.take("path"), fields.take("codes")
        name, dtype, shape = fields.take("name"), fields.take("dtype"), tuple(fields.take_list("shape"))
        decoded = None if codes is None else Codes.from_json(codes, f"{where}.codes")
        return cls(name, dtype, shape, path, decoded, fields.rest())


@dataclass(frozen=True, slots=True)
class GoldenOutput:
    """One expected output: right when `|got - expected| <= atol + rtol * |expected|` everywhere.

    Attributes:
        name, dtype, shape: what the session must return.
        path: of the artifact with the values.
        atol, rtol: absolute and relative tolerance, at least 0.

    Raises:
        DataError: a field has the wrong type or value.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    atol: float
    rtol: float
    extra: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_golden(self.name, self.dtype, self.shape, self.path)
        _check_number(self.atol, f"golden tensor '{self.name}': atol", low=0.0)
        _check_number(self.rtol, f"golden tensor '{self.name}': rtol", low=0.0)

    @property
    def size_bytes(self) -> int:
        """Size of the artifact."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def decode(self, data: bytes | memoryview) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the expected output.

        Raises:
            DataError: `data` has another size.
        """
        return _decode(data, self.dtype, self.shape, self.name)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON object of this output."""
        spec = TensorSpec(self.name, self.dtype, self.shape, self.extra).to_json()
        return {**spec, "path": self.path, "atol": self.atol, "rtol": self.rtol}

    @classmethod
    def from_json(cls, value: object, where: str) -> "GoldenOutput":
        """Return the golden output that a parsed JSON object states."""
        fields = Fields(value, where, DataError)
        path, atol, rtol = fields.take("path"), fields.take("atol"), fields.take("rtol")
        name, dtype, shape = fields.take("name"), fields.take("dtype"), tuple(fields.take_list("shape"))
        return cls(name, dtype, shape, path, atol, rtol, fields.rest())


def _check_golden(name: object, dtype: object, shape: tuple[int, ...], path: object) -> None:
    spec = TensorSpec(name, dtype, shape)  # type: ignore[arg-type]  # it checks the types
    if spec.size_bytes is None:
        raise DataError(
            f"golden tensor '{spec.name}': shape {list(shape)} has a free dimension, expected sizes"
        )
    if not isinstance(path, str):
        raise DataError(f"golden tensor '{spec.name}': path is {path!r}, expected a string")


@dataclass(frozen=True, slots=True)
class Golden:
    """The recorded inputs and outputs of one run."""

    inputs: tuple[GoldenInput, ...]
    outputs: tuple[GoldenOutput, ...]
    extra: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    def check(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        """Return when there is a golden tensor for each input and at least one output, and all fit.

        Args:
            inputs: specs of the model's inputs.
            outputs: specs of the model's outputs.

        Raises:
            DataError: a tensor is missing, unknown, there twice, or of another dtype or shape.
        """
        given = [tensor.name for tensor in self.inputs]
        if sorted(given) != sorted(spec.name for spec in inputs):
            raise DataError(
                f"golden inputs are {given}, expected one for each of {[spec.name for spec in inputs]}"
            )
        expected = [tensor.name for tensor in self.outputs]
        if not expected or len(set(expected)) != len(expected):
            raise DataError(f"golden outputs are {expected}, expected at least one and each once")
        specs = {spec.name: spec for spec in outputs}
        if unknown := sorted(set(expected) - set(specs)):
            raise DataError(f"golden outputs hold {unknown}, which the model has not ({sorted(specs)})")
        for golden_input in self.inputs:
            _check_fit(golden_input, next(spec for spec in inputs if spec.name == golden_input.name))
        for golden_output in self.outputs:
            _check_fit(golden_output, specs[golden_output.name])

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON object of this."""
        inputs = [tensor.to_json() for tensor in self.inputs]
        return {**self.extra, "inputs": inputs, "outputs": [tensor.to_json() for tensor in self.outputs]}

    @classmethod
    def from_json(cls, value: object, where: str) -> "Golden":
        """Return the golden tensors that a parsed JSON object states.

        Raises:
            DataError: a field is missing or wrong.
        """
        fields = Fields(value, where, DataError)
        inputs = tuple(
            GoldenInput.from_json(item, f"{where}.inputs[{index}]")
            for index, item in enumerate(fields.take_list("inputs"))
        )
        outputs = tuple(
            GoldenOutput.from_json(item, f"{where}.outputs[{index}]")
            for index, item in enumerate(fields.take_list("outputs"))
        )
        return cls(inputs, outputs, fields.rest())


def _check_fit(tensor: GoldenInput | GoldenOutput, spec: TensorSpec) -> None:
    same_rank = len(tensor.shape) == len(spec.shape)
    if (
        tensor.dtype != spec.dtype
        or not same_rank
        or any(
            want != size for want, size in zip(spec.shape, tensor.shape, strict=True) if isinstance(want, int)
        )
    ):
        raise DataError(
            f"golden tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype}"
            f" {list(spec.shape)}"
        )
