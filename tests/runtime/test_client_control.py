"""What a command says to a running service and asks it, whatever the service answers."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgekit_runtime.client.control import load_installed, read_index, read_metrics
from edgekit_runtime.errors import SlotError, TransportError
from edgekit_runtime.system import local_sockets, paths
from edgekit_runtime.system.paths import find_running_service

Answer = Callable[[int, bytes], Path]
LINE = {"name": "linear", "version": "1.0.0", "state": "READY", "reason": ""}


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answer]:
    """Answers the next request with a status and a body; returns the socket of the service."""
    with contextlib.ExitStack() as stack:

        def answer(status: int, body: bytes) -> Path:
            path = tmp_path / "a.sock"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            listener.listen()

            def serve() -> None:
                with listener.accept()[0] as connected:
                    connected.recv(65536)
                    head = b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
                    with contextlib.suppress(ConnectionError):  # the reader may have read enough
                        connected.sendall(head + body)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 30)
            return path

        yield answer


def test_service_that_switched_is_told(answering: Answer) -> None:
    assert load_installed(answering(200, b""), "linear") is True


@pytest.mark.parametrize("status", [199, 201, 204, 404, 503])
def test_service_that_answers_otherwise_has_refused(status: int, answering: Answer) -> None:
    with pytest.raises(SlotError, match=rf"linear: the service refused to switch \({status}\): "):
        load_installed(answering(status, b""), "linear")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": "no memory"}', "no memory"),
        (b'{"fault": 1}', '{"fault": 1}'),
        (b"[]", "[]"),
        (b"", "without a reason"),
        (b"x" * 300, "x" * 200),
        (b"\xff", "\ufffd"),
    ],
)
def test_refusal_is_given_with_what_the_service_said(body: bytes, reason: str, answering: Answer) -> None:
    with pytest.raises(SlotError) as caught:
        load_installed(answering(503, body), "linear")
    assert str(caught.value) == f"linear: the service refused to switch (503): {reason}"


def test_service_that_has_ended_is_none(tmp_path: Path) -> None:
    assert load_installed(tmp_path / "gone.sock", "linear") is False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "left.sock"))
    assert load_installed(tmp_path / "left.sock", "linear") is False


def test_index_gives_the_lines_of_each_model(answering: Answer) -> None:
    lines = [LINE, {**LINE, "version": "2.0.0"}, {**LINE, "name": "other"}]
    said = [{key: line[key] for key in ("version", "state", "reason")} for line in lines]
    path = answering(200, json.dumps(lines).encode())
    assert read_index(path) == {"linear": said[:2], "other": said[2:]}


@pytest.mark.parametrize("status", [199, 201, 404, 503])
def test_index_with_another_status_says_nothing(status: int, answering: Answer) -> None:
    assert read_index(answering(status, b"[]")) is None


@pytest.mark.parametrize("body", [b"", b"{", b"7", b"[7]", b'[{"name": "linear"}]'])
def test_index_that_is_none_says_nothing(body: bytes, answering: Answer) -> None:
    assert read_index(answering(200, body)) is None


@pytest.mark.parametrize(("size_bytes", "is_read"), [(4 << 20, True), ((4 << 20) + 1, False)])
def test_index_is_read_up_to_its_bound(size_bytes: int, is_read: bool, answering: Answer) -> None:
    body = b"[".ljust(size_bytes - 1) + b"]"
    assert (read_index(answering(200, body)) is not None) is is_read


def test_metrics_are_given_as_they_are(answering: Answer) -> None:
    assert read_metrics(answering(200, b"up 1\n")) == "up 1\n"


@pytest.mark.parametrize("status", [199, 201, 503])
def test_metrics_with_another_status_are_an_error(status: int, answering: Answer) -> None:
    with pytest.raises(TransportError, match=rf"gave no metrics \({status}\): "):
        read_metrics(answering(status, b"none"))


@pytest.fixture
def saying(tmp_path: Path) -> Iterator[Callable[[bytes, bool], Path]]:
    """Says some bytes to whoever asks, then ends or is silent; returns the socket of the service."""
    with contextlib.ExitStack() as stack:
        is_over = threading.Event()

        def say(said: bytes, ends: bool) -> Path:
            path = tmp_path / "a.sock"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            listener.listen()

            def serve() -> None:
                with listener.accept()[0] as connected:
                    connected.recv(65536)
                    connected.sendall(said)
                    if not ends:
                        is_over.wait(30)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 30)
            stack.callback(is_over.set)
            return path

        yield say


HEAD = b"HTTP/1.1 200 Said\r\n"


@pytest.mark.parametrize(
    "said",
    [
        b"",
        HEAD,
        HEAD + b"Content-Length: 8\r\n\r\n",
        HEAD + b"Content-Length: 8\r\n\r\nup 12",
        HEAD + b"\r\nup 1234\n",  # whose end nothing states
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nup 12\r\n",
    ],
)
def test_metrics_of_a_service_that_was_killed_meanwhile_are_an_error(
    said: bytes, saying: Callable[[bytes, bool], Path]
) -> None:
    with pytest.raises(TransportError):
        read_metrics(saying(said, True))


@pytest.mark.parametrize(
    "said",
    [b"", HEAD, HEAD + b"Content-Length: 8\r\n\r\n", HEAD + b"Content-Length: 8\r\n\r\nup 12"],
)
def test_metrics_that_come_too_late_are_an_error(said: bytes, saying: Callable[[bytes, bool], Path]) -> None:
    with pytest.raises(TransportError, match=r"no answer within 0\.1 s"):
        read_metrics(saying(said, False), timeout_s=0.1)


def test_metrics_of_a_service_that_has_ended_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        TransportError, match=r"cannot reach the service at .*gone\.sock: .*; is it running\?"
    ):
        read_metrics(tmp_path / "gone.sock")


@pytest.mark.parametrize(("use", "seconds"), [("tell", 300), ("ask", 5), ("metrics", 5)])
def test_service_that_does_not_answer_is_waited_for_in_bounds(
    use: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def time_out(_connected: socket.socket, timeout_s: float) -> None:
        waited.append(timeout_s)
        raise TimeoutError("timed out")

    monkeypatch.setattr(local_sockets, "limit_time", time_out)
    if use == "ask":
        assert read_index(tmp_path / "a.sock") is None
    elif use == "tell":
        with pytest.raises(
            SlotError, match=r"did not answer: .*: timed out; .*; restart it to open what is installed"
        ):
            load_installed(tmp_path / "a.sock", "linear")
    else:
        with pytest.raises(TransportError, match=r"cannot reach the service at .*: timed out"):
            read_metrics(tmp_path / "a.sock")
    assert waited == [seconds]


@pytest.mark.parametrize(
    ("there", "found"), [((), None), (("own",), "own"), (("system",), "system"), (("own", "system"), "own")]
)
def test_service_of_this_user_is_found_before_that_of_the_system(
    there: tuple[str, ...], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"own": tmp_path / "run/edgekit", "system": tmp_path / "system"}
    for name in there:
        folders[name].mkdir(parents=True)
        (folders[name] / "edgekit.sock").write_bytes(b"")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(paths, "SYSTEM_FOLDER", folders["system"])
    assert find_running_service() == (found and folders[found] / "edgekit.sock")


def test_service_of_the_system_is_found_without_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(paths, "SYSTEM_FOLDER", tmp_path)
    (tmp_path / "edgekit.sock").write_bytes(b"")
    assert find_running_service() == tmp_path / "edgekit.sock"
