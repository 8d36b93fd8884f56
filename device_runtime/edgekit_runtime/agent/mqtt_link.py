"""The link to the fleet's broker: a thread that connects, sends the newest messages, and receives.

paho-mqtt implements the protocol. Each connection uses a new client, so that paho-mqtt resends nothing. The
outbox in this module stores the newest message of each kind and key until the broker acknowledges it. The
thread waits with `selectors`, because paho's own loop uses `select`, which fails for file descriptors
above 1023.

Source: MQTT 5.0 and MQTT 3.1.1 (OASIS).
"""

import contextlib
import logging
import queue
import random
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, cast

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Kind, topic
from edgekit_runtime.agent.membership import LinkProblem, ResumingContext, explain_failure
from edgekit_runtime.records import dataclass

_MAX_IN_FLIGHT: Final = 8
_MAX_RECEIVED: Final = 64  # messages that wait for the agent. Further ones are lost
_MAX_PACKET_BYTES: Final = 2 * MAX_DOCUMENT_BYTES
_KEEPALIVE_S: Final = 60
_CONNECT_TIMEOUT_S: Final = 10.0
_HELLO_AGAIN_S: Final = 1.0  # least time between a connection and the next try
_MAX_WIDTH_S: Final = 900.0
_UNSUPPORTED_PROTOCOL: Final = 132
_REFUSALS: Final = (134, 135)  # bad user name or password, not authorized

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    kind: Kind
    payload: bytes
    is_retained: bool


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """A received message, or a notice from the link.

    Attributes:
        kind: `hello` means that a new connection is open. `payload` is then the local address of this device,
            and the agent answers with its hello. `event` means an attack by the broker, which `payload`
            describes.
        payload: content, not verified.
    """

    kind: Kind
    payload: bytes = b""


class MqttLink:
    """The connection of one device to its brokers. A thread keeps it open.

    Attributes:
        received: queue of received messages, see `LinkMessage`.
        will: payload of the last will of the next connection. The agent replaces it after each hello.
        reconnect_s: period over which devices spread their reconnections.
        problem: why there is no connection or why the last connection ended, or None if this is unknown.
    """

    def __init__(self, device: str, brokers: Sequence[str], context: ssl.SSLContext) -> None:
        """Prepare the link; `start` connects.

        Args:
            device: identifier of the device.
            brokers: `HOST:PORT` each, tried in turn.
            context: the TLS context, see `make_context`.
        """
        self.received: queue.SimpleQueue[LinkMessage] = queue.SimpleQueue()
        self.will, self.reconnect_s = b"", 30.0
        self.problem: LinkProblem | None = None
        self._failure: LinkProblem | None = None  # of the connection under way
        self._device, self._brokers, self._context = device, list(brokers), context
        self._outbox: dict[str, _Message] = {}
        self._in_flight: dict[int, tuple[str, _Message]] = {}
        self._lock = threading.Lock()  # guards the outbox; never held while paho is called
        self._protocol = MQTTProtocolVersion.MQTTv5
        self._is_greeted = self._is_accepted = self._is_refused = False
        self._stopping = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="edgekit-mqtt", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Disconnect when the outbox has been sent, or after `timeout_s`."""
        give_up_s = time.monotonic() + timeout_s
        while self.is_connected and self.count_waiting() and time.monotonic() < give_up_s:
            time.sleep(0.02)
        self._stopping.set()
        self._wake()
        self._thread.join(timeout_s)
        self._waker.close()
        self._woken.close()

    @property
    def is_connected(self) -> bool:
        """Whether the broker has accepted the connection and the agent has sent its hello."""
        return self._is_greeted

    def count_waiting(self) -> int:
        """Return the number of messages that the broker has not acknowledged yet."""
        with self._lock:
            return len(self._outbox)

    def put(self, kind: Kind, payload: bytes, *, key: str = "", is_retained: bool = False) -> None:
        """Send a message as soon as possible. It replaces an unsent message of the same kind and key.

        Args:
            kind: kind of the document. A `hello` must come first on each connection.
            payload: envelope of the document.
            key: distinguishes unsent messages of the same kind. For an event, it is the kind of event.
            is_retained: whether the broker stores the message for later subscribers.
        """
        with self._lock:
            self._outbox[f"{kind}/{key}"] = _Message(kind, payload, is_retained)
            self._is_greeted = self._is_greeted or (kind == "hello" and self._is_accepted)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes up anyway
            self._waker.send(b"\0")

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            was_accepted = False
            try:
                was_accepted = self._connect_once()
            except OSError as error:
                self._failure = explain_failure(error, self._brokers[0])
            except Exception as error:  # the link must come back after any error of the library
                self._failure = explain_failure(error, self._brokers[0])
                _logger.exception("the connection to broker %s failed", self._brokers[0])
            if not self._stopping.is_set():
                text = f"{self._brokers[0]}: the broker ended the connection without a word"
                self.problem = self._failure or LinkProblem(text)
                _logger.warning("%s", self.problem.text)
            failures = 0 if was_accepted else failures + 1
            self._brokers.append(self._brokers.pop(0))  # its node may be gone; another one is as good
            width_s = min(_MAX_WIDTH_S, self.reconnect_s * 2.0 ** min(failures, 8))
            least_s = min(_HELLO_AGAIN_S, width_s)
            self._stopping.wait(least_s + random.uniform(0.0, width_s - least_s))  # noqa: S311  # no secret

    def _connect_once(self) -> bool:
        """Connect and serve the connection until it ends; return whether the broker accepted it.

        Raises:
            OSError: there is no connection.
        """
        self._failure = None
        host, _, port = self._brokers[0].rpartition(":")
        client = self._make_client()
        client.connect_timeout = _CONNECT_TIMEOUT_S
        is_v5 = self._protocol == MQTTProtocolVersion.MQTTv5
        clean: mqtt.CleanStartOption = True if is_v5 else mqtt.MQTT_CLEAN_START_FIRST_ONLY
        client.connect(host.strip("[]"), int(port), _KEEPALIVE_S, clean_start=clean)
        try:
            self._serve(client)
        finally:
            was_accepted, self._is_accepted = self._is_accepted, False
            with self._lock:
                self._is_greeted = False
                self._in_flight.clear()
            if isinstance(self._context, ResumingContext):
                self._context.remember(client.socket())
                if self._context.failure is not None:
                    self._failure = explain_failure(self._context.failure, self._brokers[0])
            client.disconnect()
            client.loop_write()
        if not was_accepted and self._is_refused:
            # Old brokers refuse MQTT 5; some by closing the connection without a word.
            v5, v3 = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311
            self._protocol = v3 if is_v5 else v5
        return was_accepted

    def _make_client(self) -> mqtt.Client:
        is_v5 = self._protocol == MQTTProtocolVersion.MQTTv5
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._device,
            clean_session=None if is_v5 else True,
            protocol=self._protocol,
        )
        client.tls_set_context(self._context)
        client.will_set(topic(self._device, "hello"), self.will, qos=1, retain=True)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_subscribe = lambda *_: self._is_accepted_now(client)
        client.on_publish = lambda _client, _data, number, *_: self._forget(number)
        client.on_message = lambda _client, _data, message: self._receive(message)
        self._is_refused = True  # until the broker answers
        return client

    def _serve(self, client: mqtt.Client) -> None:
        with selectors.DefaultSelector() as selector:
            connection = cast("ssl.SSLSocket", client.socket())
            if connection is None:  # the broker has closed it already
                return
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while not self._stopping.is_set() and client.socket() is connection:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.want_write() else 0)
                selector.modify(connection, events)
                for key, ready in selector.select(_KEEPALIVE_S / 4):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(4096)
                        continue
                    if ready & selectors.EVENT_READ:
                        self._read(client, connection)
                    if ready & selectors.EVENT_WRITE:
                        client.loop_write()
                client.loop_misc()
                if client.socket() is connection:
                    self._flush(client)

    def _read(self, client: mqtt.Client, connection: ssl.SSLSocket) -> None:
        """Read the received bytes, including those that TLS has already taken from the socket.

        Raises:
            ConnectionError: a packet is too large; a broker could fill the memory with one.
        """
        while client.socket() is connection:
            client.loop_read()
            size_bytes = client._in_packet["remaining_length"]  # paho has no other way
            if size_bytes > _MAX_PACKET_BYTES:
                text = (
                    f"the broker sends a packet of {size_bytes} bytes, expected at most {_MAX_PACKET_BYTES}"
                )
                self.received.put(LinkMessage("event", text.encode()))
                raise ConnectionAbortedError(text)
            if not connection.pending():
                return

    def _on_connect(self, client: mqtt.Client, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        self._is_refused = reason.value == _UNSUPPORTED_PROTOCOL
        if reason.is_failure:
            text = f"{self._brokers[0]}: the broker refuses this device: {reason}"
            self._failure = LinkProblem(text, is_refusal=reason.value in _REFUSALS)
            client.disconnect()
            return
        client.subscribe(topic(self._device, "desired"), 1)

    def _on_disconnect(self, _client: mqtt.Client, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        if self._is_accepted:
            self._failure = LinkProblem(f"{self._brokers[0]}: the connection has ended: {reason}")

    def _is_accepted_now(self, client: mqtt.Client) -> None:
        self._is_accepted = True
        self.problem = None
        connection = cast("ssl.SSLSocket | None", client.socket())
        own_address = "" if connection is None else str(connection.getsockname()[0])
        self.received.put(LinkMessage("hello", own_address.encode()))

    def _receive(self, message: mqtt.MQTTMessage) -> None:
        if message.topic == topic(self._device, "desired") and message.payload:
            if self.received.qsize() >= _MAX_RECEIVED:
                _logger.warning("a message of %d bytes is dropped", len(message.payload))
            else:
                self.received.put(LinkMessage("desired", bytes(message.payload)))

    def _flush(self, client: mqtt.Client) -> None:
        """Send the outbox, a hello first, as far as the limit of messages in flight allows."""
        with self._lock:
            if not self._is_greeted:
                return
            sent = {message for _, message in self._in_flight.values()}
            ready = [(key, message) for key, message in self._outbox.items() if message not in sent]
            ready.sort(key=lambda pair: pair[1].kind != "hello")
            ready = ready[: max(0, _MAX_IN_FLIGHT - len(self._in_flight))]
        for key, message in ready:
            full_topic = topic(self._device, message.kind)
            number = client.publish(full_topic, message.payload, qos=1, retain=message.is_retained).mid
            with self._lock:
                self._in_flight[number] = (key, message)

    def _forget(self, number: int) -> None:
        with self._lock:
            key, message = self._in_flight.pop(number, ("", None))
            if self._outbox.get(key) is message:
                self._outbox.pop(key, None)
