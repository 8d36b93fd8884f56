"""Tests whether a broker supports what the fleet's protocol needs.

The tests send real messages, because the broker's replies prove nothing. For example, mosquitto accepts a
forbidden subscription but delivers no messages. Two nodes of RabbitMQ 4 do the same with a shared
subscription.
"""

import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES
from edgekit_runtime.errors import TransportError

_WAIT_S: Final = 3.0
_ABSENT_S: Final = 1.0  # a message that has not come after this time counts as lost
_SHARED: Final = 20

ContextOf = Callable[[str], ssl.SSLContext | None]
"""Takes the name of a client and returns a TLS context with the client's certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What the check requires of the broker.
        works: Whether the broker supports it.
        effect: `fine`, `adapted` if edgekit works without it, or `refused` if the broker cannot be used.
        text: The consequence, in one sentence.
    """

    check: str
    works: bool
    effect: Literal["fine", "adapted", "refused"]
    text: str


class _Probe:
    """A client that keeps what it receives."""

    def __init__(
        self,
        address: tuple[str, int],
        name: str,
        context: ssl.SSLContext | None,
        *,
        version: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv311,
        will: tuple[str, bytes] | None = None,
    ) -> None:
        self.received: list[tuple[str, bytes]] = []
        self._ready, self._granted = threading.Event(), threading.Event()
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=version)
        if context is not None:
            self.client.tls_set_context(context)
        if will is not None:
            self.client.will_set(*will, qos=1)
        self.client.on_message = lambda _client, _data, message: self.received.append(
            (message.topic, bytes(message.payload))
        )
        self.client.on_connect = self._on_connect
        self.client.on_subscribe = lambda *_: self._granted.set()
        self._code: ReasonCode | None = None
        try:
            self.client.connect(*address, keepalive=30)
            self.client.loop_start()
            is_in = self._ready.wait(_WAIT_S) and self._code is not None and not self._code.is_failure
        except (OSError, ValueError) as cause:
            self.close()
            raise TransportError(f"{name} cannot connect to {address[0]}:{address[1]}: {cause}") from cause
        if not is_in:
            self.close()
            raise TransportError(
                f"{address[0]}:{address[1]} does not let {name} in: {self._code or 'no answer'}"
            )

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, code: Any, _properties: Any) -> None:
        self._code = code
        self._ready.set()

    def subscribe(self, topic: str) -> None:
        self._granted.clear()
        self.client.subscribe(topic, 1)
        self._granted.wait(_WAIT_S)

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, expiry_s: int | None = None
    ) -> None:
        properties = None
        if expiry_s is not None:
            properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            properties.MessageExpiryInterval = expiry_s
        info = self.client.publish(topic, payload, 1, retain, properties)
        try:
            info.wait_for_publish(_WAIT_S)
        except (RuntimeError, ValueError):  # it was disconnected: messages elsewhere show that
            return

    def got(self, payload: bytes, wait_s: float = _WAIT_S) -> bool:
        """Return whether a message with this content comes."""
        limit = time.monotonic() + wait_s
        while time.monotonic() < limit:
            if any(message == payload for _, message in self.received):
                return True
            time.sleep(0.02)
        return False

    def break_off(self) -> None:
        """End the connection as a crash would."""
        self.client.loop_stop()
        sock = self.client.socket()
        if sock is not None:
            sock.close()

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


class BrokerProbe:
    """The checks of one broker, with three clients: a manager and two devices."""

    def __init__(
        self,
        address: tuple[str, int],
        context_of: ContextOf,
        *,
        manager: str,
        devices: tuple[str, str],
        nodes: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Prepare the checks.

        Args:
            address: The host and port of the broker.
            context_of: Returns the TLS context of a client, by name.
            manager: The name of a client that may read and write everything below `ek/v1`.
            devices: The names of two devices.
            nodes: Other nodes of the same cluster. The last one is read from.
        """
        self._address, self._other = address, nodes[-1] if nodes else address
        self._context_of = context_of
        self._manager, (self._first, self._second) = manager, devices
        self._mark = os.urandom(4).hex()

    def run(self) -> list[Finding]:
        """Run all checks, and return their findings.

        Raises:
            TransportError: The broker cannot be reached, or refuses MQTT 3.1.1 or one of the clients.
        """
        return [
            self._check_delivery(),
            self._check_isolation_of_writing(),
            self._check_isolation_of_reading(),
            self._check_identity(),
            self._check_retained(),
            self._check_last_will(),
            self._check_version_5(),
            self._check_expiry(),
            self._check_shared(),
        ]

    def _client(self, name: str, *, other: bool = False, **options: Any) -> _Probe:
        return _Probe(self._other if other else self._address, name, self._context_of(name), **options)

    def _topic(self, device: str, kind: str) -> str:
        return f"ek/v1/d/{device}/{kind}"

    def _payload(self, label: str) -> bytes:
        return f"{label} {self._mark}".encode()

    def _check_delivery(self) -> Finding:
        manager, device = self._client(self._manager), self._client(self._first, other=True)
        payload = self._payload("delivery").ljust(MAX_DOCUMENT_BYTES - 512)
        device.subscribe(self._topic(self._first, "desired"))
        manager.publish(self._topic(self._first, "desired"), payload)
        works = device.got(payload)
        _close(manager, device)
        text = "a document of the largest size reaches its device" if works else "a document does not arrive"
        return _finding("delivery", works, "refused", text)

    def _check_isolation_of_writing(self) -> Finding:
        manager, device = self._client(self._manager), self._client(self._first)
        manager.subscribe(self._topic("+", "event"))
        own, foreign = self._payload("own"), self._payload("foreign")
        device.publish(self._topic(self._second, "event"), foreign)
        if not device.client.is_connected():  # some brokers end the connection instead
            device.close()
            device = self._client(self._first)
        device.publish(self._topic(self._first, "event"), own)
        arrived = manager.got(own)
        works = arrived and not manager.got(foreign, _ABSENT_S)
        _close(manager, device)
        if not arrived:
            return _finding(
                "isolation of writing", False, "refused", "a device cannot write its own documents"
            )
        text = "a device can write only its own documents"
        bad = (
            "a device can write as another one: documents are signed, so it is refused and counted; set ACLs"
        )
        return _finding("isolation of writing", works, "adapted", text if works else bad)

    def _check_isolation_of_reading(self) -> Finding:
        manager, device = self._client(self._manager), self._client(self._first)
        payload = self._payload("secret")
        for topic in (self._topic(self._second, "desired"), "ek/v1/d/+/desired", "#"):
            device.subscribe(topic)
        manager.publish(self._topic(self._second, "desired"), payload)
        works = not device.got(payload, _ABSENT_S)
        _close(manager, device)
        text = "a device receives only what is meant for it"
        bad = "a device receives the documents of others; set ACLs: `pattern read ek/v1/d/%u/desired`"
        return _finding("isolation of reading", works, "refused", text if works else bad)

    def _check_identity(self) -> Finding:
        """A device that connects with the client identifier of another one must not end its connection."""
        victim = self._client(self._second)
        context = self._context_of(self._first)
        try:
            thief: _Probe | None = _Probe(self._address, self._second, context)
        except TransportError:
            thief = None
        time.sleep(_ABSENT_S / 2)
        payload = self._payload("still here")
        victim.subscribe(self._topic(self._second, "desired"))
        manager = self._client(self._manager)
        manager.publish(self._topic(self._second, "desired"), payload)
        works = victim.client.is_connected() and victim.got(payload)
        _close(manager, victim, *([thief] if thief is not None else []))
        text = "a device cannot take the connection of another one over"
        bad = "a device can end the connection of another one by its client identifier: bind it to its name"
        return _finding("identity", works, "adapted", text if works else bad)

    def _check_retained(self) -> Finding:
        manager = self._client(self._manager)
        payload, topic = self._payload("retained"), self._topic(self._first, "desired")
        manager.publish(topic, payload, retain=True)
        device = self._client(self._first, other=True)
        device.subscribe(topic)
        works = device.got(payload)
        manager.publish(topic, b"", retain=True)
        _close(manager, device)
        text = "a new subscriber gets the last document at once"
        bad = (
            "retained messages get lost: devices get their documents at `hello` instead, one round trip later"
        )
        return _finding("retained messages", works, "adapted", text if works else bad)

    def _check_last_will(self) -> Finding:
        manager = self._client(self._manager, other=True)
        payload, topic = self._payload("will"), self._topic(self._first, "hello")
        manager.subscribe(topic)
        self._client(self._first, will=(topic, payload)).break_off()
        works = manager.got(payload, 2 * _WAIT_S)
        _close(manager)
        text = "a lost connection shows at once"
        bad = "last wills do not arrive: a device that is gone looks online until it reports again"
        return _finding("last will", works, "adapted", text if works else bad)

    def _check_version_5(self) -> Finding:
        try:
            _close(self._client(self._first, version=MQTTProtocolVersion.MQTTv5))
            works = True
        except TransportError:
            works = False
        text = "it is there" if works else "it is missing: devices use MQTT 3.1.1"
        return _finding("MQTT 5", works, "adapted", text)

    def _check_expiry(self) -> Finding:
        topic, payload = self._topic(self._first, "desired"), self._payload("late")
        works = False
        try:
            manager = self._client(self._manager, version=MQTTProtocolVersion.MQTTv5)
            manager.publish(topic, payload, retain=True, expiry_s=1)
            time.sleep(2.0)
            device = self._client(self._first, version=MQTTProtocolVersion.MQTTv5)
            device.subscribe(topic)
            works = not device.got(payload, _ABSENT_S)
            manager.publish(topic, b"", retain=True)
            _close(manager, device)
        except TransportError:
            works = False
        text = "an expired message is not delivered"
        bad = "expired messages are delivered: a device looks at the time in the document itself"
        return _finding("message expiry", works, "adapted", text if works else bad)

    def _check_shared(self) -> Finding:
        readers = [self._client(self._manager)]
        readers[0].subscribe("$share/edgekit/ek/v1/d/+/event")
        device = self._client(self._first, other=True)
        for number in range(_SHARED):
            device.publish(self._topic(self._first, "event"), self._payload(f"shared {number}"))
        works = readers[0].got(self._payload(f"shared {_SHARED - 1}"))
        _close(device, *readers)
        text = "they deliver" if works else "they deliver nothing; edgekit uses none"
        return _finding("shared subscriptions", works, "adapted", text)


def _finding(check: str, works: bool, otherwise: Literal["adapted", "refused"], text: str) -> Finding:
    return Finding(check=check, works=works, effect="fine" if works else otherwise, text=text)


def _close(*clients: _Probe) -> None:
    for client in clients:
        client.close()
