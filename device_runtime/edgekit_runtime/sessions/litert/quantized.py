"""Quantized inputs and outputs of an engine, presented as float32.

A code `q` stands for the value `(q - zero_point) * scale`. A tensor has only one scale: inputs and outputs
with a scale per channel do not occur.
"""

import math

import numpy as np

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array

CODE_DTYPES = ("int8", "uint8", "int16")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The relation of one tensor's codes to values.

    Attributes:
        name: name of the tensor, for messages.
        dtype: dtype of the codes, one of `CODE_DTYPES`.
        scale: difference in value between neighbouring codes, finite and over 0.
        zero_point: the code that stands for 0, within the range of `dtype`.

    Raises:
        BackendError: a field has a value that no engine computes with.
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
        """Return the nearest codes, with halves rounded to even; values out of range get the outermost codes.

        Args:
            values: float32 of any shape.

        Raises:
            DataError: a value is NaN, which has no code.
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
        """Return the values that `codes` stand for, float32 of the same shape."""
        steps = codes.astype(np.float32) - np.float32(self.zero_point)
        return np.asarray(steps * np.float32(self.scale))
