"""The messages of the protocol over gRPC: a table of their fields, and a reader and writer for protobuf.

A message is a dict from field names to values, as in JSON. Missing scalars have their default value, missing
messages are left out, and unknown fields are skipped.

Source: `grpc_service.proto` of KServe and Triton, and protobuf's encoding (protobuf.dev).
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.tensors import Array

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_FIELDS: Final = 4096  # of a message and all nested ones. Each takes a microsecond and an object
_MAX_PACKED_BYTES: Final = 1024  # of numbers that become Python objects
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
    return messages


MESSAGES: Final = _read_proto()
_ENTRIES: Final = {
    f"{message} entry": (_Field(1, "key", "", "string"), _Field(2, "value", "", message))
    for message in MESSAGES
}
_FIELDS: Final = {
    message: {field.number: field for field in fields} for message, fields in {**MESSAGES, **_ENTRIES}.items()
}
_CHOICES: Final = ("InferParameter", "ModelRepositoryParameter")  # one field is set, even to its default
_WIRE_TYPES: Final = {"bool": _VARINT, "int64": _VARINT, "uint64": _VARINT, "double": _FIXED64}
_NUMBERS: Final[Mapping[str, Any]] = {"bool": False, "int64": 0, "uint64": 0, "double": 0.0}
_DEFAULTS: Final[Mapping[str, Any]] = {**_NUMBERS, "string": "", "bytes": b""}
_CONTAINERS: Final[Mapping[str, Callable[[], Any]]] = {"repeated": list, "map": dict, "packed": bytearray}


def read_message(message: str, data: "bytes | memoryview") -> dict[str, Any]:
    """Parse a message, such as `ModelInferRequest`, to a dict from field names to values.

    Raises:
        RequestError: `data` is not a valid message, or has too many fields.
    """
    return _read_message(message, memoryview(data), iter(range(_MAX_FIELDS)))


def _read_message(message: str, data: memoryview, budget: Iterator[int]) -> dict[str, Any]:
    fields, values = _FIELDS[message], {}
    for field in fields.values():
        if field.label:
            values[field.name] = _CONTAINERS[field.label]()
        elif field.kind in _DEFAULTS and message not in _CHOICES:
            values[field.name] = _DEFAULTS[field.kind]
    for tag, _, start, end in _split_fields(data, budget):
        number = tag >> 3
        if number in fields:
            _add_value(values, fields[number], tag & 7, data[start:end], budget)
    return values


def _add_value(
    values: dict[str, Any], field: _Field, wire_type: int, data: memoryview, budget: Iterator[int]
) -> None:
    name, kind = field.name, field.kind
    if field.label == "packed":
        values[name] += data  # one number has the same bytes as a list of one
    elif field.label == "repeated" and kind == "int64" and wire_type == _LENGTH:
        if len(data) > _MAX_PACKED_BYTES:
            raise RequestError(400, f"{name}: {len(data)} bytes of numbers")
        values[name] += unpack_varints(data).view(np.int64).tolist()
    elif wire_type != _WIRE_TYPES.get(kind, _LENGTH):
        raise _malformed(f"field {name} has wire type {wire_type}")
    elif field.label == "map":
        entry = _read_message(f"{kind} entry", data, budget)
        values[name][entry["key"]] = entry.get("value", {})
    elif field.label == "repeated":
        values[name].append(_read_value(kind, data, budget))
    else:
        values[name] = _read_value(kind, data, budget)


def _read_value(kind: str, data: memoryview, budget: Iterator[int]) -> Any:
    if kind == "string":
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as cause:
            raise _malformed("a string is not UTF-8") from cause
    if kind == "bytes":
        return bytes(data)
    if kind == "double":
        return struct.unpack("<d", data)[0]
    if kind not in _DEFAULTS:
        return _read_message(kind, data, budget)
    number, _ = read_varint(data, 0)
    if kind == "bool":
        return number != 0
    return number - (1 << 64) if kind == "int64" and number >> 63 else number


def write_message(message: str, values: Mapping[str, Any]) -> bytes:
    """Encode a message. Values that are None and unknown fields are left out.

    `message` is a key of `MESSAGES`, such as `ModelInferResponse`.
    """
    output = bytearray()
    for field in _FIELDS[message].values():
        number, kind, elements = field.number, field.kind, values.get(field.name)
        if field.label == "map" and elements:
            kind, elements = f"{kind} entry", [{"key": key, "value": elements[key]} for key in elements]
        elif field.label == "repeated" and kind == "int64" and elements:
            kind, elements = "bytes", [b"".join(map(encode_varint, elements))]
        elif field.label in ("", "packed"):
            is_default = message not in _CHOICES and elements == _DEFAULTS.get(kind)
            elements = () if is_default else (elements,)
        for element in elements or ():
            if element is not None:
                output += _write_value(number, kind, element)
    return bytes(output)


def _write_value(number: int, kind: str, value: Any) -> bytes:
    if kind not in _WIRE_TYPES:
        text = value.encode(errors="replace") if kind == "string" else value
        data = text if kind in _DEFAULTS else write_message(kind, value)
        return head_of_bytes(number, len(data)) + data
    tag = encode_varint(number << 3 | _WIRE_TYPES[kind])
    return tag + (struct.pack("<d", value) if kind == "double" else encode_varint(int(value)))


def head_of_bytes(number: int, size_bytes: int) -> bytes:
    """Return the tag and length that precede the content of a bytes, string or message field."""
    return encode_varint(number << 3 | _LENGTH) + encode_varint(size_bytes)


def split_raw_contents(message: memoryview) -> tuple[bytes, list[memoryview]]:
    """Split a ModelInferRequest into the message without `raw_input_contents`, and views of these contents.

    Raises:
        RequestError: `message` is not valid protobuf, or has too many fields.
    """
    raw: list[memoryview] = []
    others: list[memoryview] = []
    begin = 0
    for tag, field, start, end in _split_fields(message, iter(range(_MAX_FIELDS))):
        if tag == 7 << 3 | _LENGTH:
            others.append(message[begin:field])
            raw.append(message[start:end])
            begin = end
    return b"".join((*others, message[begin:])), raw


def _split_fields(data: memoryview, budget: Iterator[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tag of each field, and where the field and its value begin and end.

    Raises:
        RequestError: `data` are no protobuf, or have more fields than `budget`.
    """
    end = 0
    while end < len(data):
        if next(budget, None) is None:
            raise RequestError(413, f"a message has more than {_MAX_FIELDS} fields, the limit here")
        field = end
        tag, start = read_varint(data, field)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length, start = read_varint(data, start)
            end = start + length
        elif wire_type == _VARINT:
            _, end = read_varint(data, start)
        elif wire_type in (_FIXED32, _FIXED64):
            end = start + (8 if wire_type == _FIXED64 else 4)
        else:
            raise _malformed(f"wire type {wire_type}")
        if end > len(data):
            raise _malformed("a field is longer than the message")
        yield tag, field, start, end


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at `at`, and the position after it.

    Raises:
        RequestError: The varint does not end.
    """
    if at < len(data) and data[at] < 0x80:  # most are short
        return data[at], at + 1
    number = 0
    for index, byte in enumerate(data[at : at + _MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number & 0xFFFFFFFFFFFFFFFF, at + index + 1
    raise _malformed("a number does not end")


def encode_varint(number: int) -> bytes:
    """Return the varint encoding of a number of at most 64 bits. Negative numbers are encoded as int64."""
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
    """Return the numbers of a packed field as a uint64 array.

    Raises:
        RequestError: The last number is incomplete, or a number is too long.
    """
    source = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(source < 0x80) + 1
    starts = np.concatenate(([0], ends))  # of the next number, too, which is not there
    if starts[-1] != len(source):
        raise _malformed("a number does not end")
    lengths = np.diff(starts)
    if lengths.max(initial=0) > _MAX_VARINT_BYTES:
        raise _malformed("a number is too long")
    numbers = np.zeros(len(ends), np.uint64)
    for index in range(int(lengths.max(initial=0))):
        is_there = lengths > index
        bits = (source[starts[:-1][is_there] + index] & 0x7F).astype(np.uint64)
        numbers[is_there] |= bits << np.uint64(7 * index)
    return numbers


def _malformed(reason: str) -> RequestError:
    return RequestError(400, f"the message is malformed: {reason}")
