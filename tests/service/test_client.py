"""The client against the real service, and against services that misbehave."""

import contextlib
import http.server
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import Running, X, make_config, running, write_identity

import edgekit_runtime
from edgekit_runtime import Client
from edgekit_runtime.errors import DataError, RequestError, TransportError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.system.local_sockets import limit_time


@pytest.fixture(params=["unix", "tcp"])
def client(linear: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    address = linear.socket_path if request.param == "unix" else f"http://127.0.0.1:{linear.port}"
    with Client(address) as client:
        yield client


def test_outputs_come_as_arrays_of_their_own(client: Client) -> None:
    first = client.infer("linear", {"x": X})["y"]
    second = client.infer("linear", {"x": X * 2}, version="1.0.0", priority=1, timeout_s=5.0)["y"]
    first[...] += 1
    assert np.array_equal(first, X @ WEIGHT + 1)
    assert np.array_equal(second, X * 2 @ WEIGHT)


@pytest.mark.parametrize("rows", [1, 1000, 100_000])
def test_large_tensors_arrive_whole(client: Client, rows: int) -> None:
    x = np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32)
    assert np.allclose(client.infer("linear", {"x": x})["y"], x @ WEIGHT, rtol=1e-4, atol=1e-5)


def test_bound_call_sends_what_the_arrays_hold_now(client: Client) -> None:
    x = X.copy()
    call = client.bind("linear", {"x": x})
    for factor in (1, 2, 3):
        x[...] = X * factor
        assert np.array_equal(call()["y"], X * factor @ WEIGHT)


def test_outputs_of_a_bound_call_stay_as_they_are(client: Client) -> None:
    x = X.copy()
    call = client.bind("linear", {"x": x})
    found = []
    for factor in range(5):
        x[...] = X * factor
        found.append(call()["y"])
    for factor, y in enumerate(found):
        assert np.array_equal(y, X * factor @ WEIGHT)
        y[...] = 0  # they are the caller's


def test_array_with_gaps_is_not_bound(client: Client) -> None:
    with pytest.raises(DataError, match="gaps"):
        client.bind("linear", {"x": np.zeros((4, 4), np.float32)[:, ::-1]})


def test_array_with_gaps_is_sent_as_its_values(client: Client) -> None:
    x = np.arange(40, dtype=np.float32).reshape(4, 10).T
    assert np.array_equal(client.infer("linear", {"x": x})["y"], x @ WEIGHT)


def test_all_datatypes_come_back_as_they_were_sent(maker: PackageMaker, tmp_path: Path) -> None:
    write_identity(maker, tmp_path / "echo.edgepkg", list(DATATYPE_OF_DTYPE))
    inputs = {f"in_{dtype}": np.array([[1, 0, 1], [0, 0, 1]], dtype) for dtype in DATATYPE_OF_DTYPE}
    source = PackageFiles([tmp_path / "echo.edgepkg"], maker.trust)
    with running(make_config(tmp_path), source) as service, Client(service.socket_path) as client:
        outputs = client.infer("echo", inputs)
        shared = {name: client.shared(array.shape, array.dtype) for name, array in inputs.items()}
        for name, array in shared.items():
            array[...] = inputs[name]
        again = client.infer("echo", shared)
    for name, array in inputs.items():
        for found in (outputs, again):
            out = found[name.replace("in_", "out_")]
            assert (out.dtype, out.tolist()) == (array.dtype, array.tolist())


def test_metadata_tell_what_is_there(client: Client) -> None:
    assert client.metadata()["name"] == "edgekit"
    assert client.metadata("linear")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert client.ready()
    assert client.ready("linear", "1.0.0")
    assert not client.ready("linear", "2")


def test_refusal_keeps_the_connection(client: Client) -> None:
    for _ in range(3):
        with pytest.raises(RequestError, match="unknown") as caught:
            client.infer("other", {"x": X})
        assert caught.value.status == 404
    assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


@pytest.mark.parametrize("dtype", [">f4", "c8", "U3"])
def test_array_that_cannot_be_sent_is_said(client: Client, dtype: str) -> None:
    with pytest.raises(DataError, match="x"):
        client.infer("linear", {"x": np.zeros((1, 4), dtype)})


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({"x": [[1, 2, 3, 4]]}, None, "input 'x': got a list.*asarray"),
        ([X], None, "inputs: got a list"),
        ({"x": None}, None, "got a NoneType"),
        ({"x": X}, ["y"], "outputs: got a list.*leave outputs out"),
        ({"x": X}, {"y": [[0, 0]]}, "output 'y': .*shared"),
    ],
)
def test_what_is_no_array_is_said_with_what_to_do(
    client: Client, inputs: Any, outputs: Any, message: str
) -> None:
    for ask in (client.infer, client.bind):
        with pytest.raises(DataError, match=message):
            ask("linear", inputs, outputs=outputs)
    assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0, 1e7])
def test_time_that_cannot_be_waited_is_refused(client: Client, timeout_s: float) -> None:
    for ask in (client.infer, client.bind):
        with pytest.raises(DataError, match="timeout_s"):
            ask("linear", {"x": X}, timeout_s=timeout_s)
    with pytest.raises(DataError, match="timeout_s"):
        Client(timeout_s=timeout_s)
    assert np.array_equal(client.infer("linear", {"x": X}, timeout_s=1e6)["y"], X @ WEIGHT)


def test_body_beyond_the_limit_is_refused_with_the_services_words(linear: Running) -> None:
    with Client(linear.socket_path) as client, pytest.raises(RequestError, match="limit") as caught:
        client.infer("linear", {"x": np.zeros((5_000_000, 4), np.float32)})
    assert caught.value.status == 413


def test_connection_that_the_service_closed_is_made_anew(linear: Running) -> None:
    with Client(linear.socket_path) as client:
        for _ in range(3):
            assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)
            linear.call(lambda: [one.close() for one in list(linear.service.http._connections)])


def test_service_that_is_not_there_is_said(tmp_path: Path) -> None:
    with Client(str(tmp_path / "nothing.sock")) as client, pytest.raises(TransportError, match="running"):
        client.metadata()


NAMES = [
    "none/x HTTP/1.1\r\nHost: l\r\n\r\nGET /v2 HTTP/1.1\r\nX: ",
    "a b",
    "\u2603",
    "\ud800",
    "linear/load?",
    "\x00",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_cannot_become_a_request_of_its_own(client: Client, name: str) -> None:
    arrays = {"x": X}
    for ask in (
        lambda: client.load(name),
        lambda: client.metadata(name),
        lambda: client.infer(name, arrays),
        lambda: client.infer("linear", arrays, version=name),
    ):
        with pytest.raises(RequestError) as caught:
            ask()
        assert caught.value.status in (404, 409)
    with contextlib.suppress(RequestError):
        client.unload(name)
    assert [line["state"] for line in client.index()] == ["READY"]
    assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


@pytest.mark.parametrize("token", ["a\r\nX: y", "secret\n", "two words", "\u2603", "\x7f"])
def test_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(DataError, match="token") as caught:
        Client("127.0.0.1:1", token=token)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        *("", "ftp://a:1", "localhost:port", "https://", "unix:", "https://host/a?b=1", "https://host/a b"),
        *("localhost:65536", f"localhost:{'9' * 5000}", f"{'a' * 70}\u00e4:80", "a..b\u00e4:80"),
    ],
)
def test_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(TransportError), Client(address, insecure=True) as client:
        client.metadata()


@pytest.mark.parametrize("prefix", ["/edge", "/edge/north/"])
def test_client_asks_below_the_path_of_its_address(prefix: str) -> None:
    paths = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = answer  # noqa: N815  # the server looks for these

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}{prefix}") as client:
                client.ready("linear")
                client.load("linear")
                with pytest.raises(TransportError, match="protocol"):
                    client.infer("linear", {"x": X})
        finally:
            server.shutdown()
            thread.join()
    stem = prefix.rstrip("/")
    assert paths == [
        *(f"{stem}/v2/models/linear/ready", f"{stem}/v2/repository/models/linear/load"),
        f"{stem}/v2/models/linear/infer",
    ]


@contextlib.contextmanager
def fake_service(path: Path, behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """Accept one connection, and let `behave` do with it what it does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connected:
                connected.recv(65536)
                behave(connected)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield str(path)
        finally:
            thread.join(10)


def answer_with(stated: str, values: bytes) -> bytes:
    text = f'{{"outputs":[{{"name":"y",{stated},"parameters":{{"binary_data_size":{len(values)}}}}}]}}'
    return (
        f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + len(values)}\r\n\r\n{text}"
    ).encode() + values


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"outputs": 1}',
        answer_with('"datatype":"FP32","shape":[-1,-2]', bytes(8)),
        answer_with(f'"datatype":"FP32","shape":{[1] * 70}', bytes(4)),
    ],
)
def test_answer_that_is_none_becomes_an_error(tmp_path: Path, answer: bytes) -> None:
    with (
        fake_service(tmp_path / "f.sock", lambda connected: connected.sendall(answer)) as path,
        Client(path) as client,
        pytest.raises(TransportError),
    ):
        client.infer("linear", {"x": X})


def test_answers_that_change_between_calls_are_read_for_what_they_are(tmp_path: Path) -> None:
    """Also one that comes in pieces, and one that is as long as the one before and says something else."""
    numbers = np.arange(4, dtype=np.float32)
    flat, square = '"datatype":"FP32","shape":[4]', '"datatype":"FP32","shape":[2,2]'
    answers = [
        *(answer_with(flat, numbers.tobytes()), answer_with(flat, numbers.tobytes())),
        *(answer_with(square, numbers.tobytes()), answer_with(flat, numbers.tobytes())),
        answer_with(flat.replace("FP32", "INT8"), bytes(range(4))),
        *(answer_with('"datatype":"UINT32","shape":[4]', numbers.astype("u4").tobytes()),) * 2,
    ]

    def behave(peer: socket.socket) -> None:
        for index, answer in enumerate(answers):
            if index:  # the first request is taken already
                peer.recv(65536)
            cut = len(answer) - 7 if index % 2 else 30
            peer.sendall(answer[:cut])
            time.sleep(0.02)
            peer.sendall(answer[cut:])

    with fake_service(tmp_path / "s", behave) as path, Client(path) as client:
        call = client.bind("linear", {"x": X})
        found = [call()["y"] for _ in answers]
    assert [y.shape for y in found] == [(4,), (4,), (2, 2), (4,), (4,), (4,), (4,)]
    assert [y.dtype.name for y in found] == ["float32"] * 4 + ["int8", "uint32", "uint32"]
    for y in found:
        assert y.ravel().tolist() == [0, 1, 2, 3]


def test_service_that_does_not_answer_is_given_up_in_time(tmp_path: Path) -> None:
    done = threading.Event()
    with (
        fake_service(tmp_path / "f.sock", lambda _: done.wait(10) and None) as path,
        Client(path, timeout_s=0.2) as client,
    ):
        with pytest.raises(TransportError, match="within"):
            client.metadata()
        done.set()


def test_package_imports_neither_half_before_it_is_used() -> None:
    script = "import edgekit_runtime, sys; print('numpy' in sys.modules); from edgekit_runtime import Client"
    script += "; print('onnxruntime' in sys.modules, 'asyncio' in sys.modules)"
    folder = str(Path(edgekit_runtime.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=True
    )
    assert done.stdout.split() == ["False", "False", "False"]


def test_package_top_has_the_session_too(maker: PackageMaker, tmp_path: Path) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    session = edgekit_runtime.open_session(tmp_path / "linear.edgepkg", trust=maker.trust)
    assert np.array_equal(session.run({"x": X})["y"], X @ WEIGHT)
    session.close()
    with pytest.raises(AttributeError):
        edgekit_runtime.nothing  # noqa: B018


@pytest.mark.parametrize(("timeout_s", "seconds", "microseconds"), [(0.25, 0, 250_000), (3.5, 3, 500_000)])
def test_time_out_of_a_socket_is_kept_by_the_kernel(
    timeout_s: float, seconds: int, microseconds: int
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
        limit_time(connected, timeout_s)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            found = struct.unpack("ll", connected.getsockopt(socket.SOL_SOCKET, option, 16))
            # The kernel rounds up to its own ticks.
            assert found[0] == seconds
            assert microseconds <= found[1] <= microseconds + 10_000
