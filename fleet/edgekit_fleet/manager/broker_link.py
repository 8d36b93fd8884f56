"""The manager's connection to the broker, or to the first reachable node of a cluster.

It uses MQTT 3.1.1, which every broker supports. Documents that are lost during an interruption are sent again
by `publisher`, because devices report which document they have.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from edgekit_fleet.broker.mqtt_connection import ConnectionOptions, MqttConnection
from edgekit_fleet.identity.authority import MANAGER, Authority
from edgekit_runtime.agent.documents import Kind, topic
from edgekit_runtime.errors import TransportError

_FROM_DEVICES: Final[tuple[Kind, ...]] = ("hello", "reported", "event", "logs")
_KEEPALIVE_S: Final = 20
_CONNECT_S: Final = 15.0
_RECONNECT_S: Final = 0.5
_MAX_UNSENT_BYTES: Final = 4 << 20
_log = logging.getLogger(__name__)


class BrokerLink:
    """A connection to the broker, which is reopened after an interruption.

    Attributes:
        connections: The number of times the connection was opened.
    """

    def __init__(self, on_message: Callable[[str, bytes], None], client_id: str = MANAGER) -> None:
        """Prepare the connection.

        Args:
            on_message: Called with the topic and payload of each message in the loop's thread. It must not
                block.
            client_id: The MQTT client identifier.
        """
        self.connections = 0
        self._on_message, self._client_id = on_message, client_id
        self._connection: MqttConnection | None = None
        self._session: ssl.SSLSession | None = None
        self._ended = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None
        self._is_closing = False

    async def connect(self, brokers: Sequence[tuple[str, int]], context: ssl.SSLContext) -> None:
        """Connect, and subscribe to the topics of devices. A lost connection is reopened from now on.

        Args:
            brokers: The host and port of the broker, or of each node of a cluster. They are tried in turn.
            context: A TLS context with the manager's certificate.

        Raises:
            TransportError: No broker can be reached, or all of them refuse the connection.
        """
        self._brokers, self._context = list(brokers), context
        for number, (host, port) in enumerate(brokers, 1):
            try:
                await self._connect_once()
                break
            except OSError as cause:
                if number == len(brokers):
                    raise TransportError(f"cannot connect to the broker {host}:{port}: {cause}") from cause
        self._upkeep = asyncio.create_task(self._keep_up())

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open."""
        return self._connection is not None

    def publish(self, device: str, kind: Kind, envelope: bytes, *, retain: bool) -> None:
        """Send a signed document to a device with QoS 1. It is dropped if there is no connection."""
        if self._connection is not None:
            self._connection.publish(topic(device, kind), envelope, is_retained=retain)

    async def drain(self) -> None:
        """Wait until most of the published data has been passed to the socket. This limits memory use."""
        while self._connection is not None and self._connection.unsent_bytes > _MAX_UNSENT_BYTES:
            await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Return a context manager that pauses reading. One large read costs less than many small ones."""
        connection = self._connection
        if connection is not None:
            connection.pause_reading()
        try:
            yield
        finally:
            if connection is not None:
                connection.resume_reading()

    async def close(self) -> None:
        """Close the connection permanently, and wait up to 2 s for the broker."""
        self._is_closing = True
        if self._upkeep is not None:
            self._upkeep.cancel()  # `wait_for` may overlook it, until Python 3.12
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        if self._connection is not None:
            self._connection.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), 2.0)

    # Called by the connection

    def connected(self, connection: MqttConnection) -> None:
        """Use `connection` from now on, since the broker has accepted it."""
        self.connections += 1
        self._connection = connection
        self._outcome.set_result(None)

    def received(self, connection: MqttConnection, name: str, payload: bytes, at_s: float) -> None:
        """Pass a message to `on_message`."""
        del connection, at_s
        self._on_message(name, payload)

    def closed(self, connection: MqttConnection, reason: str) -> None:
        """Record that the connection has ended. A task reopens it."""
        self._connection, self._session = None, connection.session
        self._ended.set()
        if not self._outcome.done():
            self._outcome.set_exception(ConnectionRefusedError(reason))

    async def _connect_once(self) -> None:
        """Connect to the first broker in the list, and move it to the end of the list.

        Raises:
            OSError: The broker cannot be reached, or refuses the connection.
        """
        host, port = self._brokers.pop(0)
        self._brokers.append((host, port))
        options = ConnectionOptions(
            client_id=self._client_id,
            context=self._context,
            session=self._session,
            host=host,
            topics=tuple(topic("+", kind) for kind in _FROM_DEVICES),
            keepalive_s=_KEEPALIVE_S,
        )
        loop = asyncio.get_running_loop()
        self._ended.clear()
        self._outcome: asyncio.Future[None] = loop.create_future()
        connection = MqttConnection(options, self)

        async def open_connection() -> None:
            await loop.create_connection(lambda: connection, host, port)
            await self._outcome

        try:
            await asyncio.wait_for(open_connection(), _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as cause:
            connection.abort("no answer")
            raise ConnectionError(f"{cause or 'no answer'}") from cause

    async def _keep_up(self) -> None:
        """Keep the connection, and make it again where it ends."""
        while not self._is_closing:
            try:
                await asyncio.wait_for(self._ended.wait(), _KEEPALIVE_S / 2)
            except asyncio.TimeoutError:
                self._ping()
                continue
            await asyncio.sleep(_RECONNECT_S)
            try:
                await self._connect_once()
            except OSError as error:
                _log.warning("the broker cannot be reached: %s", error)
                self._ended.set()

    def _ping(self) -> None:
        connection = self._connection
        if connection is not None and time.monotonic() - connection.heard_at > 1.5 * _KEEPALIVE_S:
            connection.abort("the broker is silent")
        elif connection is not None:
            connection.ping()


def make_context(authority: Authority, number: int = 0) -> ssl.SSLContext:
    """Return a TLS context with a manager's certificate. The context trusts only the authority.

    `number` is 0 for the first manager. A missing certificate is created.
    """
    context = ssl.create_default_context(cafile=authority.certificate_path)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*authority.make_manager(number))
    return context
