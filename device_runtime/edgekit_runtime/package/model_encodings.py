"""Reads Protocol Buffers (ONNX files) and FlatBuffers (TFLite files) without the libraries of these formats.

Source: Protocol Buffers encoding; FlatBuffers internals.
"""

import struct
from collections.abc import Iterator
from typing import Final

DAMAGED: Final = (ValueError, IndexError, struct.error)
"""The errors that this module raises for malformed files."""

_MAX_VARINT_BITS: Final = 63
_FIXED_SIZES: Final = {1: 8, 5: 4}


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the protobuf varint at `position`, and the position after it.

    Raises:
        ValueError, IndexError: The varint has more than 10 bytes, or does not end.
    """
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise ValueError("a number has more than 10 bytes")


def read_fields(data: memoryview, begin: int, end: int) -> Iterator[tuple[int, int | None, int, int]]:
    """Yield (number, value, begin, end) for each field of the protobuf message `data[begin:end]`.

    The yielded `begin` and `end` delimit the content of the field. The value is the integer of a varint
    field, or None for a bytes field. Fixed-width fields are skipped.

    Raises:
        ValueError, IndexError: The message is damaged.
    """
    position = begin
    while position < end:
        tag, start = read_varint(data, position)
        kind, value = tag & 7, None
        if kind == 0:
            value, position = read_varint(data, start)
        elif kind == 2:
            size, start = read_varint(data, start)
            position = start + size
        elif kind in _FIXED_SIZES:
            position = start + _FIXED_SIZES[kind]
        else:
            raise ValueError(f"no field of Protocol Buffers is of kind {kind}")
        if position > end:
            raise ValueError("a field reaches past its message")
        if kind not in _FIXED_SIZES:
            yield tag >> 3, value, start, position


def read_messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and content of each bytes field of a protobuf message. Other fields are skipped."""
    for number, value, begin, end in read_fields(data, 0, len(data)):
        if value is None:
            yield number, data[begin:end]


def unpack(data: memoryview, kind: str, position: int) -> int:
    """Return the integer at `position`, in the `struct` format `kind`."""
    if position < 0:
        raise ValueError("an offset is negative")
    return int(struct.unpack_from(kind, data, position)[0])


def read_field(data: memoryview, table: int, number: int) -> int | None:
    """Return the position of a field of a FlatBuffers table, or None if absent. Field numbers start at 0."""
    vtable = table - unpack(data, "<i", table)
    if 4 + 2 * number + 2 > unpack(data, "<H", vtable):
        return None
    offset = unpack(data, "<H", vtable + 4 + 2 * number)
    return table + offset if offset else None


def follow(data: memoryview, field: int | None) -> int | None:
    """Return the position that the offset in `field` points to, or None if `field` is None."""
    return None if field is None else field + unpack(data, "<I", field)


def read_tables(data: memoryview, field: int | None) -> Iterator[int]:
    """Yield the position of each table in a FlatBuffers vector. Yields nothing if `field` is None."""
    vector = follow(data, field)
    if vector is not None:
        for entry in range(vector + 4, vector + 4 + 4 * unpack(data, "<I", vector), 4):
            yield entry + unpack(data, "<I", entry)


def read_numbers(data: memoryview, field: int | None) -> list[int]:
    """Return the signed 32-bit integers in a FlatBuffers vector, or an empty list if `field` is None."""
    vector = follow(data, field)
    if vector is None:
        return []
    count = unpack(data, "<I", vector)
    return list(struct.unpack_from(f"<{count}i", data, vector + 4))
