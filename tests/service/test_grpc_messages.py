"""The table of messages and its reader and writer, beside protobuf with the messages of tritonclient."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toolkit.cases import cases

from edgekit_runtime.errors import RequestError
from edgekit_runtime.service.grpc.messages import (
    MESSAGES,
    encode_varint,
    read_message,
    split_raw_contents,
    unpack_varints,
    write_message,
)

pb2: Any = pytest.importorskip("tritonclient.grpc.service_pb2")


def find_descriptors() -> dict[str, Any]:
    """Return what protobuf knows of all messages, nested ones too."""
    found: dict[str, Any] = {}
    stack = list(pb2.DESCRIPTOR.message_types_by_name.values())
    while stack:
        descriptor = stack.pop()
        found[descriptor.name] = descriptor
        stack += descriptor.nested_types
    return found


KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
}
DESCRIPTORS = find_descriptors()


@cases("message", MESSAGES)
def test_fields_have_the_numbers_and_kinds_of_the_proto(message: str) -> None:
    by_number = {field.number: field for field in DESCRIPTORS[message].fields}
    for number, name, label, kind in MESSAGES[message]:
        field = by_number[number]
        assert field.name == name
        assert field.is_repeated == bool(label)
        if label == "packed":
            assert KINDS[field.type] not in ("string", "bytes")
        elif label == "map":
            assert field.message_type.fields_by_name["value"].message_type.name == kind
        else:
            assert (field.message_type.name if field.message_type else KINDS[field.type]) == kind


def test_request_of_protobuf_is_read(client_request: Any) -> None:
    values = read_message("ModelInferRequest", client_request.SerializeToString())
    assert (values["model_name"], values["model_version"], values["id"]) == ("m", "2", "an id")
    assert values["parameters"]["priority"] == {"uint64_param": 1}
    assert values["parameters"]["flag"] == {"bool_param": False}
    assert values["parameters"]["scale"] == {"double_param": 0.5}
    (tensor,) = values["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("x", "INT32", [2, -1, 1 << 40])
    assert unpack_varints(tensor["contents"]["int_contents"]).view(np.int64).tolist() == [1, -2, 300]
    assert values["raw_input_contents"] == [b"abc", b""]


@pytest.fixture
def client_request() -> Any:
    request = pb2.ModelInferRequest(model_name="m", model_version="2", id="an id")
    request.parameters["priority"].uint64_param = 1
    request.parameters["flag"].bool_param = False
    request.parameters["scale"].double_param = 0.5
    tensor = request.inputs.add(name="x", datatype="INT32", shape=[2, -1, 1 << 40])
    tensor.contents.int_contents.extend([1, -2, 300])
    request.raw_input_contents.extend([b"abc", b""])
    return request


def test_raw_contents_are_split_off_uncopied(client_request: Any) -> None:
    data = memoryview(client_request.SerializeToString())
    described, raw = split_raw_contents(data)
    assert [bytes(view) for view in raw] == [b"abc", b""]
    assert all(view.obj is data.obj for view in raw)
    client_request.ClearField("raw_input_contents")
    assert read_message("ModelInferRequest", described) == read_message(
        "ModelInferRequest", client_request.SerializeToString()
    )


def test_raw_contents_between_other_fields_are_split_off() -> None:
    message = b"\x3a\x01a" + b"\x0a\x01m" + b"\x3a\x01b" + b"\x1a\x01i"
    described, raw = split_raw_contents(memoryview(message))
    assert (described, [bytes(view) for view in raw]) == (b"\x0a\x01m\x1a\x01i", [b"a", b"b"])


TEXT = st.text(max_size=20)
COUNT = st.integers(0, (1 << 64) - 1)
SHAPE = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4)
TENSOR = st.fixed_dictionaries({"name": TEXT, "datatype": TEXT, "shape": SHAPE})
METADATA = st.fixed_dictionaries(
    {
        "name": TEXT,
        "versions": st.lists(TEXT, max_size=3),
        "platform": TEXT,
        "inputs": st.lists(TENSOR, max_size=3),
    }
)


@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
@given(METADATA)
def test_written_message_is_what_protobuf_reads_and_writes(values: dict[str, Any]) -> None:
    data = write_message("ModelMetadataResponse", {**values, "unknown": object()})
    message = pb2.ModelMetadataResponse.FromString(data)
    assert message.name == values["name"]
    assert list(message.versions) == values["versions"]
    assert [list(tensor.shape) for tensor in message.inputs] == [
        tensor["shape"] for tensor in values["inputs"]
    ]
    assert message.SerializeToString() == data
    assert read_message("ModelMetadataResponse", data) == {**values, "outputs": []}


@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
@given(st.lists(COUNT, max_size=20))
def test_packed_numbers_are_those_that_were_written(numbers: list[int]) -> None:
    assert unpack_varints(b"".join(map(encode_varint, numbers))).tolist() == numbers


def test_unpacked_numbers_mean_the_same_as_packed() -> None:
    unpacked = write_message("TensorMetadata", {"name": "x"}) + b"\x18\x05\x18\x07"
    assert read_message("TensorMetadata", unpacked)["shape"] == [5, 7]


@settings(max_examples=10 * settings().max_examples)  # 1000 in the long run
@given(st.sampled_from([name for name in MESSAGES if name.endswith("Request")]), st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused(name: str, data: bytes) -> None:
    try:
        read_message(name, data)
    except RequestError as error:
        assert error.status in (400, 413)
    try:
        split_raw_contents(memoryview(data))
    except RequestError as error:
        assert error.status == 400


@settings(max_examples=5 * settings().max_examples)  # 500 in the long run
@given(st.data())
def test_mutated_request_is_a_message_or_refused(data: st.DataObject) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "contents": {"fp32_contents": bytes(16)}}
    parameters = {"timeout": {"int64_param": 1}}
    whole = bytearray(
        write_message("ModelInferRequest", {"model_name": "m", "inputs": [tensor], "parameters": parameters})
    )
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_message("ModelInferRequest", bytes(whole))
    except RequestError as error:
        assert error.status in (400, 413)
