"""A sink that publishes answers with QoS 1 on a topic of an MQTT broker, and a retained status.

The status at TOPIC/status is {"state": "online"}. The broker changes it to `offline` when the stream ends or
the device disconnects. The protocol is implemented by paho-mqtt.
"""

import contextlib
import select
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.streams.sink import Sink
from edgekit_runtime.system.install_hint import install_command

_KEEPALIVE_S: Final = 30
_TIMEOUT_S: Final = 5.0
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
_ONLINE: Final = b'{"state":"online"}'
_OFFLINE: Final = b'{"state":"offline"}'


class MqttSink(Sink):
    """A connection to a broker. It is opened on first use and reopened after a failure."""

    def __init__(self, text: str, name: str) -> None:
        """Parse the address `mqtt[s]://HOST[:PORT][/TOPIC]`. `write` connects.

        The default topic is `edgekit/streams/NAME`.

        Raises:
            ConfigError, ValueError: The address is invalid, or paho-mqtt is not installed.
        """
        parts = urlsplit(text)
        if not parts.hostname:
            raise ConfigError("the sink mqtt://… names no host")
        try:
            import paho.mqtt.client  # noqa: F401  # before the stream begins
        except ImportError as cause:
            raise ConfigError(f"MQTT needs paho-mqtt: {install_command('device')}") from cause
        self._host, self._port = parts.hostname, parts.port or _PORTS[parts.scheme]
        self._is_tls = parts.scheme == "mqtts"
        self._user = None if parts.username is None else unquote(parts.username)
        self._password = None if parts.password is None else unquote(parts.password)
        self._topic = unquote(parts.path.strip("/")) or f"edgekit/streams/{name}"
        if "#" in self._topic or "+" in self._topic:
            raise ConfigError(f"the MQTT topic is {self._topic!r}, expected one without + and #")
        self._client: Any = None
        self._unacknowledged: set[int] = set()
        self._problem = ""

    def write(self, lines: Sequence[bytes]) -> None:
        """Publish answers. Raise OSError if the broker does not acknowledge them within 5 s."""
        self._guard(lambda: self._publish(self._topic, [line.rstrip() for line in lines]))

    def rest(self) -> None:
        """Keep the connection alive, or connect again. Raise OSError if that fails."""
        self._guard(lambda: self._serve(lambda: True))

    def close(self) -> None:
        """Publish the status `offline`, and disconnect."""
        if self._client is not None:
            with contextlib.suppress(OSError):
                self._publish(f"{self._topic}/status", [_OFFLINE], is_retained=True)
                self._client.disconnect()
                self._client.loop_write()
            self._drop()

    def _guard(self, act: Callable[[], None]) -> None:
        """Connect if necessary, and call `act`. An error ends the connection."""
        try:
            if self._client is None:
                self._connect()
            act()
        except (OSError, ValueError) as cause:
            self._drop()
            raise OSError(self._problem or str(cause)) from cause

    def _connect(self) -> None:
        from paho.mqtt import client as mqtt
        from paho.mqtt.enums import CallbackAPIVersion

        self._problem = ""
        self._client = client = mqtt.Client(CallbackAPIVersion.VERSION2)
        if self._user is not None:
            client.username_pw_set(self._user, self._password)
        if self._is_tls:
            client.tls_set_context(ssl.create_default_context())
        client.connect_timeout = _TIMEOUT_S
        client.will_set(f"{self._topic}/status", _OFFLINE, qos=1, retain=True)
        client.on_connect = self._on_connect
        client.on_publish = lambda _client, _data, number, *_: self._unacknowledged.discard(number)
        self._unacknowledged.clear()
        client.connect(self._host, self._port, _KEEPALIVE_S)
        self._serve(client.is_connected)
        self._publish(f"{self._topic}/status", [_ONLINE], is_retained=True)

    def _on_connect(self, client: Any, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        if reason.is_failure:
            self._problem = f"the broker refuses the connection: {reason}"
            client.disconnect()

    def _publish(self, topic: str, payloads: Sequence[bytes], *, is_retained: bool = False) -> None:
        for payload in payloads:
            self._unacknowledged.add(self._client.publish(topic, payload, qos=1, retain=is_retained).mid)
        self._serve(lambda: not self._unacknowledged)

    def _serve(self, is_done: Callable[[], bool]) -> None:
        """Send and receive at least once, and until `is_done` returns True.

        Raises:
            OSError: The time limit is exceeded, or the connection ended.
        """
        client, end_s = self._client, time.monotonic() + _TIMEOUT_S
        while True:
            connection = client.socket()
            if connection is None:
                raise ConnectionError(f"{self._host} ended the connection")
            poll = select.poll()
            poll.register(connection, select.POLLIN | (select.POLLOUT if client.want_write() else 0))
            pending = isinstance(connection, ssl.SSLSocket) and connection.pending()
            wait_s = 0.0 if pending or is_done() else max(0.0, end_s - time.monotonic())
            events = dict(poll.poll(1000 * wait_s)).get(connection.fileno(), 0)
            if pending or events & ~select.POLLOUT:
                client.loop_read()
            if events & select.POLLOUT:
                client.loop_write()
            client.loop_misc()
            if is_done() and client.socket() is not None and not client.want_write():
                return
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self._host} did not answer within {_TIMEOUT_S:g} s")

    def _drop(self) -> None:
        """Close the connection without DISCONNECT, so that the broker publishes the will."""
        client, self._client = self._client, None
        connection = None if client is None else client.socket()
        if connection is not None:
            connection.close()
