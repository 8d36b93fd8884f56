"""Golden tensors: recorded inputs with the outputs that a device must reproduce within a tolerance.

The values are stored in artifacts as little-endian, C-contiguous arrays without a header. Float inputs may be
stored as 8-bit codes, which take a quarter of the space. Pixels, for example, are often 8-bit integers. To
save more space, one code may be stored for a block of equal input values, and only every k-th value of an
output may be stored. There may be several rows, each with inputs and outputs. Only the inputs of the first
row are stored, and `resample` computes the others from them.
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Final

import numpy as np

from edgekit_runtime.canonical_json import OPTIONAL, Record
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

# Of all inputs together, decoded: with `repeat`, a few bytes can state any size.
MAX_INPUT_BYTES: Final = 512 << 20
MAX_ROWS: Final = 32
MAX_SEED: Final = 65535
# Values. Their random numbers take eight times the memory of float inputs.
_DRAWN_AT_ONCE: Final = 1 << 16
_MAX_INTEGER: Final = 1 << 31  # larger ones are drawn from the values of the first row alone
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)


def _check_number(value: object, field: str, *, low: float) -> None:
    # A comparison, since math.isfinite() overflows on the huge integers that JSON allows.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= _FLOAT32_MAX:
        raise DataError(f"{field} is {value!r}, expected a finite number of at least {low:g}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def resample(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Return an additional row of golden inputs, with the names, shapes and dtypes of the first row.

    Each array is filled with one background value and has blocks of randomly drawn values. Floats are drawn
    from the first row's values. Integers are drawn from the range of the first row's values, so they stay
    valid as table indices. If an integer has an absolute value of 2**31 or more, integers are drawn like
    floats. The result is the same on every machine.

    Args:
        inputs: A dict from input names to the arrays of the first row, in the order of the manifest.
        seed: The seed of the row, 0 to `MAX_SEED`. Its low bits set the size and density of the blocks.
    """
    return {
        name: _resample(values, (seed << 8) + position) if values.size else values
        for position, (name, values) in enumerate(inputs.items())
    }


def _resample(values: Array, stream: int) -> Array:
    seed = stream >> 8
    edge, density = 1 << seed % 4, 1 + (seed >> 2) % 8
    wide = [axis > 0 and size > 8 for axis, size in enumerate(values.shape)]
    blocks = [-(-size // edge) if is_wide else size for size, is_wide in zip(values.shape, wide, strict=True)]
    source, count = values.reshape(-1), math.prod(blocks)
    low, high = (int(values.min()), int(values.max())) if values.dtype.kind in "iu" else (0, _MAX_INTEGER)
    is_range = low > -_MAX_INTEGER and high < _MAX_INTEGER
    choices = high - low + 1 if is_range else values.size

    def draw(begin: int, end: int) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], Any]:
        bits = _hash(np.arange(begin, end, dtype=np.uint64) + np.uint64(stream << 32))
        picks = (((bits >> np.uint64(32)) * np.uint64(choices)) >> np.uint64(32)).astype(np.int64)
        return bits, (picks + low).astype(values.dtype) if is_range else source[picks]

    _, background = draw(count, count + 1)
    drawn: Array = np.empty(count, values.dtype)
    for begin in range(0, count, _DRAWN_AT_ONCE):
        bits, picked = draw(begin, min(begin + _DRAWN_AT_ONCE, count))
        is_drawn = (bits & np.uint64(7)) < np.uint64(density)
        drawn[begin : begin + _DRAWN_AT_ONCE] = np.where(is_drawn, picked, background)
    drawn = drawn.reshape(blocks)
    for axis, size in enumerate(values.shape):
        if wide[axis] and edge > 1:
            drawn = drawn.take(np.arange(size) // edge, axis)
    return drawn


def draw_bytes(seed: int, begin: int, end: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes `begin` to `end` - 1 of a pseudorandom stream that is the same on every machine.

    `seed` selects the stream, 0 to `MAX_SEED`.
    """
    numbers = np.arange(begin, end, dtype=np.uint64) + np.uint64(seed << 40)
    drawn: np.ndarray[Any, np.dtype[np.uint8]] = (_hash(numbers) >> np.uint64(56)).astype(np.uint8)
    return drawn


def _hash(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the outputs of SplitMix64 for these positions of its stream, modulo 2**64.

    Source: G. Steele et al., Fast Splittable Pseudorandom Number Generators, 2014.
    """
    bits: np.ndarray[Any, np.dtype[np.uint64]] = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits


def _decode(data: bytes | memoryview, dtype: str, shape: tuple[int, ...], name: str) -> Array:
    expected_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if len(data) != expected_bytes:
        raise DataError(f"golden tensor '{name}': got {len(data)} bytes, expected {expected_bytes}")
    stored = np.frombuffer(data, DTYPES[dtype].newbyteorder("<")).reshape(shape)
    return stored.astype(
        DTYPES[dtype]
    )  # a copy: native byte order, and no view of a mapping that gets closed


@dataclass(frozen=True, slots=True)
class Codes(Record):
    """The meaning of 8-bit codes as float32 values: `float32(code) * float32(scale) + float32(offset)`.

    Attributes:
        dtype: `uint8` or `int8`.
        scale, offset: The factor and the offset. The product and the sum are rounded to float32.
        repeat: The number of consecutive values along each axis that share a code. None means 1 on every
            axis.

    Raises:
        DataError: A field has the wrong type or value.
    """

    dtype: str
    scale: float
    offset: float
    repeat: tuple[int, ...] | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if self.dtype not in ("uint8", "int8"):
            raise DataError(f"codes: dtype is {self.dtype!r}, expected uint8 or int8")
        _check_number(self.scale, "codes: scale", low=-_FLOAT32_MAX)
        _check_number(self.offset, "codes: offset", low=-_FLOAT32_MAX)
        if self.repeat is not None and not all(map(_is_count, self.repeat)):
            raise DataError(f"codes: repeat is {list(self.repeat)}, expected integers of at least 1")

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codes for an array of values with shape `shape`.

        Raises:
            DataError: `repeat` does not hold a divisor of each size in `shape`.
        """
        if self.repeat is None:
            return shape
        # A size of 0 is divided by all numbers, but numpy cannot repeat by those beyond its index type.
        if len(self.repeat) != len(shape) or any(
            size % times or times > max(size, 1) for size, times in zip(shape, self.repeat, strict=True)
        ):
            raise DataError(
                f"codes: repeat is {list(self.repeat)}, expected a divisor for each size of {list(shape)}"
            )
        return tuple(size // times for size, times in zip(shape, self.repeat, strict=True))

    def decode(self, data: bytes | memoryview, shape: tuple[int, ...], name: str) -> Array:
        """Decode `data` to a float32 array of shape `shape`. `name` is used in error messages.

        Raises:
            DataError: `data` has the wrong size, or `repeat` does not fit `shape`.
        """
        codes = _decode(data, self.dtype, self.stored_shape(shape), name).astype(np.float32)
        # Arithmetic makes numbers of arrays without axes, which engines do not take.
        values = np.asarray(codes * np.float32(self.scale) + np.float32(self.offset))
        for axis, times in enumerate(self.repeat or ()):
            if times > 1:
                values = np.repeat(values, times, axis)
        return values


@dataclass(frozen=True, slots=True)
class GoldenInput(Record):
    """One recorded input.

    Attributes:
        name, dtype, shape: The name, dtype and shape of the model's input, with all sizes fixed.
        path: The path of the artifact that holds the values.
        codes: How to decode the stored 8-bit codes, or None if the values are stored in `dtype`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    codes: Codes | None = None

    def __post_init__(self) -> None:
        _check_golden(self.name, self.dtype, self.shape, self.path)
        if self.codes is None:
            return
        if self.dtype != "float32":
            raise DataError(f"golden tensor '{self.name}': codes need dtype float32, got {self.dtype}")
        try:
            self.codes.stored_shape(self.shape)
        except DataError as cause:
            raise DataError(f"golden tensor '{self.name}': {cause}") from cause

    @property
    def size_bytes(self) -> int:
        if self.codes is None:
            return self.decoded_bytes
        return math.prod(self.codes.stored_shape(self.shape)) * DTYPES[self.codes.dtype].itemsize

    @property
    def decoded_bytes(self) -> int:
        """The size in bytes of the array that `decode` returns."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def decode(self, data: bytes | memoryview) -> Array:
        """Return the input with its dtype and shape, decoded from the content of its artifact.

        Raises:
            DataError: `data` has the wrong size.
        """
        if self.codes is None:
            return _decode(data, self.dtype, self.shape, self.name)
        return self.codes.decode(data, self.shape, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenOutput(Record):
    """One expected output.

    An output is correct if `|output - expected| <= atol + rtol * |expected|` for each stored value.

    Attributes:
        name, dtype, shape: The output that the session must return.
        path: The path of the artifact that holds the values.
        atol, rtol: The absolute and relative tolerance, at least 0.
        every: The distance between two stored values in C order, or between two stored rows if `axis` is set.
            Values that are not stored are not compared.
        axis: The axis of the rows if their number depends on the data, else None. Such rows are compared as a
            set, as `row_sets` describes.
        loose: The number of stored rows that may have no match in the output, at most half of the rows.
        count_atol: The allowed difference in the number of rows, at most half of the rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    atol: float
    rtol: float
    every: int = field(default=1, metadata=OPTIONAL)
    axis: int | None = field(default=None, metadata=OPTIONAL)
    loose: int = field(default=0, metadata=OPTIONAL)
    count_atol: int = field(default=0, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        _check_golden(self.name, self.dtype, self.shape, self.path)
        _check_number(self.atol, f"golden tensor '{self.name}': atol", low=0.0)
        _check_number(self.rtol, f"golden tensor '{self.name}': rtol", low=0.0)
        if not _is_count(self.every):
            raise DataError(
                f"golden tensor '{self.name}': every is {self.every!r}, expected an integer of at least 1"
            )
        is_axis = self.axis is None or (type(self.axis) is int and 0 <= self.axis < len(self.shape))
        rows = self.shape[self.axis] if is_axis and self.axis is not None else 0
        bounds = (self.loose, -(-rows // self.every)), (self.count_atol, rows)
        if not is_axis or any(type(bound) is not int or not 0 <= bound <= n // 2 for bound, n in bounds):
            raise DataError(
                f"golden tensor '{self.name}': axis is {self.axis!r}, loose {self.loose!r} and count_atol"
                f" {self.count_atol!r}, expected an axis of {list(self.shape)} and integers from 0 to half of"
                f" the rows, {bounds[0][1]} stored of {rows}"
            )

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the values in the artifact."""
        if self.axis is not None:
            rows = -(-self.shape[self.axis] // self.every)
            return (*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :])
        return self.shape if self.every == 1 else (-(-math.prod(self.shape) // self.every),)

    @property
    def stored_count(self) -> int:
        """The number of values in the artifact."""
        return math.prod(self.stored_shape)

    @property
    def size_bytes(self) -> int:
        return self.stored_count * DTYPES[self.dtype].itemsize

    def pick(self, output: Array) -> Array:
        """Return the compared values of an output in C order, as an array of shape [stored_count]."""
        if self.axis is None:
            return output.reshape(-1)[:: self.every]
        return output.take(np.arange(0, self.shape[self.axis], self.every), self.axis).reshape(-1)

    def decode(self, data: bytes | memoryview) -> Array:
        """Return the stored values as an array of shape `stored_shape`.

        Raises:
            DataError: `data` has the wrong size.
        """
        return _decode(data, self.dtype, self.stored_shape, self.name)


def _check_golden(name: object, dtype: object, shape: tuple[int, ...], path: object) -> None:
    spec = TensorSpec(name, dtype, shape)  # type: ignore[arg-type]  # it checks the types
    if spec.size_bytes is None:
        raise DataError(
            f"golden tensor '{spec.name}': shape {list(shape)} has a free dimension, expected sizes"
        )
    if not isinstance(path, str):
        raise DataError(f"golden tensor '{spec.name}': path is {path!r}, expected a string")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOutput(Record):
    """The expected values of one output in all additional rows.

    Attributes:
        name: The name of a golden output. Its dtype and shape apply to each row.
        path: The path of the artifact that holds the stored values, row by row.
        atol, rtol: One tolerance for each row, as in `GoldenOutput`. An empty `rtol` means 0.
        every: As in `GoldenOutput`.
    """

    name: str
    path: str
    atol: tuple[float, ...]
    rtol: tuple[float, ...] = field(default=(), metadata=OPTIONAL)
    every: int = field(default=1, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class GoldenRows(Record):
    """Additional rows of golden tensors. Older readers ignore them and check only the first row.

    Attributes:
        seeds: The seed of each row, for `resample`.
        outputs: The expected values of some or all golden outputs.
    """

    seeds: tuple[int, ...]
    outputs: tuple[RowsOutput, ...]

    def __post_init__(self) -> None:
        valid = all(type(seed) is int and 0 <= seed <= MAX_SEED for seed in self.seeds)
        if not valid or not 1 <= len(self.seeds) <= MAX_ROWS:
            raise DataError(
                f"golden rows: seeds are {list(self.seeds)}, expected 1 to {MAX_ROWS} whole numbers from 0 to"
                f" {MAX_SEED}"
            )
        for output in self.outputs:
            if len(output.atol) != len(self.seeds) or len(output.rtol) not in (0, len(self.seeds)):
                raise DataError(
                    f"golden rows: '{output.name}' has {len(output.atol)} and {len(output.rtol)} tolerances,"
                    f" expected one for each of {len(self.seeds)} seeds"
                )


@dataclass(frozen=True, slots=True)
class Golden(Record):
    """The recorded inputs and outputs of one run, with optional additional rows."""

    inputs: tuple[GoldenInput, ...]
    outputs: tuple[GoldenOutput, ...]
    rows: GoldenRows | None = field(default=None, metadata=OPTIONAL)

    def row_outputs(self) -> list[list[GoldenOutput]]:
        """Return the expected outputs of the additional rows.

        Returns:
            A list for each output. Each list holds one `GoldenOutput` for each row.

        Raises:
            DataError: `rows` contains an invalid value, or an output that is repeated or unknown or has an
                axis.
        """
        if self.rows is None:
            return []
        first = {output.name: output for output in self.outputs if output.axis is None}
        names = [output.name for output in self.rows.outputs]
        if not names or any(name not in list(first) or names.count(name) > 1 for name in names):
            raise DataError(
                f"golden rows hold {names}, expected golden outputs without axis: {sorted(first)}"
            )
        return [
            [
                replace(first[rows.name], path=rows.path, atol=atol, rtol=rtol, every=rows.every)
                for atol, rtol in zip(rows.atol, rows.rtol or [0.0] * len(rows.atol), strict=True)
            ]
            for rows in self.rows.outputs
        ]

    def artifact_sizes(self) -> list[tuple[str, str, int, tuple[int, ...]]]:
        """Return the artifact of each golden tensor.

        Returns:
            A list of (tensor name, path of the artifact, size of the artifact in bytes, tensor shape). For an
            output of the additional rows, the artifact holds all rows and the shape describes one row.

        Raises:
            DataError: As for `row_outputs`.
        """
        first: list[GoldenInput | GoldenOutput] = [*self.inputs, *self.outputs]
        sizes = [(tensor.name, tensor.path, tensor.size_bytes, tensor.shape) for tensor in first]
        for row, *others in self.row_outputs():
            sizes.append((row.name, row.path, row.size_bytes * (1 + len(others)), row.shape))
        return sizes

    def check(self, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        """Check the golden tensors against the specs of a model.

        Each input and at least one output must have a golden tensor.

        Raises:
            DataError: A tensor is missing, unknown or repeated, a dtype or shape differs, or the decoded
                inputs take more than `MAX_INPUT_BYTES`.
        """
        names = [tensor.name for tensor in self.inputs]
        if sorted(names) != sorted(spec.name for spec in inputs):
            raise DataError(
                f"golden inputs are {names}, expected one for each of {[spec.name for spec in inputs]}"
            )
        expected = [tensor.name for tensor in self.outputs]
        if not expected or len(set(expected)) != len(expected):
            raise DataError(f"golden outputs are {expected}, expected at least one and each once")
        specs = {spec.name: spec for spec in outputs}
        if unknown := sorted(set(expected) - set(specs)):
            raise DataError(f"golden outputs hold {unknown}, which the model does not have ({sorted(specs)})")
        for golden_input in self.inputs:
            _check_fit(golden_input, next(spec for spec in inputs if spec.name == golden_input.name))
        for golden_output in self.outputs:
            _check_fit(golden_output, specs[golden_output.name])
        decoded_bytes = sum(tensor.decoded_bytes for tensor in self.inputs)
        if decoded_bytes > MAX_INPUT_BYTES:
            raise DataError(
                f"golden inputs take {decoded_bytes} bytes decoded, expected at most {MAX_INPUT_BYTES}"
            )


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
