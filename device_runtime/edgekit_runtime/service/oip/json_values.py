"""Tensors that stand in the JSON itself."""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.tensors import Array

_VALUES_AT_ONCE: Final = 64  # written in some 70 us
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_JSON_KINDS: Final = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}


def read_values(data: object, dtype: "np.dtype[Any]", shape: tuple[int, ...], where: str) -> Array:
    """Return the values of a JSON array, nested as its shape or flat.

    numpy is not asked to guess: it would make numbers of strings and truth values, and round.
    """
    count = math.prod(shape)
    flat: Any = data
    if isinstance(data, list) and data and isinstance(data[0], list):
        for axis in range(len(shape) - 1):
            if len(flat) != math.prod(shape[: axis + 1]) or not all(isinstance(row, list) for row in flat):
                raise RequestError(400, f"{where}: data is not nested as shape {list(shape)} says")
            flat = [value for row in flat for value in row]
    if not isinstance(flat, list) or len(flat) != count:
        got = f"{len(flat)} values" if isinstance(flat, list) else type(flat).__name__
        raise RequestError(400, f"{where}: data has {got}, expected {count} for shape {list(shape)}")
    return convert(flat, dtype, where).reshape(shape)


def convert(flat: list[Any], dtype: "np.dtype[Any]", where: str) -> Array:
    """Return JSON values as an array with one axis.

    Raises:
        RequestError: a value is not of the kind of `dtype`, or out of its range.
    """
    kinds = _JSON_KINDS[dtype.kind]
    for kind in set(map(type, flat)):
        if kind not in kinds:
            raise RequestError(
                400, f"{where}: data holds a {kind.__name__}, expected {DATATYPE_OF_DTYPE[dtype.name]} values"
            )
    try:
        with np.errstate(over="raise"):
            _check_range(flat, dtype)
            return np.array(flat, dtype)
    except (OverflowError, FloatingPointError) as cause:
        raise RequestError(400, f"{where}: data is out of the range of {dtype.name}") from cause


def write_values(array: Array) -> Iterator[bytes]:
    """Return the values of `array` as JSON without brackets, in pieces that join to all of it.

    Raises:
        ValueError: there is NaN or infinity among them, for which JSON has no word.
    """
    flat = array.reshape(-1)
    for start in range(0, len(flat), _VALUES_AT_ONCE):
        text = _encode(flat[start : start + _VALUES_AT_ONCE].tolist())[1:-1].encode("ascii")
        yield text if start == 0 else b"," + text


def _check_range(flat: list[Any], dtype: "np.dtype[Any]") -> None:
    """Raise what numpy does not: before 2.0 it wraps integers, and 1e400 is infinite already."""
    if dtype.kind == "f" and not all(map(math.isfinite, flat)):
        raise OverflowError
    if dtype.kind in "iu" and flat:
        bounds = np.iinfo(dtype)
        if min(flat) < bounds.min or max(flat) > bounds.max:
            raise OverflowError
