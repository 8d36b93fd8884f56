"""What the client encodes, the service decodes to equal arrays, and the reverse; no sockets are involved."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.client.responses import ResponseHead, read_response
from edgekit_runtime.errors import DataError, TransportError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.protocol.infer_request import (
    InferRequest,
    InferTensor,
    RequestedOutput,
    SharedPlace,
    encode_request,
)
from edgekit_runtime.protocol.infer_response import decode_response
from edgekit_runtime.protocol.json_fields import load_object
from edgekit_runtime.protocol.json_tensors import finish
from edgekit_runtime.protocol.rest import model_path, parse_infer_path
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.options.resources import RegionLimits
from edgekit_runtime.tensors import Array, TensorSpec

DTYPES = st.sampled_from(list(DATATYPE_OF_DTYPE))
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn, *, is_finite: bool) -> Array:
    dtype = draw(DTYPES)
    elements = {"allow_nan": False, "allow_infinity": False} if is_finite and "float" in dtype else None
    return draw(arrays_of.arrays(dtype, draw(SHAPES), elements=elements))


def named_arrays(*, is_finite: bool) -> st.SearchStrategy[dict[str, Array]]:
    return st.dictionaries(
        st.text(min_size=1, max_size=4), arrays(is_finite=is_finite), min_size=1, max_size=3
    )


def make_codec(inputs: Mapping[str, Array], outputs: Mapping[str, Array] | None = None) -> Codec:
    """Return the codec of a model whose sizes are free, except those of 0: a free size is at least 1."""
    return Codec(
        "m",
        "1",
        inputs=[
            TensorSpec(
                name,
                array.dtype.name,
                tuple(f"{index}.{axis}" if size else 0 for axis, size in enumerate(array.shape)),
            )
            for index, (name, array) in enumerate(inputs.items())
        ],
        outputs=[TensorSpec(name, array.dtype.name, array.shape) for name, array in (outputs or {}).items()],
        regions=Regions(RegionLimits()),
        max_json_bytes=1 << 20,
        max_json_response_bytes=1 << 20,
    )


def assert_equal(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def receive(parts: tuple[Any, ...]) -> tuple[ResponseHead, memoryview]:
    """Return a response as the client's link has it."""
    whole = b"".join(part.tobytes() if isinstance(part, np.ndarray) else part for part in parts)
    data, _, body = whole.partition(b"\r\n\r\n")
    fields = dict(line.split(": ") for line in data.decode().split("\r\n")[1:])
    assert int(fields["Content-Length"]) == len(body)
    length = fields.get("Inference-Header-Content-Length")
    head = ResponseHead(
        status=200,
        body_bytes=len(body),
        json_bytes=length and int(length),
        closes=False,
        retry_after_s=None,
        data=data + b"\r\n\r\n",
    )
    return head, memoryview(body)


# Requests


@given(named_arrays(is_finite=False))
def test_binary_request_of_the_client_is_decoded_to_its_arrays(inputs: dict[str, Array]) -> None:
    options = InferOptions("m", None, 3, 0.5)
    template = make_template(options, inputs, [None] * len(inputs), (), "Host: localhost\r\n")
    sent = template.start + b"".join(array.tobytes() for array in inputs.values())
    assert len(sent) == template.size_bytes
    head, _, body = sent.partition(b"\r\n\r\n")
    fields = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    assert int(fields["Content-Length"]) == len(body)
    json_bytes = int(fields["Inference-Header-Content-Length"])
    request, found = make_codec(inputs, {"y": np.zeros(2)}).decode(memoryview(body), json_bytes)
    assert_equal(found, inputs)
    assert (request.priority, request.timeout_us) == (3, 500_000)
    assert request.outputs == (RequestedOutput("y", is_binary=True),)


@given(named_arrays(is_finite=True))
def test_json_request_is_decoded_to_its_arrays_at_once_and_in_slices(inputs: dict[str, Array]) -> None:
    tensors = [InferTensor(name, array.dtype, array.shape, values=array) for name, array in inputs.items()]
    body = memoryview(encode_request(InferRequest(tuple(tensors))))
    codec = make_codec(inputs)
    assert_equal(codec.decode(body, None)[1], inputs)
    assert_equal(finish(codec.decode_in_slices(body, None))[1], inputs)


@given(
    st.none() | st.text(min_size=1, max_size=9),
    st.integers(0, 9),
    st.none() | st.integers(1, 1 << 50),
    st.lists(st.booleans() | st.builds(SharedPlace, st.text(), st.integers(0, 99), st.integers(0, 99))),
)
def test_whatever_else_a_request_states_is_decoded(
    request_id: str | None, priority: int, timeout_us: int | None, places: list[bool | SharedPlace]
) -> None:
    outputs = tuple(
        RequestedOutput(str(index), place is True, None if isinstance(place, bool) else place)
        for index, place in enumerate(places or [True])
    )
    values = np.zeros((2, 3), np.int8)
    tensor = InferTensor("x", values.dtype, values.shape, shared=SharedPlace("r", 8, values.nbytes))
    sent = InferRequest((tensor,), outputs, request_id, priority, timeout_us)
    codec = make_codec({"x": values}, {output.name: values for output in outputs})
    found = codec._decode_json(load_object(encode_request(sent), "the request"))
    assert (found.id, found.priority, found.timeout_us) == (request_id, priority, timeout_us)
    assert found.outputs == outputs
    assert [one.shared for one in found.inputs] == [tensor.shared]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_json_does_not_have_is_refused_when_it_is_sent(value: float) -> None:
    array = np.array([value], np.float32)
    with pytest.raises(DataError, match="send it as binary data"):
        encode_request(InferRequest((InferTensor("x", array.dtype, array.shape, values=array),)))


@given(st.text(), st.none() | st.text())
def test_path_of_the_client_is_the_one_that_the_service_parses(name: str, version: str | None) -> None:
    assert parse_infer_path(f"{model_path(name, version)}/infer") == (name, version)


# Responses


@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
@given(named_arrays(is_finite=True), st.data(), st.none() | st.text(min_size=1, max_size=9))
def test_response_of_the_service_is_read_to_its_arrays(
    outputs: dict[str, Array], data: st.DataObject, request_id: str | None
) -> None:
    asked = tuple(RequestedOutput(name, data.draw(st.booleans())) for name in outputs)
    codec, memory = make_codec({}, outputs), bytearray(1 << 16)
    head, body = receive(codec.encode(InferRequest((), asked, request_id), outputs, {}))
    found, layout = read_response(head, body, None, memory)
    assert_equal(found, outputs)
    assert layout is not None
    memory[: layout.size_bytes] = head.data + bytes(body)
    assert_equal(layout.read(None), outputs)


@given(named_arrays(is_finite=False))
def test_next_response_is_read_with_its_own_binary_values(outputs: dict[str, Array]) -> None:
    asked = InferRequest((), tuple(RequestedOutput(name, is_binary=True) for name in outputs))
    codec, memory = make_codec({}, outputs), bytearray(1 << 16)
    zeros = {name: np.zeros_like(array) for name, array in outputs.items()}
    _, layout = read_response(*receive(codec.encode(asked, zeros, {})), None, memory)
    head, body = receive(codec.encode(asked, outputs, {}))
    assert layout is not None
    memory[: layout.size_bytes] = head.data + bytes(body)
    assert memory.startswith(layout.start)
    assert_equal(layout.read(None), outputs)


def test_response_that_states_its_times_is_not_expected_again() -> None:
    outputs: dict[str, Array] = {"y": np.array([1.0, 2.0], np.float32)}
    asked = InferRequest((), (RequestedOutput("y", is_binary=True),))
    head, body = receive(make_codec({}, outputs).encode(asked, outputs, {}))
    timed = head.data[:-2] + b"Server-Timing: compute;dur=0.012\r\n\r\n"
    found, layout = read_response(replace(head, data=timed), body, None, bytearray(1 << 16))
    assert layout is None
    assert_equal(found, outputs)


def test_values_that_a_caller_changes_do_not_come_back_in_the_next_equal_response() -> None:
    outputs: dict[str, Array] = {"y": np.array([1.0, 2.0], np.float32)}
    asked = InferRequest((), (RequestedOutput("y", is_binary=False),))
    head, body = receive(make_codec({}, outputs).encode(asked, outputs, {}))
    first, _ = read_response(head, body, None, bytearray())
    first["y"][:] = 0
    second, _ = read_response(head, body, None, bytearray())
    assert_equal(second, outputs)


@given(st.binary(max_size=99) | st.text(max_size=99).map(str.encode))
def test_any_bytes_are_a_response_or_a_transport_error(text: bytes) -> None:
    with pytest.raises(TransportError, match="not one of the protocol"):
        decode_response(text)
