"""Converts between float32 values and the quantized inputs and outputs of an engine.

A code `q` represents the value `(q - zero_point) * scale`. Each tensor has a single scale. Inputs and outputs
with a scale per channel are not supported.
"""

import math

import numpy as np

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array

CODE_DTYPES = ("int8", "uint8", "int16")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of one tensor.

    Attributes:
        name: The name of the tensor, for messages.
        dtype: The dtype of the codes, one of `CODE_DTYPES`.
        scale: The difference between the values of adjacent codes. It is finite and greater than 0.
        zero_point: The code that represents 0, within the range of `dtype`.

    Raises:
        BackendError: A field has an unsupported value.
    """

    name: str
    dtype: str
    scale: float
    zero_point: int

    def __post_init__(self) -> None:
        if self.dtype not in CODE_DTYPES:
            raise BackendError(
                f"tensor '{self.name}': codes are {self.dtype}, expected one of {', '.join(CODE_DTYPES)}"
            )
        limits = np.iinfo(self.dtype)
        right = math.isfinite(self.scale) and self.scale > 0
        if not right or not limits.min <= self.zero_point <= limits.max:
            raise BackendError(
                f"tensor '{self.name}': scale {self.scale!r} and zero point {self.zero_point}, expected a"
                f" finite scale over 0 and a zero point from {limits.min} to {limits.max}"
            )

    def encode(self, values: Array) -> Array:
        """Return the nearest codes, rounded half to even. Values out of range are clipped.

        Args:
            values: A float32 array of any shape.

        Raises:
            DataError: A value is NaN, which cannot be quantized.
        """
        limits = np.iinfo(self.dtype)
        # In place from here on: for an image this takes as long as a small model.
        with np.errstate(over="ignore"):  # infinite is out of range like other large values
            steps = np.asarray(values / np.float32(self.scale))
        np.rint(steps, out=steps)
        np.add(steps, np.float32(self.zero_point), out=steps)
        np.clip(steps, limits.min, limits.max, out=steps)
        if math.isnan(steps.sum(dtype=np.float32)):  # the sum of clipped values is NaN only if one is
            raise DataError(
                f"tensor '{self.name}': holds NaN, which has no {self.dtype} code; clean the input"
            )
        return steps.astype(DTYPES[self.dtype])

    def decode(self, codes: Array) -> Array:
        """Return the values of `codes`, as float32 of the same shape."""
        steps = codes.astype(np.float32) - np.float32(self.zero_point)
        return np.asarray(steps * np.float32(self.scale))
