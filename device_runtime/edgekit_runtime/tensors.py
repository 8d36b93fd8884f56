"""Specs of tensors (name, dtype and shape), and the check of arrays against them.

Arrays are not converted. A float64 array for a float32 input is an error.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import Record
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    name: np.dtype(name)
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
}
MAX_RANK: Final = 32  # the most dimensions that every supported numpy version can hold
_ALIGNMENT_BYTES: Final = 64
# The most that numpy can index. JSON allows larger numbers, whose product Python may refuse to print.
MAX_DIMENSION: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorSpec(Record):
    """The name, dtype and shape of an input or output.

    Attributes:
        name: The name in the model graph.
        dtype: The name of a numpy dtype in `DTYPES`, such as `float32`.
        shape: The sizes of the dimensions. A string names a dimension of any size.
        extra: Unknown fields from a newer writer, which are preserved.

    Raises:
        DataError: A field has the wrong type or value.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"tensor spec: name is {self.name!r}, expected a string that is not empty")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise DataError(
                f"tensor '{self.name}': dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}"
            )
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_RANK:
            raise DataError(f"tensor '{self.name}': shape must be a tuple of at most {MAX_RANK} dimensions")
        for size in self.shape:
            is_size = isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MAX_DIMENSION
            if not is_size and not (isinstance(size, str) and size):
                raise DataError(
                    f"tensor '{self.name}': shape has dimension {size!r}, expected a size from 0"
                    f" to {MAX_DIMENSION} or a name"
                )

    def check(self, array: object) -> None:
        """Check that `array` matches this spec.

        Raises:
            DataError: `array` is no numpy array, or has another dtype, byte order, rank or size.
        """
        if not isinstance(array, np.ndarray):
            raise DataError(f"tensor '{self.name}': got {type(array).__name__}, expected a numpy array")
        if array.dtype != DTYPES[self.dtype]:
            raise DataError(
                f"tensor '{self.name}': got dtype {array.dtype.str}, expected {DTYPES[self.dtype].str}"
                f" ({self.dtype}); convert it with .astype('{self.dtype}')"
            )
        if array.shape != self.shape and not _fits(array.shape, self.shape):
            raise DataError(
                f"tensor '{self.name}': got shape {list(array.shape)}, expected {list(self.shape)}"
            )

    @property
    def size_bytes(self) -> int | None:
        """The size of a matching array in bytes, or None if a dimension is free."""
        sizes = [size for size in self.shape if isinstance(size, int)]
        if len(sizes) < len(self.shape):
            return None
        return math.prod(sizes) * DTYPES[self.dtype].itemsize


def allocate_aligned(size_bytes: int, lead_bytes: int) -> memoryview:
    """Return uninitialised memory of `size_bytes`, with the byte at `lead_bytes` aligned to 64 bytes."""
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    address: int = memory.__array_interface__["data"][0]
    start = -(address + lead_bytes) % _ALIGNMENT_BYTES
    return memoryview(memory)[start : start + size_bytes]  # type: ignore[arg-type]  # has the buffer protocol


def _fits(actual: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    """Return whether sizes agree; a plain loop, since this runs before every inference."""
    if len(actual) != len(expected):
        return False
    for size, expected_size in zip(actual, expected, strict=True):  # a generator costs a microsecond
        if size != expected_size and not isinstance(expected_size, str):
            return False
    return True


Shapes: TypeAlias = tuple[tuple[int, ...], ...]


def find_shapes(inputs: Mapping[str, Array]) -> Shapes:
    """Return the shapes of the inputs, sorted by the names of the inputs."""
    if len(inputs) == 1:  # as most models have; sorting takes a microsecond
        (array,) = inputs.values()
        return (array.shape,)
    return tuple([inputs[name].shape for name in sorted(inputs)])


def input_bytes(inputs: Mapping[str, Array]) -> int:
    """Return the total size of the inputs in bytes."""
    size = 0
    for array in inputs.values():  # sum() over a generator takes three times as long
        size += array.nbytes
    return size
