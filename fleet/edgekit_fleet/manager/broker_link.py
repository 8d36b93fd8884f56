"""The manager's connection to the broker, by gmqtt, which costs a third of paho's processor time a message.

It uses MQTT 3.1.1: nothing here needs more, and every broker has it. What is lost while the connection is
down is sent again by `publisher`, which knows from `hello` and reports what a device holds.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final

import gmqtt
from gmqtt.mqtt.constants import MQTTv311

from edgekit_fleet.identity.authority import MANAGER, Authority
from edgekit_runtime.agent.documents import Kind, topic
from edgekit_runtime.errors import TransportError

_FROM_DEVICES: Final[tuple[Kind, ...]] = ("online", "hello", "reported", "event")
_KEEPALIVE_S: Final = 20
_CONNECT_S: Final = 15.0
_RECONNECT_S: Final = 1
_MAX_UNSENT_BYTES: Final = 4 << 20
_log = logging.getLogger(__name__)


class BrokerLink:
    """A connection that comes back by itself.

    Attributes:
        connections: how often it was made.
    """

    def __init__(self, on_message: Callable[[str, bytes], None], client_id: str = MANAGER) -> None:
        """Prepare the connection.

        Args:
            on_message: called with topic and payload of each message, on the loop's thread; must not wait.
            client_id: of MQTT.
        """
        self.connections = 0
        self._client = gmqtt.Client(client_id, clean_session=True, logger=_log.getChild("gmqtt"))
        self._client.set_config({"reconnect_retries": -1, "reconnect_delay": _RECONNECT_S})
        self._client.on_connect = self._on_connect
        self._client.on_message = lambda _client, name, payload, _qos, _properties: self._receive(
            on_message, name, payload
        )
        self._is_ready = asyncio.Event()
        self._client.on_disconnect = lambda *_: self._is_ready.clear()
        self._client.on_subscribe = lambda *_: self._is_ready.set()

    async def connect(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Connect, and subscribe to what devices write.

        Args:
            host: of the broker.
            port: TCP port.
            context: TLS with the manager's certificate.

        Raises:
            TransportError: the broker cannot be reached, or refuses.
        """
        logging.getLogger("gmqtt").setLevel(logging.CRITICAL)  # it logs each lost connection several times
        try:
            await asyncio.wait_for(
                self._client.connect(
                    host, port, ssl=context or False, keepalive=_KEEPALIVE_S, version=MQTTv311
                ),
                _CONNECT_S,
            )
            await asyncio.wait_for(self._is_ready.wait(), _CONNECT_S)
        except (OSError, asyncio.TimeoutError, gmqtt.mqtt.handler.MQTTConnectError) as cause:
            await self.close()
            raise TransportError(
                f"cannot connect to the broker {host}:{port}: {cause or 'no answer'}"
            ) from cause

    @property
    def is_connected(self) -> bool:
        """Return whether messages go through now."""
        return self._is_ready.is_set()

    def publish(self, device: str, kind: Kind, envelope: bytes, *, retain: bool) -> None:
        """Send a document to a device, with QoS 1."""
        self._client.publish(topic(device, kind), envelope, qos=1, retain=retain)

    async def drain(self) -> None:
        """Wait until the socket has taken most of what was published, so that memory stays bounded."""
        while self.is_connected:
            transport = getattr(self._client._connection, "_transport", None)  # gmqtt has no other way
            if transport is None or transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
                return
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End the connection."""
        self._is_ready.clear()
        with contextlib.suppress(OSError, asyncio.TimeoutError, AttributeError):  # it was never made
            await asyncio.wait_for(self._client.disconnect(), 2.0)

    def _on_connect(self, _client: Any, _flags: int, code: int, _properties: Any) -> None:
        if code:
            return
        self.connections += 1
        self._client.subscribe([gmqtt.Subscription(topic("+", kind), qos=1) for kind in _FROM_DEVICES])

    @staticmethod
    def _receive(on_message: Callable[[str, bytes], None], name: str, payload: Any) -> int:
        on_message(name, payload if isinstance(payload, bytes) else str(payload).encode())
        return 0


def make_context(authority: Authority) -> ssl.SSLContext:
    """Return TLS with the manager's certificate, which trusts only the fleet's authority."""
    context = ssl.create_default_context(cafile=authority.certificate_path)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(*authority.pair("manager"))
    return context
