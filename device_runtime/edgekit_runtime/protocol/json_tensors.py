"""Converts tensors to JSON and back. Long arrays are converted in pieces.

Python's JSON parser needs some 30 ms per MiB and cannot be interrupted. Long arrays of numbers are therefore
cut out of the document first and parsed in pieces. The rest of the document is parsed as a whole, and is
rejected if it is too large.
"""

import json
import math
import re
from collections.abc import Generator, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from edgekit_runtime.canonical_json import name_kind
from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.protocol.json_fields import explain, load_object
from edgekit_runtime.tensors import Array

_LONG_BYTES: Final = 256  # longer arrays are cut out
_MAX_REST_BYTES: Final = 64 << 10  # limit of a document without its long arrays, for 2 ms
_MAX_VALUE_BYTES: Final = 64 << 10  # limit of one number with the spaces around it
_PIECE_BYTES: Final = 2 << 10
_STRINGS_AT_ONCE: Final = 64
_MARK: Final = b"Infinity"  # not JSON, so no client can have written it
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Brackets are blanked before the numbers are read, so their places are checked separately.
_BLANKED: Final = bytes.maketrans(b"[]", b"  ")
_OTHERS: Final = bytes(set(range(256)) - set(b"[],"))
_MISPLACED: Final = re.compile(rb"[^\[,\s]\s*\[|\][ \t\r\n]*[^\],\s]")
_VALUES_AT_ONCE: Final = 64  # number of values written in some 70 us
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_JSON_KINDS: Final = {"b": (bool,), "i": (int,), "u": (int,), "f": (int, float)}

Result = TypeVar("Result")
Sliced: TypeAlias = Generator[None, None, Result]
"""Work that yields about every 100 us, so that an event loop can do other work."""


def finish(work: Sliced[Result]) -> Result:
    """Run all slices of `work` without pauses, and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:  # noqa: PERF203  # the end of the loop
            result: Result = end.value
            return result


def read_values(data: object, dtype: "np.dtype[Any]", shape: tuple[int, ...], where: str) -> Array:
    """Convert a JSON array to an array of the given dtype and shape.

    The list may be flat, or nested like the shape. The types of the values are checked, because numpy would
    silently convert strings and booleans to numbers, and round fractions. Error messages start with `where`.

    Raises:
        RequestError: The list does not have that shape, or a value does not fit `dtype`.
    """
    count = math.prod(shape)
    flat: Any = data
    if isinstance(data, list) and data and isinstance(data[0], list):
        for axis in range(len(shape) - 1):
            if len(flat) != math.prod(shape[: axis + 1]) or not all(isinstance(row, list) for row in flat):
                raise RequestError(400, f"{where}: data is not nested as shape {list(shape)} says")
            flat = [value for row in flat for value in row]
    if not isinstance(flat, list) or len(flat) != count:
        actual = f"{len(flat)} values" if isinstance(flat, list) else name_kind(flat)
        raise RequestError(400, f"{where}: data has {actual}, expected {count} for shape {list(shape)}")
    return _convert(flat, dtype, where).reshape(shape)


def _convert(flat: list[Any], dtype: "np.dtype[Any]", where: str) -> Array:
    """Return JSON values as an array with one axis.

    Raises:
        RequestError: a value is not of the kind of `dtype`, or out of its range.
    """
    kinds = _JSON_KINDS[dtype.kind]
    for kind in set(map(type, flat)):
        if kind not in kinds:
            value = next(value for value in flat if type(value) is kind)
            holds = "a fraction" if kind is float else name_kind(value)
            raise RequestError(
                400, f"{where}: data holds {holds}, expected {DATATYPE_OF_DTYPE[dtype.name]} values"
            )
    try:
        with np.errstate(over="raise"):
            _check_range(flat, dtype)
            return np.array(flat, dtype)
    except (OverflowError, FloatingPointError) as cause:
        raise RequestError(400, f"{where}: data is out of the range of {dtype.name}") from cause


def write_values(array: Array) -> Iterator[bytes]:
    """Yield pieces of JSON that together hold the values of `array`, without enclosing brackets.

    Raises:
        ValueError: A value is NaN or infinite, which JSON cannot express.
    """
    flat = array.reshape(-1)
    if array.dtype.kind == "O":
        flat = np.array([string.decode("utf-8", "replace") for string in flat.tolist()], object)
    for start in range(0, len(flat), _VALUES_AT_ONCE):
        text = _encode(flat[start : start + _VALUES_AT_ONCE].tolist())[1:-1].encode("ascii")
        yield text if start == 0 else b"," + text


def _check_range(flat: list[Any], dtype: "np.dtype[Any]") -> None:
    """Raise OverflowError if numpy does not: before 2.0 it wraps integers, and 1e400 is infinite."""
    if dtype.kind == "f" and not all(map(math.isfinite, flat)):
        raise OverflowError
    if dtype.kind in "iu" and flat:
        bounds = np.iinfo(dtype)
        if min(flat) < bounds.min or max(flat) > bounds.max:
            raise OverflowError


class NumberArray:
    """A JSON array that is not parsed yet. Only its position in the document is stored."""

    __slots__ = ("_begin", "_document", "_end")

    def __init__(self, document: bytes, begin: int, end: int) -> None:
        """Store the position of the array in `document[begin:end]`, which starts and ends with a bracket."""
        self._document, self._begin, self._end = document, begin, end

    def __repr__(self) -> str:
        return "a list of numbers"

    def read(self, dtype: "np.dtype[Any]", shape: tuple[int, ...], where: str) -> Sliced[Array]:
        """Parse the array in slices. The result is an array of `dtype` and `shape`.

        The text may be flat, or nested like `shape`. `where` is the name of the tensor, for error messages.

        Raises:
            RequestError: The text is not JSON, has another shape, or contains a value that does not fit
                `dtype`.
        """
        text, start, last, count = self._document, self._begin, self._end, math.prod(shape)
        refusal = RequestError(
            400, f"{where}: data is not {count} values, flat or nested as shape {list(shape)} says"
        )
        if count > last - start:  # else the expected array would fill the memory
            raise refusal
        is_nested = text[start + 1 : start + _PIECE_BYTES].lstrip()[:1] == b"["
        marks = _list_marks(shape if is_nested else (count,))
        values = np.empty(count, dtype)
        filled = separators = 0
        while start < last:
            end = text.find(b",", start + _PIECE_BYTES, last)
            end = last if end < 0 else end
            if end - start > _MAX_VALUE_BYTES:
                raise RequestError(400, f"{where}: data holds a value of over {_MAX_VALUE_BYTES} characters")
            piece = text[start:end]
            commas = piece.translate(None, _OTHERS) + (b"," if end < last else b"")
            if marks[separators : separators + len(commas)] != commas or _MISPLACED.search(piece):
                raise refusal
            part = _convert(_read_flat(piece, where), dtype, where)
            if not len(part):  # an empty list is JSON, but here a value is missing
                raise refusal
            values[filled : filled + len(part)] = part
            start, filled, separators = end + 1, filled + len(part), separators + len(commas)
            yield
        if separators != len(marks):
            raise refusal
        return values.reshape(shape)


def load_document(data: bytes, where: str) -> Sliced[dict[str, Any]]:
    """Parse a JSON document in slices.

    A list of numbers becomes a `NumberArray` if its text is longer than 256 bytes.

    Raises:
        RequestError: `data` is not a JSON object, is nested too deeply, or exceeds 64 KiB without these
            lists.
    """
    remainder: list[bytes] = []
    arrays: list[NumberArray] = []
    rest_bytes = start = strings = 0
    while start < len(data):
        quote = data.find(b'"', start)
        quote = len(data) if quote < 0 else quote
        remainder.append(_cut_array(data, (start, quote), arrays, where))
        string = _STRING.match(data, quote, quote + _MAX_REST_BYTES)
        start = quote if string is None else string.end()
        remainder.append(data[quote:start])
        rest_bytes += len(remainder[-1]) + len(remainder[-2])
        if rest_bytes > _MAX_REST_BYTES:
            raise RequestError(
                413,
                f"{where}: without its long arrays of numbers the JSON has more than {_MAX_REST_BYTES} bytes,"
                " the limit here",
            )
        if string is None:
            break
        strings += 1
        if strings % _STRINGS_AT_ONCE == 0:
            yield
    if start < len(data):
        raise RequestError(400, f"{where}: not a JSON document in UTF-8: a string does not end")
    yield
    return load_object(b"".join(remainder), where, arrays)


def _cut_array(data: bytes, gap: tuple[int, int], arrays: list[NumberArray], where: str) -> bytes:
    """Move a long array in a gap between two strings to `arrays`; return the rest of the gap."""
    start, stop = gap
    if stop - start > _LONG_BYTES:
        begin = data.find(b"[", start, stop)
        brace = data.find(b"}", begin, stop)
        end = data.rfind(b"]", begin, stop if brace < 0 else brace) + 1
        if begin >= 0 and end - begin > _LONG_BYTES:
            arrays.append(NumberArray(data, begin, end))
            return _refuse_place(data[start:begin], where) + _MARK + _refuse_place(data[end:stop], where)
    return _refuse_place(data[start:stop], where)


def _refuse_place(gap: bytes, where: str) -> bytes:
    if b"I" in gap:
        raise RequestError(400, f"{where}: not a JSON document in UTF-8: Infinity is no JSON number")
    return gap


def _list_marks(shape: tuple[int, ...]) -> bytes:
    """Return the brackets and commas of an array of this shape; a scalar becomes a list of one value."""
    marks = b""
    for size in reversed(shape or (1,)):
        marks = b"[" + (marks + b",") * (size - 1) + marks + b"]"
    return marks


def _read_flat(piece: bytes, where: str) -> list[Any]:
    try:
        text = piece.translate(_BLANKED).decode("ascii")
        values: list[Any] = json.loads(f"[{text}]", parse_constant=_refuse)
    except RecursionError as cause:
        raise RequestError(400, f"{where}: data is nested too deeply") from cause
    except ValueError as cause:
        raise RequestError(400, f"{where}: data is not JSON: {explain(cause)}") from cause
    return values


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
