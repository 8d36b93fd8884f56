"""Webhooks: what arrives is signed, in order, at least once, and to none that did not ask for it."""

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from edgekit_fleet.operations.webhooks import WebhookSender, add_webhook, list_webhooks, remove_webhook
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store, open_store, sqlite_url
from edgekit_runtime.errors import FleetError


class Receiver(HTTPServer):
    """Keeps what it gets, and answers as it is told to."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/hook?a=1"
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.on_message: Any = None

    @property
    def numbers(self) -> list[int]:
        return [json.loads(body)["data"]["number"] for _, body in self.received]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.received.append((headers, body))
        if self.server.on_message is not None:
            self.server.on_message()
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.send_response(status)
        self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(sqlite_url(tmp_path / "fleet.db"))
    yield store
    store.close()


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def write(store: Store, *actions: str) -> None:
    with store.transaction() as session:
        for action in actions:
            audit.record(session, "ann", action, "d1", why="é")


def test_message_is_signed_as_standard_webhooks_say(store: Store, receiver: Receiver):
    secret = add_webhook(store, "ci", receiver.url, ["rollout"], actor="ann")
    write(store, "device.tag", "rollout.log")
    assert WebhookSender(store, Clock()).turn() == 1
    (headers, body) = receiver.received[0]
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    plain = json.loads(body)
    assert (plain["type"], plain["data"]["subject"], plain["data"]["detail"]) == (
        "rollout.log",
        "d1",
        {"why": "é"},
    )


def test_messages_come_in_order_and_again_after_a_failure(store: Store, receiver: Receiver):
    clock = Clock()
    add_webhook(store, "all", receiver.url, ["a"], actor="ann")
    write(store, *["a"] * 45)
    receiver.statuses = [204, 204, 500]
    sender = WebhookSender(store, clock)
    assert sender.turn() == 2
    assert (list_webhooks(store)[0].failures, "answered 500" in list_webhooks(store)[0].because) == (1, True)
    assert sender.turn() == 0  # it waits first
    clock.now += 6
    while list_webhooks(store)[0].waiting:
        sender.turn()
    first = receiver.numbers[0]
    assert receiver.numbers == [first, first + 1, first + 2, *range(first + 2, first + 45)]
    assert list_webhooks(store)[0].failures == 0


def test_pauses_grow_to_an_hour_at_most(store: Store, receiver: Receiver):
    clock = Clock()
    add_webhook(store, "all", receiver.url, ["a"], actor="ann")
    write(store, "a")
    sender = WebhookSender(store, clock)
    receiver.statuses = [500] * 20
    for _ in range(20):
        clock.now += 3601
        sender.turn()
    assert len(receiver.received) == 20


def test_redirect_is_not_followed(store: Store, receiver: Receiver):
    add_webhook(store, "all", receiver.url, ["a"], actor="ann")
    write(store, "a")
    receiver.statuses = [302]
    assert WebhookSender(store, Clock()).turn() == 0
    assert len(receiver.received) == 1


def test_two_senders_do_not_send_the_same(store: Store, receiver: Receiver):
    add_webhook(store, "all", receiver.url, ["a"], actor="ann")
    write(store, *["a"] * 5)
    clock = Clock()
    other = WebhookSender(store, clock)
    receiver.on_message = other.turn
    assert WebhookSender(store, clock).turn() == 5
    assert len(receiver.received) == 5


def test_address_that_is_gone_is_reported_and_a_removed_webhook_gets_nothing(
    store: Store, receiver: Receiver
):
    clock = Clock()
    add_webhook(store, "gone", "http://127.0.0.1:1/", ["a"], actor="ann")
    write(store, "a")
    assert WebhookSender(store, clock).turn() == 0
    assert "refused" in list_webhooks(store)[0].because
    remove_webhook(store, "gone", actor="ann")
    clock.now += 3600
    assert WebhookSender(store, clock).turn() == 0


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://example.com/",
        "ftp://h/",
        "https://",
        "https://u:p@h/",
        "https://h:99999/",
        "https://h/\r\nx: y",
    ],
)
def test_unsafe_address_is_refused(store: Store, url: str):
    with pytest.raises(FleetError, match="webhook URL"):
        add_webhook(store, "x", url, [], actor="ann")


def test_answer_that_drips_does_not_keep_the_others_waiting(store: Store, receiver: Receiver) -> None:
    stop = threading.Event()

    def drip() -> None:
        connection, _ = slow.accept()
        with contextlib.suppress(OSError), connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not stop.wait(0.1):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as slow:
        dripping = threading.Thread(target=drip)
        dripping.start()
        ending = threading.Timer(20, stop.set)  # without a limit of ours
        ending.start()
        add_webhook(store, "a-slow", f"http://127.0.0.1:{slow.getsockname()[1]}/", [], actor="ann")
        add_webhook(store, "b", receiver.url, [], actor="ann")
        with store.transaction() as session:
            audit.record(session, "ann", "release.make", "r1")
        WebhookSender(store, answer_limit_s=0.5).turn()
        was_cut = not stop.is_set()
        stop.set()
        ending.cancel()
        dripping.join()
    assert was_cut
    assert receiver.numbers[-1] == 3
    assert [one.failures for one in list_webhooks(store)] == [1, 0]
