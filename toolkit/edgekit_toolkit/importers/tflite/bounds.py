"""Checks the bounds of a flatbuffer before its offsets are followed.

The generated reader trusts all offsets and lengths. With a damaged file, it could run for hours, because
overlapping tables can refer to the same long vector many times. The check visits the same parts as the
reader, in the order of the schema. It fails if a part is outside the file, or if the total size of the parts
is several times that of the file. The options of operators must be within the file too, but their fields are
not checked here, because the engine checks them.

Source: FlatBuffers internals (https://flatbuffers.dev/internals/), and TFLite's schema.fbs.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from edgekit_runtime.errors import ModelError

# Some writers share strings and vectors. All parts together may have this many times the file's size.
_SHARING: Final = 4
_SLACK_BYTES: Final = 1 << 16


class Field(NamedTuple):
    """A field of a table.

    Attributes:
        kind: A value in the table itself, a vector or string of values, a table, or a vector of tables.
        size: The size in bytes of a value or of an item of a vector, or 0 for tables.
        table: The kind of the tables, which is a key of `_TABLES`. Empty for options of operators, whose
            fields are not checked.
    """

    name: str
    kind: Literal["value", "vector", "table", "tables"]
    size: int = 0
    table: str = ""


def _value(name: str, size: int) -> Field:
    return Field(name, "value", size)


def _vector(name: str, size: int) -> Field:
    return Field(name, "vector", size)


def _table(name: str, table: str = "") -> Field:
    return Field(name, "table", 4, table)


def _tables(name: str, table: str) -> Field:
    return Field(name, "tables", 4, table)


# Fields by slot. The type of a union is a value of one byte.
_TABLES: Final[Mapping[str, Mapping[int, Field]]] = {
    "": {},
    "Model": {
        0: _value("version", 4),
        1: _tables("operator_codes", "OperatorCode"),
        2: _tables("subgraphs", "SubGraph"),
        3: _vector("description", 1),
        4: _tables("buffers", "Buffer"),
        5: _vector("metadata_buffer", 4),
        6: _tables("metadata", "Metadata"),
        7: _tables("signature_defs", "SignatureDef"),
        8: _tables("external_buffer_groups", "ExternalGroup"),
        9: _tables("external_buffers", "ExternalBuffer"),
    },
    "OperatorCode": {
        0: _value("deprecated_builtin_code", 1),
        1: _vector("custom_code", 1),
        2: _value("version", 4),
        3: _value("builtin_code", 4),
    },
    "SubGraph": {
        0: _tables("tensors", "Tensor"),
        1: _vector("inputs", 4),
        2: _vector("outputs", 4),
        3: _tables("operators", "Operator"),
        4: _vector("name", 1),
        5: _value("debug_metadata_index", 4),
    },
    "Tensor": {
        0: _vector("shape", 4),
        1: _value("type", 1),
        2: _value("buffer", 4),
        3: _vector("name", 1),
        4: _table("quantization", "Quantization"),
        5: _value("is_variable", 1),
        6: _table("sparsity", "Sparsity"),
        7: _vector("shape_signature", 4),
        8: _value("has_rank", 1),
        9: _tables("variant_tensors", "Variant"),
        10: _value("external_buffer", 4),
    },
    "Quantization": {
        0: _vector("min", 4),
        1: _vector("max", 4),
        2: _vector("scale", 4),
        3: _vector("zero_point", 8),
        4: _value("details_type", 1),
        5: _table("details"),
        6: _value("quantized_dimension", 4),
    },
    "Sparsity": {
        0: _vector("traversal_order", 4),
        1: _vector("block_map", 4),
        2: _tables("dim_metadata", "Dimension"),
    },
    "Dimension": {
        0: _value("format", 1),
        1: _value("dense_size", 4),
        2: _value("array_segments_type", 1),
        3: _table("array_segments"),
        4: _value("array_indices_type", 1),
        5: _table("array_indices"),
    },
    "Variant": {0: _vector("shape", 4), 1: _value("type", 1), 2: _value("has_rank", 1)},
    "Operator": {
        0: _value("opcode_index", 4),
        1: _vector("inputs", 4),
        2: _vector("outputs", 4),
        3: _value("builtin_options_type", 1),
        4: _table("builtin_options"),
        5: _vector("custom_options", 1),
        6: _value("custom_options_format", 1),
        7: _vector("mutating_variable_inputs", 1),
        8: _vector("intermediates", 4),
        9: _value("large_custom_options_offset", 8),
        10: _value("large_custom_options_size", 8),
        11: _value("builtin_options_2_type", 1),
        12: _table("builtin_options_2"),
        13: _value("debug_metadata_index", 4),
    },
    "Buffer": {0: _vector("data", 1), 1: _value("offset", 8), 2: _value("size", 8)},
    "Metadata": {0: _vector("name", 1), 1: _value("buffer", 4)},
    "SignatureDef": {
        0: _tables("inputs", "TensorMap"),
        1: _tables("outputs", "TensorMap"),
        2: _vector("signature_key", 1),
        4: _value("subgraph_index", 4),
    },
    "TensorMap": {0: _vector("name", 1), 1: _value("tensor_index", 4)},
    "ExternalGroup": {0: _vector("name", 1)},
    "ExternalBuffer": {
        0: _value("id", 4),
        1: _value("group", 4),
        2: _value("offset", 8),
        3: _value("length", 8),
        4: _vector("packing", 1),
    },
}


def check_bounds(content: bytes) -> None:
    """Check that all parts of the model are within the file.

    Raises:
        ModelError: A part is outside the file. The message states the part and its offset.
    """
    _Walk(content).table("the model", 0, "Model")


@dataclass(slots=True)
class _Walk:
    content: bytes
    seen_bytes: int = 0

    def table(self, where: str, at: int, name: str) -> None:
        """Check the table that the offset at byte `at` leads to, and its contents."""
        start = at + self._number(where, "<I", at)
        vtable = start - self._number(where, "<i", start)
        length, size = self._number(where, "<H", vtable), self._number(where, "<H", vtable + 2)
        self._span(where, vtable, length)
        self._span(where, start, size)
        if length < 4 or length % 2 or size < 4:
            raise ModelError(f"{where}: the table at byte {start} has a header that is none; {_DAMAGED}")
        for slot, field in _TABLES[name].items():
            if 4 + 2 * slot >= length:
                continue
            offset = self._number(where, "<H", vtable + 4 + 2 * slot)
            if not offset:
                continue
            if offset + field.size * (field.kind == "value") + 4 * (field.kind != "value") > size:
                raise ModelError(f"{where}.{field.name}: lies outside its table at byte {start}; {_DAMAGED}")
            self._field(f"{where}.{field.name}", start + offset, field)

    def _field(self, where: str, at: int, field: Field) -> None:
        if field.kind == "table":
            self.table(where, at, field.table)
        elif field.kind != "value":
            start = at + self._number(where, "<I", at)
            count = self._number(where, "<I", start)
            self._span(where, start + 4, count * field.size, part=f"{count} items")
            if field.kind == "tables":
                for index in range(count):
                    self.table(f"{where}[{index}]", start + 4 + 4 * index, field.table)

    def _number(self, where: str, form: str, at: int) -> int:
        if not 0 <= at <= len(self.content) - struct.calcsize(form):
            raise ModelError(f"{where}: refers to byte {at}, the file has {len(self.content)}; {_DAMAGED}")
        return int(struct.unpack_from(form, self.content, at)[0])

    def _span(self, where: str, start: int, size: int, part: str = "a table") -> None:
        if start < 0 or start + size > len(self.content):
            raise ModelError(
                f"{where}: {part} of {size} bytes at byte {start}, the file has {len(self.content)};"
                f" {_DAMAGED}"
            )
        self.seen_bytes += size
        if self.seen_bytes > _SHARING * len(self.content) + _SLACK_BYTES:
            raise ModelError(f"{where}: the parts of the model overlap; {_DAMAGED}")


_DAMAGED: Final = "the file is truncated or damaged, copy or export it again"
