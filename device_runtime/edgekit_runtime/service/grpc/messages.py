"""The messages of the protocol over gRPC: a table of their fields, with a reader and a writer of protobuf.

A message is a dict from field names to values, as in JSON. Missing scalars are their defaults, missing
messages are left out, unknown fields are skipped.

Source: KServe and Triton's `grpc_service.proto`; protobuf's encoding (protobuf.dev).
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.tensors import Array

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_FIELDS: Final = 4096  # of one message with all inside it; each takes a microsecond and an object
_MAX_PACKED_BYTES: Final = 1024  # of numbers that become Python's
_MAX_VARINT_BYTES: Final = 10

# Message: fields, as number, name and kind. `packed` fields are read as the bytes of their numbers.
_PROTO: Final = """
ServerLiveRequest:
ServerLiveResponse: 1 live bool
ServerReadyRequest:
ServerReadyResponse: 1 ready bool
ModelReadyRequest: 1 name string, 2 version string
ModelReadyResponse: 1 ready bool
ServerMetadataRequest:
ServerMetadataResponse: 1 name string, 2 version string, 3 extensions repeated string
ModelMetadataRequest: 1 name string, 2 version string
ModelMetadataResponse: 1 name string, 2 versions repeated string, 3 platform string,
    4 inputs repeated TensorMetadata, 5 outputs repeated TensorMetadata
TensorMetadata: 1 name string, 2 datatype string, 3 shape repeated int64
InferParameter: 1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 double_param double,
    5 uint64_param uint64
InferTensorContents: 1 bool_contents packed bytes, 2 int_contents packed bytes, 3 int64_contents packed bytes,
    4 uint_contents packed bytes, 5 uint64_contents packed bytes, 6 fp32_contents packed bytes,
    7 fp64_contents packed bytes, 8 bytes_contents repeated bytes
ModelInferRequest: 1 model_name string, 2 model_version string, 3 id string, 4 parameters map InferParameter,
    5 inputs repeated InferInputTensor, 6 outputs repeated InferRequestedOutputTensor,
    7 raw_input_contents repeated bytes
InferInputTensor: 1 name string, 2 datatype string, 3 shape repeated int64, 4 parameters map InferParameter,
    5 contents InferTensorContents
InferRequestedOutputTensor: 1 name string, 2 parameters map InferParameter
ModelInferResponse: 1 model_name string, 2 model_version string, 3 id string, 4 parameters map InferParameter,
    5 outputs repeated InferOutputTensor, 6 raw_output_contents repeated bytes
InferOutputTensor: 1 name string, 2 datatype string, 3 shape repeated int64, 4 parameters map InferParameter
ModelStreamInferResponse: 1 error_message string, 2 infer_response ModelInferResponse
ModelStatisticsRequest: 1 name string, 2 version string
ModelStatisticsResponse: 1 model_stats repeated ModelStatistics
ModelStatistics: 1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64,
    5 execution_count uint64, 6 inference_stats InferStatistics, 7 batch_stats repeated InferBatchStatistics
InferStatistics: 1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration,
    4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration,
    7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration
InferBatchStatistics: 1 batch_size uint64, 2 compute_input StatisticDuration,
    3 compute_infer StatisticDuration, 4 compute_output StatisticDuration
StatisticDuration: 1 count uint64, 2 ns uint64
RepositoryIndexRequest: 1 repository_name string, 2 ready bool
RepositoryIndexResponse: 1 models repeated ModelIndex
ModelIndex: 1 name string, 2 version string, 3 state string, 4 reason string
RepositoryModelLoadRequest: 1 repository_name string, 2 model_name string,
    3 parameters map ModelRepositoryParameter
RepositoryModelLoadResponse:
RepositoryModelUnloadRequest: 1 repository_name string, 2 model_name string,
    3 parameters map ModelRepositoryParameter
RepositoryModelUnloadResponse:
ModelRepositoryParameter: 1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 bytes_param bytes
SystemSharedMemoryStatusRequest: 1 name string
SystemSharedMemoryStatusResponse: 1 regions map RegionStatus
RegionStatus: 1 name string, 2 key string, 3 offset uint64, 4 byte_size uint64
SystemSharedMemoryRegisterRequest: 1 name string, 2 key string, 3 offset uint64, 4 byte_size uint64
SystemSharedMemoryRegisterResponse:
SystemSharedMemoryUnregisterRequest: 1 name string
SystemSharedMemoryUnregisterResponse:
"""


class _Field(NamedTuple):
    """One field of a message.

    Attributes:
        label: `repeated`, `map` or `packed`; empty for a single value.
        kind: a scalar of protobuf, or a message.
    """

    number: int
    name: str
    label: str
    kind: str


def _read_proto() -> dict[str, tuple[_Field, ...]]:
    messages = {}
    for line in _PROTO.replace(",\n", ",").strip().splitlines():
        message, _, stated = line.partition(":")
        parts = [field.split() for field in stated.split(",") if stated]
        messages[message] = tuple(
            _Field(int(number), name, "".join(label), kind) for number, name, *label, kind in parts
        )
    for fields in tuple(messages.values()):
        for field in fields:
            if field.label == "map":
                entry = _Field(1, "key", "", "string"), _Field(2, "value", "", field.kind)
                messages[f"{field.kind} entry"] = entry
    return messages


_FIELDS: Final = _read_proto()
_FIELDS_BY_NUMBER: Final = {
    message: {field.number: field for field in fields} for message, fields in _FIELDS.items()
}
_WIRE_TYPES: Final = {
    **dict.fromkeys(("bool", "int64", "uint64"), _VARINT),
    "double": _FIXED64,
    "string": _LENGTH,
    "bytes": _LENGTH,
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "bool": False,
    "int64": 0,
    "uint64": 0,
    "double": 0.0,
    "string": "",
    "bytes": b"",
}


class _Reader:
    """Reads one message with all inside it, and counts their fields.

    Raises:
        RequestError: the bytes are no such message, or have too many fields.
    """

    def __init__(self) -> None:
        self._fields_left = _MAX_FIELDS

    def read(self, message: str, data: memoryview) -> dict[str, Any]:
        by_number = _FIELDS_BY_NUMBER[message]
        values = _make_defaults(message)
        at = 0
        while at < len(data):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise _too_many_fields()
            tag, at = read_varint(data, at)
            start, at = _find_value(data, at, tag & 7)
            field = by_number.get(tag >> 3)
            if field is not None:
                self._add(values, field, tag & 7, data[start:at])
        return values

    def _add(self, values: dict[str, Any], field: _Field, wire_type: int, data: memoryview) -> None:
        name, kind = field.name, field.kind
        if field.label == "packed":
            values[name] += data  # one number has the same bytes as a list of one
            return
        if field.label == "repeated" and wire_type == _LENGTH and kind == "int64":
            if len(data) > _MAX_PACKED_BYTES:
                raise RequestError(400, f"{name}: {len(data)} bytes of numbers")
            values[name] += unpack_varints(data).view(np.int64).tolist()
            return
        if wire_type != _WIRE_TYPES.get(kind, _LENGTH):
            raise RequestError(400, f"the message is malformed: field {name} has wire type {wire_type}")
        if field.label == "map":
            entry = self.read(f"{kind} entry", data)
            values[name][entry["key"]] = entry.get("value", {})
        elif field.label == "repeated":
            values[name].append(self._read_value(kind, data))
        else:
            values[name] = self._read_value(kind, data)

    def _read_value(self, kind: str, data: memoryview) -> Any:
        if kind == "string":
            return _decode_text(data)
        if kind == "bytes":
            return bytes(data)
        if kind == "double":
            return struct.unpack("<d", data)[0]
        if kind not in _DEFAULTS:
            return self.read(kind, data)
        number, _ = read_varint(data, 0)
        if kind == "bool":
            return number != 0
        return number - (1 << 64) if kind == "int64" and number >> 63 else number


def list_messages() -> Mapping[str, Sequence[tuple[int, str, str, str]]]:
    """Return the fields of all messages: number, name, label and kind."""
    return _FIELDS


def read_message(message: str, data: "bytes | memoryview") -> dict[str, Any]:
    """Return the values of a message.

    Raises:
        RequestError: `data` are no such message, or have too many fields.
    """
    return _Reader().read(message, memoryview(data))


def write_message(message: str, values: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message; values that have no field are left out, as in JSON from elsewhere."""
    output = bytearray()
    for field in _FIELDS[message]:
        value = values.get(field.name)
        if value is None:
            continue
        if field.label == "map":
            for key, entry in value.items():
                pair = write_message(f"{field.kind} entry", {"key": key, "value": entry})
                output += write_bytes(field.number, pair)
        elif field.label == "repeated" and field.kind == "int64":
            output += write_bytes(field.number, b"".join(map(encode_varint, value))) if value else b""
        elif field.label == "repeated":
            for element in value:
                output += _write_value(field, element)
        elif field.kind not in _DEFAULTS or value != _DEFAULTS[field.kind] or message == "InferParameter":
            output += _write_value(field, value)
    return bytes(output)


def _write_value(field: _Field, value: Any) -> bytes:
    kind = field.kind
    if kind not in _DEFAULTS:
        return write_bytes(field.number, write_message(kind, value))
    if kind in ("string", "bytes"):
        return write_bytes(field.number, value.encode(errors="replace") if kind == "string" else value)
    wire_type = _WIRE_TYPES[kind]
    tag = encode_varint(field.number << 3 | wire_type)
    return tag + (struct.pack("<d", value) if wire_type == _FIXED64 else encode_varint(int(value)))


def write_bytes(number: int, data: "bytes | memoryview") -> bytes:
    """Return a field of bytes, text or a message."""
    return head_of_bytes(number, len(data)) + data


def head_of_bytes(number: int, size_bytes: int) -> bytes:
    """Return what precedes the bytes of such a field."""
    return encode_varint(number << 3 | _LENGTH) + encode_varint(size_bytes)


def split_raw_contents(message: memoryview) -> tuple[bytes, list[memoryview]]:
    """Return a ModelInferRequest without its `raw_input_contents`, and these, uncopied.

    Raises:
        RequestError: `message` is no protobuf, or has too many fields.
    """
    raw: list[memoryview] = []
    others: list[memoryview] = []
    at = begin = fields = 0
    size = len(message)
    while at < size:
        field = at
        tag, at = read_varint(message, at)
        start, at = _find_value(message, at, tag & 7)
        if tag == 7 << 3 | _LENGTH:
            if begin < field:
                others.append(message[begin:field])
            raw.append(message[start:at])
            begin = at
        fields += 1
        if fields > _MAX_FIELDS:
            raise _too_many_fields()
    if begin < size:
        others.append(message[begin:])
    return b"".join(others), raw


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends.

    Raises:
        RequestError: it does not end.
    """
    try:
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        number, shift = byte & 0x7F, 7
        for index in range(at + 1, at + _MAX_VARINT_BYTES):
            byte = data[index]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number & 0xFFFFFFFFFFFFFFFF, index + 1
            shift += 7
    except IndexError:
        pass
    raise RequestError(400, "the message is malformed: a number does not end")


def encode_varint(number: int) -> bytes:
    """Return a number, negative ones as protobuf's int64."""
    if 0 <= number < 0x80:
        return bytes((number,))
    number &= 0xFFFFFFFFFFFFFFFF
    output = bytearray()
    while number > 0x7F:
        output.append(number & 0x7F | 0x80)
        number >>= 7
    output.append(number)
    return bytes(output)


def unpack_varints(data: "bytes | bytearray | memoryview") -> Array:
    """Return the numbers of a packed field as uint64.

    Raises:
        RequestError: the last one does not end, or one is too long.
    """
    source = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(source < 0x80)
    if len(source) and (not len(ends) or ends[-1] != len(source) - 1):
        raise RequestError(400, "the message is malformed: a number does not end")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - starts + 1
    if len(lengths) and lengths.max() > _MAX_VARINT_BYTES:
        raise RequestError(400, "the message is malformed: a number is too long")
    numbers = np.zeros(len(ends), np.uint64)
    for index in range(int(lengths.max(initial=0))):
        is_there = lengths > index
        bits = (source[starts[is_there] + index] & 0x7F).astype(np.uint64)
        numbers[is_there] |= bits << np.uint64(7 * index)
    return numbers


def _too_many_fields() -> RequestError:
    return RequestError(413, f"a message has more than {_MAX_FIELDS} fields, the limit here")


def _find_value(data: memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Return where the value behind a tag begins and ends."""
    start = at
    if wire_type == _LENGTH:
        length, start = read_varint(data, at)
        end = start + length
    elif wire_type == _VARINT:
        _, end = read_varint(data, at)
    elif wire_type in (_FIXED32, _FIXED64):
        end = at + (8 if wire_type == _FIXED64 else 4)
    else:
        raise RequestError(400, f"the message is malformed: wire type {wire_type}")
    if end > len(data):
        raise RequestError(400, "the message is malformed: a field is longer than the message")
    return start, end


def _decode_text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as cause:
        raise RequestError(400, "the message is malformed: a string is not UTF-8") from cause


def _make_defaults(message: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in _FIELDS[message]:
        if field.label == "map":
            values[field.name] = {}
        elif field.label == "repeated":
            values[field.name] = []
        elif field.label == "packed":
            values[field.name] = bytearray()
        elif field.kind in _DEFAULTS and message not in ("InferParameter", "ModelRepositoryParameter"):
            values[field.name] = _DEFAULTS[field.kind]
    return values
