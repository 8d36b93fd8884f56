"""Sinks of answers: files, HTTP, MQTT, and a queue that never waits for them."""

import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.free_port import free_port
from tests.waiting import bounded, wait_for

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions, hide_password
from edgekit_runtime.service.streams.sink import QueuedSink, UndeliverableError
from edgekit_runtime.service.streams.sinks import SINKS, open_sink

MOSQUITTO = shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/usr/bin:/bin")


def make_options(**changes: Any) -> StreamOptions:
    return StreamOptions(model="m", source="0", **changes)


def make_lines(count: int, begin: int = 0) -> list[bytes]:
    return [b'{"frame":%d}\n' % number for number in range(begin, begin + count)]


class FakeSink:
    """Keeps what it gets once it is open; before, it blocks or fails."""

    max_batch = 4

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.lines = error, list[bytes]()
        self.is_open, self.has_begun = threading.Event(), threading.Event()
        self.attempts, self.is_closed = 0, False

    def write(self, lines: Sequence[bytes]) -> None:
        self.attempts += 1
        self.has_begun.set()
        if self.error is not None and not self.is_open.is_set():
            raise self.error
        assert self.is_open.wait(60)
        self.lines += lines

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def test_queue_drops_its_oldest_answers_while_the_sink_blocks() -> None:
    fake = FakeSink()
    sink = QueuedSink("fake", fake, 3)
    first, *others = make_lines(8)
    sink.put(first)
    assert fake.has_begun.wait(60)
    for line in others:
        sink.put(line)  # returns although the sink hangs
    assert sink.to_json()["waiting"] == 3
    fake.is_open.set()
    sink.stop()
    sink.join()
    assert fake.lines == [first, *others[-3:]]
    assert (sink.written, sink.dropped, fake.is_closed) == (4, 4, True)


def test_failed_answers_are_written_again_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSink(OSError("disk full"))
    sink = QueuedSink("fake", fake, 100)
    for line in make_lines(6):
        sink.put(line)
    wait_for(lambda: fake.attempts >= 2, "a second attempt")
    assert sink.to_json()["error"] == "disk full"
    assert [record.getMessage() for record in caplog.records] == ["sink fake: disk full"]
    fake.is_open.set()
    wait_for(lambda: sink.written == 6, "all answers")
    assert (fake.lines, sink.dropped, sink.error) == (make_lines(6), 0, "")
    sink.stop()
    sink.join()


def test_answer_that_is_refused_is_dropped() -> None:
    fake = FakeSink(UndeliverableError("413"))
    sink = QueuedSink("fake", fake, 100)
    sink.put(b"x\n")
    wait_for(lambda: sink.dropped == 1, "the drop")
    assert sink.error == "413"
    fake.is_open.set()
    sink.put(b"y\n")
    wait_for(lambda: sink.written == 1, "the next answer")
    sink.stop()
    sink.join()


def test_sink_that_fails_at_the_end_does_not_hold_it_up() -> None:
    fake = FakeSink(OSError("gone"))
    sink = QueuedSink("fake", fake, 100)
    sink.put(b"x\n")
    assert fake.has_begun.wait(60)
    sink.stop()
    sink.join()
    assert (fake.is_closed, sink.dropped) == (True, 1)


# Files


def test_file_is_rotated_by_size_and_count(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "answers.jsonl"
    sink = open_sink(f"file:{path}", "s", make_options(max_file_bytes=1024, max_files=3))
    lines = make_lines(1000, 100_000)
    for line in lines:
        sink.put(line)
        wait_for(lambda: sink.to_json()["waiting"] < 16, "room")
    sink.stop()
    sink.join()
    paths = [Path(f"{path}.2"), Path(f"{path}.1"), path]
    assert set(path.parent.iterdir()) <= set(paths)
    written = b"".join(part.read_bytes() for part in paths if part.exists())
    assert b"".join(lines).endswith(written)
    assert 2048 <= len(written) <= 3 * (1024 + 16 * len(lines[0]))
    assert all(json.loads(line)["frame"] >= 0 for line in written.splitlines())


def test_file_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_text("a file in the way")
    sink = open_sink(f"file:{folder}/answers.jsonl", "s", make_options())
    sink.put(b"{}\n")
    wait_for(lambda: sink.error, "the error")
    folder.unlink()
    wait_for(lambda: sink.written == 1, "the answer")
    assert (folder / "answers.jsonl").read_bytes() == b"{}\n"
    sink.stop()
    sink.join()


def test_pipe_or_folder_in_place_of_a_file_is_refused_and_keeps_no_thread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ""):
        with pytest.raises(ConfigError, match="no regular file"):
            open_sink(f"file:{tmp_path}/{name}", "s", make_options())
    sink = open_sink(f"file:{tmp_path}/later", "s", make_options())
    os.mkfifo(tmp_path / "later")
    reader = os.open(tmp_path / "later", os.O_RDONLY | os.O_NONBLOCK)
    sink.put(b"{}\n")
    wait_for(lambda: "no regular file" in sink.error, "the refusal")
    os.close(reader)  # now to open it would wait
    (tmp_path / "later").unlink()
    wait_for(lambda: sink.written == 1, "the answer")
    assert (tmp_path / "later").read_bytes() == b"{}\n"
    sink.stop()
    sink.join()


# HTTP


class Receiver(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received: list[tuple[str, Any]]
    statuses: list[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.statuses.pop(0) if self.statuses else 204
        if status < 300:
            self.received.append((self.path + self.headers.get("Authorization", ""), json.loads(body)))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[http.server.ThreadingHTTPServer]:
    Receiver.received, Receiver.statuses = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_http_sink_posts_each_answer(receiver: http.server.ThreadingHTTPServer) -> None:
    sink = open_sink(f"http://me:a%40b@127.0.0.1:{receiver.server_port}/in?key=1", "s", make_options())
    Receiver.statuses = [204, 503, 204, 400]
    for line in make_lines(5):
        sink.put(line)
    wait_for(lambda: sink.written + sink.dropped == 5, "all answers")
    assert sink.dropped == 1  # which the server refuses for good
    assert [document["frame"] for _, document in Receiver.received] == [0, 1, 3, 4]
    assert {path for path, _ in Receiver.received} == {"/in?key=1Basic bWU6YUBi"}
    sink.stop()
    sink.join()


def test_http_server_that_is_not_there_yet_gets_the_answers_later() -> None:
    port = free_port()
    sink = open_sink(f"http://127.0.0.1:{port}/", "s", make_options())
    sink.put(b"{}\n")
    wait_for(lambda: sink.error, "the error")
    Receiver.received, Receiver.statuses = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Receiver) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        wait_for(lambda: sink.written == 1, "the answer")
        sink.stop()
        sink.join()
        server.shutdown()
        thread.join()


# MQTT


class Broker:
    """A mosquitto on a port of its own."""

    def __init__(self, folder: Path, port: int, *, is_open: bool = True) -> None:
        self.port = port
        config = folder / "mosquitto.conf"
        config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous {str(is_open).lower()}\n")
        assert MOSQUITTO is not None
        self.process = subprocess.Popen(
            [MOSQUITTO, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(self._is_listening, "mosquitto")

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class Subscriber:
    """Notes what the broker sends of all topics."""

    def __init__(self, port: int) -> None:
        from paho.mqtt import client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        self.messages: list[tuple[str, Any, bool]] = []
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2)
        self.client.on_message = self._take
        subscribed = threading.Event()
        self.client.on_subscribe = lambda *_: subscribed.set()
        self.client.connect("127.0.0.1", port)
        self.client.subscribe("#", 1)
        self.client.loop_start()
        assert subscribed.wait(60)

    def _take(self, _client: object, _data: object, message: Any) -> None:
        self.messages.append((message.topic, json.loads(message.payload), message.retain))

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_mqtt_sink_publishes_answers_and_a_retained_status(tmp_path: Path) -> None:
    port = free_port()
    broker = Broker(tmp_path, port)
    with bounded(broker.process):
        subscriber = Subscriber(port)
        sink = open_sink(f"mqtt://127.0.0.1:{port}", "yard", make_options())
        for line in make_lines(40):
            sink.put(line)
        wait_for(lambda: sink.written == 40, "all answers")
        sink.stop()
        sink.join()
        topic = "edgekit/streams/yard"
        wait_for(lambda: len(subscriber.messages) >= 42, "all messages")
        assert subscriber.messages[0] == (f"{topic}/status", {"state": "online"}, False)
        assert subscriber.messages[1:41] == [(topic, {"frame": number}, False) for number in range(40)]
        assert subscriber.messages[41][1] == {"state": "offline"}
        subscriber.close()
        late = Subscriber(port)
        wait_for(lambda: late.messages, "the retained status")
        assert late.messages == [(f"{topic}/status", {"state": "offline"}, True)]
        late.close()


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_mqtt_sink_comes_back_after_its_broker(tmp_path: Path) -> None:
    port = free_port()
    sink = open_sink(f"mqtt://127.0.0.1:{port}/a/b", "yard", make_options(max_queued=5))
    sink.put(b'{"frame":0}\n')
    wait_for(lambda: sink.error, "the error")
    for _ in range(2):
        written = sink.written
        broker = Broker(tmp_path, port)
        with bounded(broker.process):
            subscriber = Subscriber(port)
            sink.put(b'{"frame":1}\n')
            wait_for(lambda: sink.written > written, "an answer")  # noqa: B023
            wait_for(lambda: ("a/b", {"frame": 1}, False) in subscriber.messages, "it")  # noqa: B023
            subscriber.close()
    for line in make_lines(20, 2):
        sink.put(line)
    assert sink.to_json()["waiting"] <= 5
    sink.stop()
    sink.join()


@pytest.mark.skipif(MOSQUITTO is None, reason="mosquitto is not installed")
def test_broker_that_refuses_a_user_is_named_as_the_reason(tmp_path: Path) -> None:
    port = free_port()
    with bounded(Broker(tmp_path, port, is_open=False).process):
        sink = open_sink(f"mqtt://me:secret@127.0.0.1:{port}", "yard", make_options())
        sink.put(b"{}\n")
        wait_for(lambda: "refuses" in sink.error, "the refusal")
        assert "secret" not in json.dumps(sink.to_json())
        sink.stop()
        sink.join()


# Texts


@pytest.mark.parametrize(
    "text",
    [
        "ftp://x",
        "mqtt://",
        "http:///path",
        "mqtt://host/a/%23",
        "answers.jsonl",
        "http://h:99999/",
        "mqtt://h:x",
    ],
)
def test_sink_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        open_sink(text, "s", make_options())


def test_refusal_lists_all_forms() -> None:
    with pytest.raises(ConfigError) as caught:
        open_sink("ftp://x", "s", make_options())
    assert all(kind.form in str(caught.value) for kind in SINKS)


def test_passwords_are_not_shown() -> None:
    assert hide_password("rtsp://u:p@host/1 and mqtt://x@b") == "rtsp://host/1 and mqtt://b"
    assert hide_password("rtsp://u:a/b@c@host/1") == "rtsp://host/1"
    assert hide_password("http://h/v.mjpg?user=me&pwd=x&fps=5") == "http://h/v.mjpg?user=me&pwd=...&fps=5"
    assert hide_password("gstreamer:rtspsrc user-pw=x ! appsink") == "gstreamer:rtspsrc user-pw=... ! appsink"
    assert hide_password("/home/a@b/video.mp4") == "/home/a@b/video.mp4"
