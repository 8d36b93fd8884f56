"""Requests and answers with long JSON: read and written in slices, so that others are served meanwhile."""

import itertools
import json
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.runtime.conftest import PackageMaker
from tests.service.canary_fakes import FakeLane
from tests.service.service_parts import (
    Replies,
    Running,
    X,
    Y,
    ask,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    write_identity,
)
from tests.service.wiring_parts import load
from tests.toolkit.cases import cases

from edgekit_runtime.errors import RequestError, UnavailableError
from edgekit_runtime.protocol.json_tensors import Sliced, finish
from edgekit_runtime.service.answers.answer_path import AnswerPath
from edgekit_runtime.service.api.inference import InferenceHandler
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.oip.shared_memory import Regions
from edgekit_runtime.service.oip.time_slices import Slicer
from edgekit_runtime.service.options.config import Inference
from edgekit_runtime.service.options.resources import MediaLimits, RegionLimits
from edgekit_runtime.tensors import TensorSpec

ECHO = "/v2/models/echo/infer"
LIMIT_BYTES = 1 << 20
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serves `echo` and `linear`."""
    folder = tmp_path_factory.mktemp("long")
    write_identity(maker, folder / "echo.edgepkg", ["float32"])
    maker.write(folder / "linear.edgepkg")
    config = make_config(
        folder, inference=Inference(max_json_bytes=16 << 20, max_json_response_bytes=16 << 20)
    )
    with running(config, PackageFiles([folder], maker.trust)) as started:
        yield started


def echo_bytes(x: Array, *, is_binary: bool, **more: Any) -> bytes:
    entry: dict[str, Any] = {"name": "in_float32", "datatype": "FP32", "shape": list(x.shape)}
    if is_binary:
        entry["parameters"] = {"binary_data_size": x.nbytes}
    else:
        entry["data"] = x.tolist()
    text = json.dumps({"inputs": [entry], **more}).encode()
    data = x.tobytes() if is_binary else b""
    return post_bytes(ECHO, text + data, f"Inference-Header-Content-Length: {len(text)}\r\n")


def test_long_json_both_ways_keeps_every_value(service: Running) -> None:
    x = np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32)
    output = ask(service, echo_bytes(x, is_binary=False, id="a")).json
    assert output["id"] == "a"
    assert output["outputs"][0]["shape"] == [20_000, 3]
    assert np.array_equal(np.array(output["outputs"][0]["data"], np.float32), x.reshape(-1))


@pytest.mark.parametrize("is_binary", [True, False])
def test_others_are_answered_while_long_json_is_worked_on(service: Running, *, is_binary: bool) -> None:
    x = np.random.default_rng(0).normal(size=(150_000, 3)).astype(np.float32)
    request = echo_bytes(x, is_binary=is_binary)
    with service.connect() as client, service.connect() as other:
        client.sendall(request)
        other.sendall(infer_bytes(X))
        assert Replies(other).next().binary == Y
        assert not select.select([client], [], [], 0)[0]
        assert Replies(client).next().status == 200


def test_answer_beyond_the_limit_is_refused_with_the_name_of_the_binary_form(service: Running) -> None:
    x = np.full((400_000, 3), 1 / 3, np.float32)
    reply = ask(service, echo_bytes(x, is_binary=True))
    assert reply.status == 400
    assert "binary_data_output" in reply.json["error"]
    assert "max_json_response_bytes" in reply.json["error"]
    again = ask(service, echo_bytes(x, is_binary=True, parameters={"binary_data_output": True}))
    assert again.binary == x.tobytes()


def test_nan_far_behind_is_refused_as_a_near_one(service: Running) -> None:
    x = np.zeros((10_000, 3), np.float32)
    x[-1, -1] = np.nan
    reply = ask(service, echo_bytes(x, is_binary=True))
    assert (reply.status, "binary_data" in reply.json["error"]) == (400, True)


def test_request_whose_json_is_read_during_a_swap_is_answered(maker: PackageMaker, tmp_path: Path) -> None:
    write_identity(maker, tmp_path / "echo-1.edgepkg", ["float32"])
    config = make_config(tmp_path, inference=Inference(max_json_bytes=64 << 20))
    x = np.random.default_rng(0).normal(size=(100_000, 3)).astype(np.float32)
    name = [{"name": "out_float32", "parameters": {"binary_data": True}}]
    with running(config, PackageFiles([tmp_path], maker.trust)) as started, started.connect() as client:
        write_identity(maker, tmp_path / "echo-2.edgepkg", ["float32"], version="2.0.0")
        client.sendall(echo_bytes(x, is_binary=False, outputs=name))
        assert load(started, "echo").status == 200
        reply = Replies(client).next()
        assert (reply.status, reply.binary) == (200, x.tobytes())


# Reading, against Python's own reader


def make_codec(spec: TensorSpec) -> Codec:
    regions, limits = Regions(RegionLimits()), {"max_json_bytes": LIMIT_BYTES}
    return Codec(
        "m", "1", inputs=[spec], outputs=[spec], regions=regions, max_json_response_bytes=1000, **limits
    )


def outcome(read: Callable[[], Any]) -> Any:
    """Return the values that were read, or that the request was refused as wrong."""
    try:
        _, inputs = read()
    except RequestError as error:
        return error.status
    return inputs["x"].tolist(), inputs["x"].dtype, inputs["x"].shape


def assert_read_alike(spec: TensorSpec, text: bytes) -> None:
    body = memoryview(text)
    codec = make_codec(spec)
    alike = outcome(lambda: codec.decode(body, None))
    assert outcome(lambda: finish(codec.decode_in_slices(body, None))) == alike


def document(data: Any, shape: tuple[int, ...], datatype: str = "FP32", indent: int | None = None) -> bytes:
    entry = {"name": "x", "datatype": datatype, "shape": list(shape), "data": data}
    return json.dumps({"id": 'a"[1,2]\\', "inputs": [entry], "outputs": []}, indent=indent).encode()


SHAPES = [(700,), (3, 5, 40), (1, 1, 1, 600), (300, 1, 2), (2, 300)]


@cases("shape", SHAPES)
@cases("indent", [None, 3])
@cases("datatype", ["FP32", "INT64", "BOOL"])
def test_arrays_flat_and_nested_are_read_alike(
    shape: tuple[int, ...], indent: int | None, datatype: str
) -> None:
    x = np.random.default_rng(0).normal(size=shape) * 1e6
    array = {"FP32": x.astype(np.float32), "INT64": x.astype(np.int64), "BOOL": x > 0}[datatype]
    spec = TensorSpec("x", array.dtype.name, tuple(f"d{axis}" for axis in range(len(shape))))
    for data in (array.tolist(), array.reshape(-1).tolist()):
        text = document(data, shape, datatype, indent)
        read = finish(make_codec(spec).decode_in_slices(memoryview(text), None))[1]["x"]
        assert np.array_equal(read, array)
        assert_read_alike(spec, text)


WRONG = [
    ("a value too few", b"7.5, ", b""),
    ("a value too many", b"7.5, ", b"7.5, 1, "),
    ("no value", b"7.5, ", b", "),
    ("a word", b"7.5, ", b"seven, "),
    ("a string", b"7.5, ", b'"7.5", '),
    ("null", b"7.5, ", b"null, "),
    ("a truth value", b"7.5, ", b"true, "),
    ("an object", b"7.5, ", b'{"a": 1}, '),
    ("an empty object", b"7.5, ", b"{}, "),
    ("NaN", b"7.5, ", b"NaN, "),
    ("infinity", b"7.5, ", b"-Infinity, "),
    ("infinity by size", b"7.5, ", b"1e400, "),
    ("out of range", b"7.5, ", b"1e39, "),
    ("a bracket too many", b"7.5, ", b"7.5, [], "),
    ("a nested value", b"7.5, ", b"[7.5], "),
    ("a bracket behind its value", b"7.5, ", b"7.5[, "),
    ("a misplaced bracket", b"7.5, ", b"[7.5, "),
    ("not UTF-8", b"7.5, ", b"\xff7.5, "),
    ("zeros", b"7.5, ", b"\0 7.5, "),
    ("a quote", b"7.5, ", b'7.5", '),
    ("infinity elsewhere", b'"outputs": []', b'"outputs": Infinity'),
    ("an array behind a minus", b'"data": [', b'"data": -['),
    ("two arrays", b'"data": [', b'"data": [], "data": ['),
    ("numbers for a list", b'"inputs"', b'"inputs": [1, 2], "more"'),
]


@pytest.mark.parametrize("shape", [(700,), (7, 100)])
@pytest.mark.parametrize(("find", "replace"), [(a, b) for _, a, b in WRONG], ids=[name for name, *_ in WRONG])
def test_wrong_document_is_refused_alike(shape: tuple[int, ...], find: bytes, replace: bytes) -> None:
    data = [float(number) + 0.5 for number in range(700)]
    spec = TensorSpec("x", "float32", tuple(f"d{axis}" for axis in range(len(shape))))
    for nested in (data, np.reshape(data, shape).tolist()):
        text = document(nested, shape).replace(find, replace, 1)
        assert text != document(nested, shape)
        assert_read_alike(spec, text)


@pytest.mark.parametrize("place", range(4))
def test_value_missing_among_many_spaces_is_refused(place: int) -> None:
    """Else the tensor would show what the memory held before."""
    values = [b"1.5", b"2.5", b"3.5", b"4.5"]
    assert_read_alike(TensorSpec("x", "float32", ("N",)), spread(values))
    values[place] = b""
    assert_read_alike(TensorSpec("x", "float32", ("N",)), spread(values))


def spread(values: list[bytes]) -> bytes:
    data = (b" " * 5000 + b",").join(values)
    head = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%d], "data": [' % len(values)
    return head + data + b"]}]}"


@settings(max_examples=3 * settings().max_examples)  # 300 in the long run
@given(st.sampled_from(SHAPES), st.randoms(), st.integers(1, 4))
def test_document_with_changed_bytes_is_read_or_refused_alike(
    shape: tuple[int, ...], random: Any, changes: int
) -> None:
    spec = TensorSpec("x", "float32", tuple(f"d{axis}" for axis in range(len(shape))))
    text = bytearray(document(np.arange(np.prod(shape)).reshape(shape).tolist(), shape))
    for _ in range(changes):
        text[random.randrange(len(text))] = random.choice(b'[],{}":0123456789.-eE \n\\Itn')
    assert_read_alike(spec, bytes(text))


@example(b"[" * 300_000)
@example(b'"' * 300_000)
@example(b'{"a":' * 60_000)
@example(b'{"inputs":[' + b"1" * 300_000 + b"]}")
@example(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[4000000000],"data":[' + b"1," * 300 + b"1]}]}")
@example(b'{"a":[{"b":1,"c":[' + b"1,[" * 10_000)
@given(st.binary(max_size=2000))
def test_any_bytes_are_refused(text: bytes) -> None:
    codec = make_codec(TensorSpec("x", "float32", ("N",)))
    with pytest.raises(RequestError):
        finish(codec.decode_in_slices(memoryview(text), None))


def test_much_else_than_numbers_is_refused() -> None:
    text = json.dumps({"inputs": [], "more": ["text"] * 20_000}).encode()
    with pytest.raises(RequestError, match="limit here") as caught:
        finish(make_codec(TensorSpec("x", "float32", ("N",))).decode_in_slices(memoryview(text), None))
    assert caught.value.status == 413


# The slices


class FakeLoop:
    """Keeps what is to be called, for the test to call it."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


def work_through(said: list[str], name: str, count: int) -> Sliced[None]:
    for _ in range(count):
        said.append(name)
        yield


def test_one_slice_of_one_work_is_done_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # each look at the clock is a second later
    monkeypatch.setattr("edgekit_runtime.service.oip.time_slices.time.perf_counter", lambda: next(ticks))
    said: list[str] = []
    loop: Any = FakeLoop()
    slicer = Slicer(loop, 100)
    slicer.start(work_through(said, "a", 2), 10)
    slicer.start(work_through(said, "b", 3), 10)
    turns = []
    while loop.soon:
        before = len(said)
        loop.turn()
        turns.append("".join(said[before:]))
    assert [turn for turn in turns if turn] == ["a", "b", "a", "b", "b"]


@pytest.mark.parametrize("stays", [True, False])
def test_client_that_goes_leaves_no_work_behind(monkeypatch: pytest.MonkeyPatch, *, stays: bool) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("edgekit_runtime.service.oip.time_slices.time.perf_counter", lambda: next(ticks))
    loop: Any = FakeLoop()
    lane = FakeLane(compute=lambda _given: RequestError(500, "seen"))
    codec = make_codec(TensorSpec("x", "float32", ("N",)))
    metrics, loaded = SimpleNamespace(refused=0), SimpleNamespace(remote=None)
    served = SimpleNamespace(codec=codec, lane=lane, metrics=metrics, loaded=loaded, sampler=None)
    lane.attempt = lambda _inputs: None  # type: ignore[attr-defined]
    models: Any = SimpleNamespace(find=lambda _name, _version: served)
    connection: Any = SimpleNamespace(
        is_open=True, is_local=True, deadline_s=None, respond_error=lambda _error: None
    )
    head: Any = SimpleNamespace(json_bytes=None)
    text = document([0.5] * 10_000, (10_000,))
    InferenceHandler(
        models, lambda *_: None, Slicer(loop, 1 << 30), AnswerPath(loop, MediaLimits())
    ).handle_request("m", None, connection, head, memoryview(text))
    for _ in range(3):
        loop.turn()
    connection.is_open = stays
    turns = 0
    while loop.soon:
        loop.turn()
        turns += 1
    assert (turns > 10, len(lane.calls)) == (stays, stays)


def test_work_that_fails_ends_no_other() -> None:
    said: list[str] = []
    loop: Any = FakeLoop()
    slicer = Slicer(loop, 100)

    def fail() -> Sliced[None]:
        yield
        raise ValueError

    slicer.start(fail(), 10)
    slicer.start(work_through(said, "b", 3), 10)
    with pytest.raises(ValueError):
        loop.turn()
    while loop.soon:
        loop.turn()
    assert said == ["b"] * 3


def test_works_that_hold_too_much_together_are_refused_until_some_end() -> None:
    said: list[str] = []
    loop: Any = FakeLoop()
    slicer = Slicer(loop, 100)
    slicer.start(work_through(said, "a", 1), 1000)  # one alone may
    with pytest.raises(UnavailableError):
        slicer.start(work_through(said, "b", 1), 1)
    while loop.soon:
        loop.turn()
    slicer.start(work_through(said, "c", 1), 60)
    while loop.soon:
        loop.turn()
    assert said == ["a", "c"]
