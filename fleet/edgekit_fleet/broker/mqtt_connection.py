"""An MQTT 3.1.1 or 5 connection over TLS on asyncio, for the manager or a simulated device.

It supports only what a fleet needs: last wills, subscriptions, messages with QoS 1 and pings. TLS runs on
memory buffers, since asyncio's TLS needs 256 KiB for each connection and does not resume sessions.

Source: MQTT 3.1.1 and 5.0 (OASIS), sections 2 and 3.
"""

import asyncio
import ssl
import struct
import time
from dataclasses import dataclass
from typing import Final, Protocol

_CONNECT, _CONNACK, _PUBLISH, _PUBACK = 1, 2, 3, 4
_SUBSCRIBE, _SUBACK, _PINGREQ, _DISCONNECT = 8, 9, 12, 14
_CLEAN, _WILL, _WILL_QOS_1, _WILL_RETAINED = 0x02, 0x04, 0x08, 0x20
_MAX_READ: Final = 1 << 16
_MAX_PACKET_BYTES: Final = 1 << 18  # a hundred times what the fleet sends


class ConnectionOwner(Protocol):
    """The owner of a connection. Its methods are called on events, in the thread of the event loop."""

    def connected(self, connection: "MqttConnection") -> None:
        """The broker has accepted the connection and its subscriptions."""

    def received(self, connection: "MqttConnection", topic: str, payload: bytes, at_s: float) -> None:
        """A message was received at `at_s` of the monotonic clock."""

    def closed(self, connection: "MqttConnection", reason: str) -> None:
        """The connection has ended or could not be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The options of a connection.

    Attributes:
        client_id: The MQTT client identifier.
        context: The TLS context with the client's certificate.
        session: A TLS session of this context to resume, or None.
        host: The expected name in the broker's certificate.
        will_topic, will: The topic and payload of the last will, which is retained. An empty topic means no
            will.
        keepalive_s: The keep-alive time in seconds. The broker disconnects a client that has sent no packet
            for 1.5 times as long.
        is_mqtt5: Whether to use MQTT 5 instead of 3.1.1.
    """

    client_id: str
    context: ssl.SSLContext
    session: ssl.SSLSession | None
    host: str
    topics: tuple[str, ...]
    will_topic: str = ""
    will: bytes = b""
    keepalive_s: int = 1200
    is_mqtt5: bool = False


class MqttConnection(asyncio.Protocol):
    """A connection of one client to the broker.

    Attributes:
        sent, acknowledged: The numbers of messages that were published and acknowledged.
        heard_at: The time of the last received bytes, on the monotonic clock.
    """

    def __init__(self, options: ConnectionOptions, owner: ConnectionOwner) -> None:
        """Prepare the connection, which starts when asyncio has opened the transport."""
        self.sent = self.acknowledged = 0
        self.heard_at = time.monotonic()
        self._options, self._owner = options, owner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = options.context.wrap_bio(
            self._incoming, self._outgoing, server_hostname=options.host, session=options.session
        )
        self._is_secure = self._is_flushing = self._is_aborted = False
        self._packets = bytearray()  # of this turn of the loop; they share TLS records and a system call
        self._buffer = bytearray()
        self._reason = "closed"
        self._transport: asyncio.Transport | None = None

    @property
    def session(self) -> ssl.SSLSession | None:
        """The TLS session, which the next connection can resume, or None before the handshake."""
        return self._tls.session

    @property
    def is_resumed(self) -> bool:
        """Whether the connection resumed an earlier TLS session."""
        return bool(self._tls.session_reused)

    def publish(self, topic: str, payload: bytes, *, is_retained: bool) -> None:
        """Send a message with QoS 1. `acknowledged` increases when the broker confirms it."""
        self.sent += 1
        number = struct.pack(">H", (self.sent - 1) % 65535 + 1)
        body = _string(topic.encode()) + number + self._properties + payload
        self._send(_packet(_PUBLISH << 4 | 0x02 | is_retained, body))

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that have not been passed to the socket yet."""
        buffered = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return len(self._packets) + buffered

    def pause_reading(self) -> None:
        """Pause reading. The operating system can buffer the messages of more than a second."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading after `pause_reading`."""
        if self._transport is not None:
            self._transport.resume_reading()

    def ping(self) -> None:
        """Send a ping, so that the broker does not close the connection."""
        self._send(_packet(_PINGREQ << 4, b""))

    def close(self) -> None:
        """Disconnect cleanly. The broker does not publish the last will."""
        self._send(_packet(_DISCONNECT << 4, b""))
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Abort the connection. The broker publishes the last will."""
        self._reason, self._is_aborted = reason, True
        if self._transport is not None:
            self._transport.abort()

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  # of TCP
        self._transport = transport
        if self._is_aborted:  # while it was opened
            transport.abort()
        else:
            self._shake_hands()

    def data_received(self, data: bytes) -> None:
        at_s = self.heard_at = time.monotonic()
        self._incoming.write(data)
        try:
            if not self._is_secure:
                self._shake_hands()
            while self._is_secure:
                chunk = self._tls.read(_MAX_READ)
                if not chunk:
                    break
                self._buffer += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.abort(f"TLS: {error}")
            return
        self._parse(at_s)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the owner that the connection has ended, and why."""
        self._transport = None
        self._owner.closed(self, str(exc or self._reason))

    # What goes

    @property
    def _properties(self) -> bytes:
        return b"\0" if self._options.is_mqtt5 else b""

    def _shake_hands(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        self._is_secure = True
        options, empty = self._options, self._properties
        flags, will = _CLEAN, b""
        if options.will_topic:
            flags |= _WILL | _WILL_QOS_1 | _WILL_RETAINED
            will = empty + _string(options.will_topic.encode()) + _string(options.will)
        version = 5 if options.is_mqtt5 else 4
        head = _string(b"MQTT") + struct.pack(">BBH", version, flags, options.keepalive_s)
        body = head + empty + _string(options.client_id.encode()) + will
        self._send(_packet(_CONNECT << 4, body))

    def _send(self, packet: bytes) -> None:
        self._packets += packet
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._packets and self._is_secure:
            self._tls.write(self._packets)
            self._packets.clear()
        if self._outgoing.pending:
            self._transport.write(self._outgoing.read())

    # What comes

    def _parse(self, at_s: float) -> None:
        buffer = self._buffer
        while len(buffer) > 1:
            length, shift, begin = 0, 0, 1
            while True:
                if begin >= len(buffer):
                    return
                digit = buffer[begin]
                length |= (digit & 127) << shift
                begin, shift = begin + 1, shift + 7
                if length > _MAX_PACKET_BYTES:
                    self.abort(f"the broker sends a packet of over {_MAX_PACKET_BYTES} bytes")
                    return
                if digit < 128:
                    break
            if len(buffer) < begin + length:
                return
            first, body = buffer[0], bytes(buffer[begin : begin + length])
            del buffer[: begin + length]
            self._take(first, body, at_s)

    def _take(self, first: int, body: bytes, at_s: float) -> None:
        kind = first >> 4
        if kind == _CONNACK:
            if body[1]:
                self.abort(f"the broker refuses with code {body[1]}")
                return
            topics = b"".join(_string(topic.encode()) + b"\x01" for topic in self._options.topics)
            self._send(_packet(_SUBSCRIBE << 4 | 0x02, b"\0\1" + self._properties + topics))
        elif kind == _SUBACK:
            codes = body[-len(self._options.topics) :]
            if any(code & 0x80 for code in codes):
                self.abort(f"the broker refuses a subscription with codes {codes.hex()}")
                return
            self._owner.connected(self)
        elif kind == _PUBACK:
            self.acknowledged += 1
        elif kind == _PUBLISH:
            begin = 2 + int.from_bytes(body[:2], "big")
            topic = body[2:begin].decode()
            if first & 0x06:
                self._send(_packet(_PUBACK << 4, body[begin : begin + 2]))
                begin += 2
            if self._options.is_mqtt5:
                begin += 1 + body[begin]  # no property that a broker sends here is longer than 127 bytes
            self._owner.received(self, topic, body[begin:], at_s)


def _string(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def _packet(first: int, body: bytes) -> bytes:
    length, head = len(body), bytearray((first,))
    while True:
        length, digit = divmod(length, 128)
        head.append(digit | (0x80 if length else 0))
        if not length:
            return bytes(head) + body
