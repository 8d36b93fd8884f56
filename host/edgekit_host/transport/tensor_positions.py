"""Finds the tensors in an ONNX or TFLite file without the libraries of these formats.

Unknown tensors are left out. A wrong position only makes a delta larger, because each delta is tested by
rebuilding the package from it.

Source: onnx.proto and onnx-data (ONNX 1.23), and schema.fbs (TensorFlow Lite).
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from edgekit_runtime.package.model_encodings import (
    DAMAGED,
    follow,
    read_field,
    read_fields,
    read_tables,
    read_varint,
    unpack,
)

_ONNX_WIDTHS: Final = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 4, 10: 2, 11: 4, 12: 4, 13: 4, 16: 2}
_ONNX_SIGNS: Final = {3: True, 2: False}  # int8, uint8
_TFLITE_WIDTHS: Final = {0: 4, 1: 2, 2: 4, 3: 1, 4: 4, 7: 2, 9: 1, 10: 4}
_TFLITE_SIGNS: Final = {9: True, 3: False}
_MAX_DEPTH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPosition:
    """A tensor in a file.

    Attributes:
        name: The name of the tensor, which is the same in all versions of the model.
        offset, length: The position and size of its data in the file, in bytes.
        width: The size of the words in which the encoder reads the tensor, 1, 2 or 4 bytes.
        shape: The shape of the tensor, or () if unknown.
        is_signed: True for int8, False for uint8, and None for other types.
        scale: The name of the tensor with the float32 scales of this tensor, or "" if it has none.
    """

    name: str
    offset: int
    length: int
    width: int
    shape: tuple[int, ...] = ()
    is_signed: bool | None = None
    scale: str = ""


def find_tensors(data: memoryview, file_name: str) -> list[TensorPosition]:
    """Return the tensors of an ONNX (`*.onnx`) or TFLite file by offset. A malformed file has none."""
    find = _find_onnx if file_name.endswith(".onnx") else _find_tflite
    try:
        if file_name.endswith(".onnx") or bytes(data[4:8]) == b"TFL3":
            return sorted(find(data), key=lambda tensor: tensor.offset)
    except DAMAGED:
        pass
    return []


# ONNX


def _find_onnx(data: memoryview) -> Iterator[TensorPosition]:
    for number, _, begin, end in read_fields(data, 0, len(data)):
        if number == 7:
            yield from _find_in_graph(data, begin, end, "", 0)


def _find_in_graph(
    data: memoryview, begin: int, end: int, scope: str, depth: int
) -> Iterator[TensorPosition]:
    nodes = 0
    scales: dict[str, str] = {}
    for number, _, start, stop in read_fields(data, begin, end):
        if number == 1 and depth < _MAX_DEPTH:
            nodes += 1
            names = []
            for field, _, first, last in read_fields(data, start, stop):
                if field == 1:
                    names.append(f"{scope}/{bytes(data[first:last]).decode()}")
                elif field == 4 and bytes(data[first:last]) == b"DequantizeLinear" and len(names) > 1:
                    scales[names[0]] = names[1]
                elif field == 5:
                    yield from _find_in_attribute(data, first, last, f"{scope}/{nodes}", depth)
    for number, _, start, stop in read_fields(data, begin, end):
        if number == 5:
            for tensor in _read_tensor(data, start, stop, f"{scope}/"):
                yield replace(tensor, scale=scales.get(tensor.name, ""))


def _find_in_attribute(
    data: memoryview, begin: int, end: int, scope: str, depth: int
) -> Iterator[TensorPosition]:
    for number, _, start, stop in read_fields(data, begin, end):
        if number == 5:
            yield from _read_tensor(data, start, stop, f"{scope}:")
        elif number == 6:
            yield from _find_in_graph(data, start, stop, scope, depth + 1)


def _read_tensor(data: memoryview, begin: int, end: int, scope: str) -> Iterator[TensorPosition]:
    shape: list[int] = []
    kind, name = 0, ""
    content: tuple[int, int] | None = None
    for number, value, start, stop in read_fields(data, begin, end):
        if number == 1 and value is None:  # packed
            position = start
            while position < stop:
                size, position = read_varint(data, position)
                shape.append(size)
        elif number == 1 and value is not None:
            shape.append(value)
        elif number == 2:
            kind = value or 0
        elif number == 8:
            name = bytes(data[start:stop]).decode()
        elif number in (4, 9):  # float_data is packed, so its bytes are as those of raw_data
            content = start, stop
    width = _ONNX_WIDTHS.get(kind)
    if content is None or width is None or content[0] == content[1]:
        return
    length = content[1] - content[0]
    known_shape = tuple(shape) if math.prod(shape) * width == length else ()
    yield TensorPosition(
        name=f"{scope}{name}",
        offset=content[0],
        length=length,
        width=width,
        shape=known_shape,
        is_signed=_ONNX_SIGNS.get(kind),
    )


# TFLite


def _read_vector(data: memoryview, field: int | None, width: int) -> tuple[int, int]:
    """Return the offset and length in bytes of a vector's content."""
    vector = follow(data, field)
    if vector is None:
        return 0, 0
    return vector + 4, width * unpack(data, "<I", vector)


def _find_tflite(data: memoryview) -> Iterator[TensorPosition]:
    model = unpack(data, "<I", 0)
    buffers = list(read_tables(data, read_field(data, model, 4)))
    names = set()
    for graph_number, graph in enumerate(read_tables(data, read_field(data, model, 2))):
        for number, tensor in enumerate(read_tables(data, read_field(data, graph, 0))):
            name = f"{graph_number}/{number}"
            scales = follow(data, read_field(data, tensor, 4))
            if scales is not None:
                offset, length = _read_vector(data, read_field(data, scales, 2), 4)
                if length and offset not in names:
                    names.add(offset)
                    yield TensorPosition(name=f"{name}:scale", offset=offset, length=length, width=4)
            field = read_field(data, tensor, 2)
            buffer = 0 if field is None else unpack(data, "<I", field)
            offset, length = _read_vector(data, read_field(data, buffers[buffer], 0), 1)
            if not length or offset in names:
                continue
            names.add(offset)
            scale = "" if scales is None else f"{name}:scale"
            yield replace(_describe(data, tensor, name, offset, length), scale=scale)


def _describe(data: memoryview, tensor: int, name: str, offset: int, length: int) -> TensorPosition:
    field = read_field(data, tensor, 1)
    kind = 0 if field is None else data[field]
    begin, size = _read_vector(data, read_field(data, tensor, 0), 4)
    shape = struct.unpack_from(f"<{size // 4}i", data, begin)
    width = _TFLITE_WIDTHS.get(kind, 1)
    if length % width:
        width = 1
    known_shape = shape if math.prod(shape) * width == length else ()
    return TensorPosition(
        name=name,
        offset=offset,
        length=length,
        width=width,
        shape=known_shape,
        is_signed=_TFLITE_SIGNS.get(kind),
    )
