"""The connection of a simulated device to the broker, with sequence numbers and lost messages."""

import asyncio
import hashlib
import random
import ssl
import time
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgekit_fleet.broker.mqtt_connection import ConnectionOptions, MqttConnection
from edgekit_fleet.simulation.behaviour import DeviceBehaviour
from edgekit_runtime import __version__
from edgekit_runtime.agent.documents import Hello, Kind, topic
from edgekit_runtime.agent.signing import seal


@dataclass(slots=True)
class DeviceCounts:
    """Counters of a device.

    Attributes:
        connects: The number of connections.
        resumed: The number of connections that resumed a TLS session.
        refused: The number of documents that the device refused.
        reports: The number of reports that the device sent.
    """

    connects: int = 0
    resumed: int = 0
    refused: int = 0
    reports: int = 0


class LinkOwner(Protocol):
    """The device that owns a link.

    Attributes:
        reconnect_s: The maximum time before the device reconnects, which the manager sets.
        stated_versions: The version of the newest desired document and the number of the last report.
    """

    name: str
    behaviour: DeviceBehaviour
    counts: DeviceCounts

    @property
    def reconnect_s(self) -> float: ...

    @property
    def stated_versions(self) -> tuple[int, int]: ...

    def said_hello(self) -> None:
        """Decide what to do after the link sent its hello on a new connection."""

    def take_desired(self, payload: bytes, at_s: float) -> None:
        """Accept a desired document, which arrived at `at_s` by the monotonic clock."""

    def lose_report(self) -> None:
        """Report the state again, because the broker may not have received the last report."""


class SimulatedLink:
    """A link that reconnects automatically while it is open."""

    def __init__(
        self,
        owner: LinkOwner,
        brokers: tuple[tuple[str, int], ...],
        context: ssl.SSLContext,
        key: Ed25519PrivateKey,
        draw: random.Random,
    ) -> None:
        self._owner, self._brokers, self._context, self._key, self._draw = owner, brokers, context, key, draw
        # As a new journal, so that documents of an earlier simulation are older.
        self._sequence = int(time.time() * 1000)
        self._presence = self._ends = 0
        self._will_sha256 = ""
        self._session: ssl.SSLSession | None = None
        self._connection: MqttConnection | None = None
        self._is_greeted = self._is_open = False
        self._ended = asyncio.Event()

    @property
    def is_online(self) -> bool:
        """Whether the device has sent its hello on the current connection."""
        return self._connection is not None and self._is_greeted

    def open(self, within_s: float) -> None:
        """Connect after a random delay of up to `within_s` seconds, and reconnect until `close`."""
        self._is_open = True
        self._ended.clear()
        wait_s = self._draw.uniform(0.0, within_s)
        asyncio.get_running_loop().call_later(wait_s, self._connect)

    def close(self, reason: str) -> None:
        self._is_open = False
        if self._connection is None:
            self._ended.set()
        self.drop(reason)

    async def wait_ended(self) -> None:
        """Wait until the last connection has ended after `close`."""
        await self._ended.wait()

    def drop(self, reason: str = "dropped") -> None:
        """Break the connection if there is one. The link reconnects if it is open."""
        if self._connection is not None:
            self._connection.abort(reason)

    def ping(self) -> None:
        """Send an MQTT ping if the device is online, so that the broker keeps the connection."""
        if self.is_online and self._connection is not None:
            self._connection.ping()

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def send(self, kind: Kind, document: object) -> None:
        """Sign and send a document if the device is online.

        With the probability `loss`, the connection breaks instead.
        """
        connection = self._connection
        if connection is None or not self._is_greeted:
            return
        if self._loses():
            connection.abort("lost")
            return
        payload = seal(document, kind, self._key)
        connection.publish(topic(self._owner.name, kind), payload, is_retained=kind in ("hello", "reported"))

    def _loses(self) -> bool:
        loss = self._owner.behaviour.loss
        return loss > 0 and self._draw.random() < loss

    def _connect(self) -> None:
        if not self._is_open or self._connection is not None:
            return
        name = self._owner.name
        self._presence = self.next_sequence()
        will = Hello(device=name, sequence=self._presence, online=False, runtime=__version__)
        envelope = seal(will, "hello", self._key)
        self._will_sha256 = hashlib.sha256(envelope).hexdigest()
        host, port = self._brokers[self._ends % len(self._brokers)]
        options = ConnectionOptions(
            client_id=name,
            context=self._context,
            session=self._session,
            host=host,
            topics=(topic(name, "desired"),),
            will_topic=topic(name, "hello"),
            will=envelope,
            is_mqtt5=self._owner.behaviour.is_mqtt5,
        )
        connection = MqttConnection(options, self)
        self._connection, self._is_greeted = connection, False
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(lambda: connection, host, port)
        self._opening = loop.create_task(self._wait_open(opening, connection))

    async def _wait_open(self, opening: object, connection: MqttConnection) -> None:
        try:
            await opening  # type: ignore[misc]
        except OSError as error:
            self.closed(connection, str(error))

    # As a `ConnectionOwner`

    def connected(self, connection: MqttConnection) -> None:
        """Count the new connection and send a hello. `MqttConnection` calls this."""
        self._is_greeted = True
        self._owner.counts.connects += 1
        self._owner.counts.resumed += connection.is_resumed
        self._session = connection.session  # a copy, which costs as much as ten messages
        desired_version, reported = self._owner.stated_versions
        hello = Hello(
            device=self._owner.name,
            sequence=self._presence,
            desired_version=desired_version,
            reported=reported,
            will_sha256=self._will_sha256,
            runtime=__version__,
        )
        self.send("hello", hello)
        self._owner.said_hello()

    def received(self, connection: MqttConnection, name: str, payload: bytes, at_s: float) -> None:
        """Pass a desired document to the device, or break the connection with the probability `loss`."""
        if self._loses():
            connection.abort("lost")
        elif name == topic(self._owner.name, "desired") and payload:
            self._owner.take_desired(payload, at_s)

    def closed(self, connection: MqttConnection, reason: str) -> None:
        """Reconnect within `reconnect_s`, unless the link was closed."""
        if connection is not self._connection:
            return
        self._ends += 1  # the next broker, as the agent does
        self._connection, self._is_greeted = None, False
        if reason == "lost" or connection.acknowledged < connection.sent:
            self._owner.lose_report()
        if self._is_open:
            self.open(self._owner.reconnect_s)
        else:
            self._ended.set()
