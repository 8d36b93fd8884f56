"""Inference requests and responses: every datatype both ways, and whatever is wrong with a request."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import (
    Running,
    X,
    ask,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    write_identity,
)

from edgekit_runtime.errors import RequestError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.protocol.infer_request import decode_request
from edgekit_runtime.protocol.json_fields import load_object
from edgekit_runtime.protocol.json_tensors import read_values, write_values
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.options.resources import RegionLimits
from edgekit_runtime.tensors import TensorSpec

DTYPES = list(DATATYPE_OF_DTYPE)
INPUTS = (TensorSpec("x", "float32", ("N", 4)),)
OUTPUTS = (TensorSpec("y", "float32", ("N", 2)),)
LIMITS = {"max_json_bytes": 1000, "max_json_response_bytes": 1000}
INFER = "/v2/models/linear/infer"


@pytest.fixture(scope="module")
def echo(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("echo")
    write_identity(maker, folder / "echo.edgepkg", DTYPES)
    with running(make_config(folder), PackageFiles([folder / "echo.edgepkg"], maker.trust)) as service:
        yield service


def extremes(dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bool":
        return np.array([[True, False, True]])
    limits: Any = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    return np.array([[limits.min, 0, limits.max]], dtype)


def test_all_datatypes_go_in_and_out_as_binary_data(echo: Running) -> None:
    arrays = {f"in_{dtype}": extremes(dtype) for dtype in DTYPES}
    entries = [
        {
            "name": name,
            "datatype": DATATYPE_OF_DTYPE[array.dtype.name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in arrays.items()
    ]
    text = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    body = text + b"".join(array.tobytes() for array in arrays.values())
    fields = f"Inference-Header-Content-Length: {len(text)}\r\n"
    reply = ask(echo, post_bytes("/v2/models/echo/infer", body, fields))
    assert reply.status == 200, reply.body
    data = reply.binary
    for entry in reply.json["outputs"]:
        sent = arrays["in_" + entry["name"].removeprefix("out_")]
        size = entry["parameters"]["binary_data_size"]
        assert (data[:size], entry["shape"]) == (sent.tobytes(), [1, 3])
        data = data[size:]
    assert data == b""


def test_all_datatypes_go_in_and_out_as_json(echo: Running) -> None:
    arrays = {f"in_{dtype}": extremes(dtype) for dtype in DTYPES}
    entries = [
        {
            "name": n,
            "datatype": DATATYPE_OF_DTYPE[a.dtype.name],
            "shape": [1, 3],
            "data": a.reshape(-1).tolist(),
        }
        for n, a in arrays.items()
    ]
    reply = ask(echo, post_bytes("/v2/models/echo/infer", json.dumps({"inputs": entries}).encode()))
    assert reply.status == 200, reply.body
    for entry in reply.json["outputs"]:
        sent = arrays["in_" + entry["name"].removeprefix("out_")]
        assert np.array_equal(np.array(entry["data"], sent.dtype), sent.reshape(-1))


def test_named_outputs_come_in_their_order_each_in_its_form(echo: Running) -> None:
    entries = [
        {
            "name": f"in_{d}",
            "datatype": DATATYPE_OF_DTYPE[d],
            "shape": [1, 3],
            "data": extremes(d)[0].tolist(),
        }
        for d in DTYPES
    ]
    outputs = [{"name": "out_int8", "parameters": {"binary_data": True}}, {"name": "out_bool"}]
    request = {"inputs": entries, "outputs": outputs}
    reply = ask(echo, post_bytes("/v2/models/echo/infer", json.dumps(request).encode()))
    first, second = reply.json["outputs"]
    assert (first["name"], first["parameters"]) == ("out_int8", {"binary_data_size": 3})
    assert second == {"name": "out_bool", "datatype": "BOOL", "shape": [1, 3], "data": [True, False, True]}
    assert reply.binary == extremes("int8").tobytes()


def test_bool_that_is_neither_is_refused(echo: Running) -> None:
    entries: list[dict[str, Any]] = [
        {
            "name": f"in_{d}",
            "datatype": DATATYPE_OF_DTYPE[d],
            "shape": [1, 3],
            "data": extremes(d)[0].tolist(),
        }
        for d in DTYPES
        if d != "bool"
    ]
    entries.append(
        {"name": "in_bool", "datatype": "BOOL", "shape": [1, 3], "parameters": {"binary_data_size": 3}}
    )
    text = json.dumps({"inputs": entries}).encode()
    fields = f"Inference-Header-Content-Length: {len(text)}\r\n"
    reply = ask(echo, post_bytes("/v2/models/echo/infer", text + b"\x00\x01\x02", fields))
    assert (reply.status, "neither 0 nor 1" in reply.json["error"]) == (400, True)


def test_output_with_nan_is_not_made_into_json_that_is_none(linear: Running) -> None:
    x = np.array([[np.nan, 2, 3, 4]], np.float32)
    reply = ask(linear, infer_bytes(x, parameters={}))
    assert (reply.status, "binary_data_output" in reply.json["error"]) == (400, True)
    assert "output 'y'" in reply.json["error"]
    assert np.isnan(np.frombuffer(ask(linear, infer_bytes(x)).binary, np.float32)).all()


def request(**changes: Any) -> dict[str, Any]:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], **changes}
    return {"inputs": [{key: value for key, value in entry.items() if value is not ...}]}


HUGE = b"1" * 5000
BAD = {
    "not JSON": b"{",
    "not UTF-8": b'{"id": "\xff"}',
    "UTF-16": '{"inputs": []}'.encode("utf-16"),
    "a list": b"[]",
    "a long list": json.dumps([1] * 1000).encode(),
    "a word": b"null",
    "text": b'"1"',
    "a long list for the inputs": json.dumps({"inputs": [1] * 1000}).encode(),
    "a long list for a name": json.dumps(request(name=[1] * 1000)).encode(),
    "long data with a number of 5000 digits": b'{"inputs":[{"name":"x","datatype":"FP32",'
    b'"shape":[99,4],"data":[%s%s]}]}' % (b"1," * 395, HUGE),
    "nothing": b"",
    "NaN": b'{"inputs": [NaN]}',
    "infinity": b'{"inputs": [{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,-Infinity]}]}',
    "a bomb of lists": b"[" * 60_000,
    "a bomb of objects": b'{"a":' * 10_000,
    "a number of 5000 digits": b'{"inputs": [{"name":"x","datatype":"FP32","shape":[%s,4]}]}' % HUGE,
    "data of 4000 digits": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,%s]}]}'
    % (b"9" * 4000),
    **{
        name: json.dumps(value).encode()
        for name, value in {
            "no inputs": {},
            "inputs no list": {"inputs": {}},
            "inputs empty": {"inputs": []},
            "input no object": {"inputs": [1]},
            "input twice": {"inputs": request()["inputs"] * 2},
            "input unknown": request(name="z"),
            "input without name": request(name=...),
            "name no string": request(name=["x"]),
            "other datatype": request(datatype="FP64"),
            "unknown datatype": request(datatype="FP33"),
            "datatype no string": request(datatype={}),
            "bfloat": request(datatype="BF16"),
            "strings": request(datatype="BYTES"),
            "no shape": request(shape=...),
            "shape no list": request(shape="1,4"),
            "other rank": request(shape=[4]),
            "other size": request(shape=[1, 5]),
            "negative size": request(shape=[-1, 4]),
            "negative sizes": request(shape=[-1, -4]),
            "size 0": request(shape=[0, 4], data=[]),
            "giant size": request(shape=[2**62, 4]),
            "size beyond 64 bits": request(shape=[2**80, 4]),
            "size a fraction": request(shape=[1.0, 4]),
            "size true": request(shape=[True, 4]),
            "too few values": request(data=[1, 2, 3]),
            "too many values": request(data=[1, 2, 3, 4, 5]),
            "values in strings": request(data=["1", "2", "3", "4"]),
            "values true": request(data=[True, 2, 3, 4]),
            "values null": request(data=[None, 2, 3, 4]),
            "values nested unevenly": request(data=[[1, 2], [3], 4]),
            "values nested too deeply": request(data=[[[1, 2, 3, 4]]]),
            "values nested otherwise": request(data=[[1, 2], [3, 4]]),
            "values a number": request(data=1),
            "value too large": request(data=[1e39, 2, 3, 4]),
            "no values": request(data=...),
            "values twice": request(parameters={"binary_data_size": 16}),
            "parameters no object": request(parameters=[]),
            "binary size wrong": request(data=..., parameters={"binary_data_size": 15}),
            "binary size negative": request(data=..., parameters={"binary_data_size": -16}),
            "binary size a string": request(data=..., parameters={"binary_data_size": "16"}),
            "binary data missing": request(data=..., parameters={"binary_data_size": 16}),
            "unknown region": request(
                data=..., parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}
            ),
            "region no name": request(data=..., parameters={"shared_memory_region": 3}),
            "region without size": request(data=..., parameters={"shared_memory_region": "r"}),
            "outputs no list": {**request(), "outputs": {}},
            "output unknown": {**request(), "outputs": [{"name": "z"}]},
            "output twice": {**request(), "outputs": [{"name": "y"}, {"name": "y"}]},
            "output no object": {**request(), "outputs": ["y"]},
            "classes": {**request(), "outputs": [{"name": "y", "parameters": {"classification": "3"}}]},
            "binary no flag": {**request(), "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
            "id no string": {**request(), "id": 7},
            "id too long": {**request(), "id": "a" * 300},
            "priority negative": {**request(), "parameters": {"priority": -1}},
            "timeout no number": {**request(), "parameters": {"timeout": "1s"}},
            "sequence": {**request(), "parameters": {"sequence_id": 1}},
        }.items()
    },
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_bad_request_is_refused_with_an_error_of_the_protocol(linear: Running, body: bytes) -> None:
    reply = ask(linear, post_bytes(INFER, body))
    assert reply.status == 400, reply.body
    assert isinstance(reply.json["error"], str)
    assert len(reply.body) < 3000
    assert re.search(r"NoneType|NumberArray|\b(str|dict|tuple|float|sys)\b", reply.json["error"]) is None
    assert ask(linear, infer_bytes(X)).status == 200


@pytest.mark.parametrize("stated", [0, 5, 10**6, 10**17])
def test_wrong_header_length_is_refused(linear: Running, stated: int) -> None:
    text = json.dumps(request(data=..., parameters={"binary_data_size": 16})).encode()
    fields = f"Inference-Header-Content-Length: {stated}\r\n"
    assert ask(linear, post_bytes(INFER, text + X.tobytes(), fields)).status == 400


@pytest.mark.parametrize("extra", [b"", b"\x00" * 15, b"\x00" * 17])
def test_binary_data_of_another_length_is_refused(linear: Running, extra: bytes) -> None:
    text = json.dumps(request(data=..., parameters={"binary_data_size": 16})).encode()
    fields = f"Inference-Header-Content-Length: {len(text)}\r\n"
    assert ask(linear, post_bytes(INFER, text + extra, fields)).status == 400


def test_deadline_in_the_past_is_refused_with_504(linear: Running) -> None:
    reply = ask(linear, infer_bytes(X, parameters={"binary_data_output": True, "timeout": 1, "priority": 1}))
    assert reply.status in (200, 504)  # a microsecond may be enough on a fast machine


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
def test_numbers_at_the_ends_of_a_datatype_come_back_and_those_beyond_are_refused(dtype: str) -> None:
    is_float = dtype.startswith("float")
    info: Any = np.finfo(dtype) if is_float else np.iinfo(dtype)
    ends = [info.min, info.max]
    if is_float:
        ends = [float(info.min), float(info.max), float(info.smallest_subnormal), -0.0]
    text = b"".join(write_values(read_values(ends, np.dtype(dtype), (len(ends),), "x")))
    assert str(json.loads(b"[%s]" % text)) == str(ends)
    beyond = [10**400, -(10**400), 10**309, math.inf]
    beyond += [] if dtype == "float64" else [2 * int(info.max), 2.0 * float(info.max)]
    for number in beyond:
        with pytest.raises(RequestError, match=f"range of {dtype}|a fraction"):
            read_values([number], np.dtype(dtype), (1,), "x")


def make_codec() -> Codec:
    regions = Regions(RegionLimits())
    return Codec("m", "1", inputs=INPUTS, outputs=OUTPUTS, regions=regions, **LIMITS)


@pytest.mark.parametrize("how", ["binary", "json"])
def test_sizes_of_one_dimension_that_differ_are_refused(how: str) -> None:
    inputs = [TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq"))]
    regions = Regions(RegionLimits())
    codec = Codec("m", "1", inputs=inputs, outputs=OUTPUTS, regions=regions, **LIMITS)

    def decode(*shapes: tuple[int, int]) -> Any:
        arrays = {spec.name: np.zeros(shape, np.int64) for spec, shape in zip(inputs, shapes, strict=True)}
        entries = [
            {"name": name, "datatype": "INT64", "shape": list(array.shape)}
            | (
                {"data": array.tolist()}
                if how == "json"
                else {"parameters": {"binary_data_size": array.nbytes}}
            )
            for name, array in arrays.items()
        ]
        text = json.dumps({"inputs": entries}).encode()
        data = b"" if how == "json" else b"".join(array.tobytes() for array in arrays.values())
        return codec.decode(memoryview(text + data), len(text))[1]

    assert decode((2, 5), (2, 5))["mask"].shape == (2, 5)
    with pytest.raises(RequestError, match="'seq' is 5 in input 'ids' and 4 in input 'mask'") as caught:
        decode((2, 5), (2, 4))
    assert caught.value.status == 400
    with pytest.raises(RequestError, match="'batch' is 2 in input 'ids' and 1"):
        decode((2, 5), (1, 5))
    assert decode((1, 3), (1, 3))["ids"].shape == (1, 3)


def test_json_beyond_its_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(RequestError, match="binary data") as caught:
        make_codec().decode(memoryview(b"{" * 1001), None)
    assert caught.value.status == 413


def test_request_that_comes_again_gives_its_own_values() -> None:
    codec = make_codec()
    text = json.dumps(request(data=..., parameters={"binary_data_size": 16})).encode()
    for x in (X, X * 2):
        _, inputs = codec.decode(memoryview(text + x.tobytes()), len(text))
        assert np.array_equal(inputs["x"], x)
        assert inputs["x"].flags.aligned


def test_binary_data_are_not_copied_where_they_are_aligned() -> None:
    text = json.dumps(request(data=..., parameters={"binary_data_size": 16})).encode()
    memory = np.zeros(1000, np.uint8)
    start = -(memory.ctypes.data + len(text)) % 64
    body = memoryview(memory)[start : start + len(text) + 16]
    body[: len(text)] = text
    _, inputs = make_codec().decode(body, len(text))
    assert np.shares_memory(inputs["x"], memory)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["name", "x", "data"]), inner)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(["name", "datatype", "shape", "data", "parameters"])


@settings(max_examples=3 * settings().max_examples)  # 300 in the long run
@given(st.dictionaries(FIELDS, JSON), st.dictionaries(st.sampled_from(["id", "outputs", "parameters"]), JSON))
def test_any_json_gives_a_plan_or_a_refusal(entry: dict[str, Any], more: dict[str, Any]) -> None:
    inputs = [{**request()["inputs"][0], **entry}]
    data = json.dumps({"inputs": inputs, **more}).encode()
    try:
        plan = decode_request(load_object(data, "the request"), INPUTS, OUTPUTS)
    except RequestError as error:
        assert error.status == 400
    else:
        (planned,) = plan.inputs
        assert planned.name == "x"
        assert planned.shape[1] == 4


@settings(max_examples=3 * settings().max_examples)  # 300 in the long run
@given(st.binary(max_size=200), st.integers(0, 220))
def test_any_bytes_give_inputs_or_a_refusal(data: bytes, json_bytes: int) -> None:
    with pytest.raises(RequestError):
        make_codec().decode(memoryview(data), json_bytes)


@given(st.integers(1, 5), st.integers(-20, 20), st.randoms())
def test_a_request_with_flipped_bytes_is_answered_or_refused(rows: int, cut: int, random: Any) -> None:
    x = np.ones((rows, 4), np.float32)
    text = json.dumps(request(shape=[rows, 4], data=..., parameters={"binary_data_size": x.nbytes})).encode()
    body = bytearray(text + x.tobytes())
    for _ in range(3):
        body[random.randrange(len(body))] = random.randrange(256)
    if cut < 0:
        del body[cut:]
    try:
        _, inputs = make_codec().decode(memoryview(bytes(body)), len(text))
    except RequestError:
        return
    assert inputs["x"].shape[1] == 4


def test_weights_of_the_test_model_are_what_the_answers_come_from(linear: Running) -> None:
    x = np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)
    got = np.frombuffer(ask(linear, infer_bytes(x)).binary, np.float32).reshape(7, 2)
    assert np.allclose(got, x @ WEIGHT, rtol=1e-5)
