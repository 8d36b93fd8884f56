"""One connection to a service. It sends requests, receives responses, and reconnects when needed."""

import contextlib
import queue
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any, Final

import numpy as np

from edgekit_runtime.client.responses import Layout, Response, ResponseHead, parse_head
from edgekit_runtime.errors import ConfigError, TransportError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.local_sockets import connect_local, limit_time
from edgekit_runtime.tensors import allocate_aligned

_READ_BYTES: Final = 64 << 10
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_BODY_BYTES: Final = 1 << 30
_CONTINUE: Final = 100
_MAX_PORT: Final = 65_535
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_PREFIX: Final = re.compile(r"[A-Za-z0-9/._~!$&'()*+,;=:@%-]+")  # RFC 3986, 3.3
_KEPT_LIMIT: Final = 0.9  # if this share of the set limit remains, it stays set
_RECORD_BYTES: Final = 16_384  # maximum size of a TLS record
_DROP_UNSENT: Final = np.array((1, 0), np.intc).tobytes()  # struct linger


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a service.

    Attributes:
        path: path of a Unix socket, or None.
        prefix: prefix of the path of each request, such as `/edge` behind a proxy, or empty.
        host, port: TCP address, or empty and 0 for a Unix socket.
        is_tls: whether the service speaks TLS at this address.
        ca_file: PEM file of the authority that signed the service's certificate, or None to trust the
            authorities of the system.
    """

    path: str | None = None
    host: str = ""
    port: int = 0
    is_tls: bool = False
    ca_file: str | None = None
    prefix: str = ""

    @classmethod
    def parse(
        cls,
        text: str,
        ca_file: str | None = None,
        *,
        has_token: bool = False,
        insecure: bool = False,
        allows_prefix: bool = False,
    ) -> "Address":
        """Parse an address.

        Args:
            text: a path, `unix:PATH`, `host:port`, or a URL of HTTP or HTTPS.
            ca_file: PEM file of the authority that signed the service's certificate.
            has_token: whether requests carry a token. If so, plain HTTP to another machine is never allowed.
            insecure: whether plain HTTP to another machine is allowed. Others can then read the data and
                forge answers.
            allows_prefix: whether a URL may have a path, which becomes the prefix of each request's path.

        Raises:
            TransportError: `text` has another form.
            ConfigError: `text` is plain HTTP to another machine, which is not allowed.
        """
        if text.startswith("unix:") and (path := text[5:].removeprefix("//")):
            return cls(path=path)
        scheme, has_scheme, remainder = text.partition("://")
        if text and not has_scheme and ("/" in text or ":" not in text):
            return cls(path=text)
        server, _, prefix = (remainder if has_scheme else text).partition("/")
        prefix = "/" + prefix.strip("/") if prefix.strip("/") else ""
        default_port = _DEFAULT_PORTS.get(scheme, "") if has_scheme else ""
        if default_port and (":" not in server or server.endswith("]")):
            server += f":{default_port}"
        host, _, port = server.rpartition(":")
        if (has_scheme and not default_port) or not host or not _is_port(port):
            raise TransportError(
                f"address {text!r}: expected the path of a Unix socket, host:port or https://host:port"
            )
        if prefix and not (allows_prefix and _PREFIX.fullmatch(prefix)):
            instead = "letters, digits and marks of a URL's path" if allows_prefix else "none"
            raise TransportError(f"address {text!r}: its path is {prefix!r}, expected {instead}")
        try:
            name = host.strip("[]")
            name = name if name.isascii() else name.encode("idna").decode("ascii")
        except UnicodeError as cause:
            raise TransportError(f"address {text!r}: {host!r} can be no name of a host: {cause}") from cause
        address = cls(
            path=None, host=name, port=int(port), is_tls=scheme == "https", ca_file=ca_file, prefix=prefix
        )
        if not address.is_tls and (has_token or not insecure) and not _is_loopback(address.host):
            danger, instead = "the token would go there readable for everybody on the way", "no token"
            if not has_token:
                danger = "everybody on the way could read what is sent, and answer with wrong numbers"
                instead = "--insecure (insecure=True in Python) if you accept that"
            raise ConfigError(
                f"{text}: plain HTTP to another machine: {danger}; use https://HOST:PORT, or {instead}"
            )
        return address

    @property
    def authority(self) -> str:
        """Value of the `Host` field in requests, `localhost` for a Unix socket.

        The value omits the default port of the scheme and the zone of an IPv6 address.

        Source: RFC 9110, sections 4.2.3 and 7.2; RFC 3986, section 3.2.2; RFC 6874, section 4.
        """
        if self.path is not None or not self.host:
            return "localhost"
        host = _bracket(self.host.partition("%")[0])
        default_port = _DEFAULT_PORTS["https" if self.is_tls else "http"]
        return host if str(self.port) == default_port else f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{_bracket(self.host)}:{self.port}"


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text[:6]) <= _MAX_PORT


class Link:
    """A connection that is opened when it is first needed.

    Attributes:
        connection: number of the open connection, counted from 1, or 0 while no connection is open.
        memory: buffer for responses. Responses that do not fit into it have their own memory.
        first_read: monotonic time and size of the first read of the last response.
    """

    __slots__ = (
        "_connection_count",
        "_max_body_bytes",
        "_socket",
        "_timeout_s",
        "_was_used",
        "address",
        "connection",
        "first_read",
        "memory",
    )

    def __init__(self, address: Address, max_body_bytes: int = _MAX_BODY_BYTES) -> None:
        """Make a link to `address` that takes responses up to `max_body_bytes`; nothing is connected yet."""
        self.address = address
        self._max_body_bytes = max_body_bytes
        self._socket: socket.socket | None = None
        self._timeout_s = 0.0
        self._was_used = False
        self._connection_count = self.connection = 0
        self.memory = bytearray(_READ_BYTES)
        self.first_read = (0.0, 0)

    def connect(self, timeout_s: float) -> None:
        if self._socket is None:
            self._socket = open_connection(self.address, timeout_s)
            self._was_used = False
            self._timeout_s = 0.0
            self._connection_count += 1
            self.connection = self._connection_count

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self.connection = 0

    def abort(self) -> None:
        """Make the current request fail. This may be called from any thread."""
        connected = self._socket
        if connected is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                # What is not sent yet would be in the way of the next request on a slow link: drop it.
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
                # Not that of TLS: it ends encryption first, and a thread that sends goes on in the clear.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def drop_leftovers(self) -> None:
        """Disconnect if the service has closed the connection, or has sent bytes without a request.

        Without this, the next request would read those bytes as its response. Call it only between requests.
        """
        connected = self._socket
        if connected is None:
            return
        watch = select.poll()
        watch.register(connected, select.POLLIN)
        if watch.poll(0) or (self.address.is_tls and connected.pending()):  # type: ignore[attr-defined]
            self.close()

    def read_tcp_field(self, offset: int, size_bytes: int = 4) -> int | None:
        """See the function `read_tcp_field`. This may be called from any thread."""
        connected = self._socket
        return None if connected is None else read_tcp_field(connected, offset, size_bytes)

    def ask(
        self,
        parts: Sequence[Any],
        size_bytes: int,
        timeout_s: float,
        previous_layout: Layout | None = None,
        ancillary: Sequence[Any] = (),
    ) -> Any:
        """Send a request and return its `Response`, or None if the service had closed an idle connection.

        Args:
            parts: parts of the request, C-contiguous.
            size_bytes: size of all parts together.
            timeout_s: time limit for connecting, sending and receiving together, accurate to 10 %.
            previous_layout: expected layout of the response. If the response has this layout, the layout
                itself is returned, and `memory` contains the bytes.
            ancillary: ancillary data to send with the first byte, as for `sendmsg`. Not supported over TLS.

        Raises:
            TransportError: the service cannot be reached, takes too long, or does not speak HTTP.
        """
        until_s = time.monotonic() + timeout_s
        if self._socket is None:
            self.connect(timeout_s)
        connected: Any = self._socket
        if timeout_s != self._timeout_s:
            self._limit_waits(timeout_s)
        was_used, self._was_used = self._was_used, True
        memory, count = self.memory, 0
        try:
            if not was_used:
                self._limit_rest(until_s)
            try:
                if self.address.is_tls:
                    self._send_rest(_join_small(parts), 0, until_s)
                elif (sent := connected.sendmsg(parts, ancillary)) < size_bytes:
                    self._send_rest(parts, sent, until_s)
            except (BrokenPipeError, ConnectionResetError):
                pass  # a service that refuses a large request answers and closes before it has read all of it
            self._limit_rest(until_s)
            count = connected.recv_into(memory)
            if (
                previous_layout is not None
                and count == previous_layout.size_bytes
                and memory.startswith(previous_layout.start)
            ):
                return previous_layout
            self.first_read = (time.monotonic(), count)
            return self._receive(bytes(memoryview(memory)[:count]), until_s)
        except (OSError, ValueError) as cause:
            self.close()
            if was_used and not count and isinstance(cause, ConnectionError):
                return None
            raise self._explain(cause, timeout_s) from cause
        except BaseException:
            self.close()  # a response may be on its way, which the next request must not get
            raise

    def pass_descriptor(self, head: bytes, body: bytes, descriptor: int, timeout_s: float) -> Response | None:
        """Send a request whose body carries a file descriptor, and return the same as `ask`.

        The descriptor is sent with the body, because the service discards a descriptor sent with the head.

        Args:
            head: head with `Expect: 100-continue`.
            body: body of the request.
            descriptor: sent with the first byte of the body.
            timeout_s: time limit for the response.

        Raises:
            TransportError: see `ask`.
        """
        first: Response | None = self.ask((head,), len(head), timeout_s)
        if first is None or first[0].status != _CONTINUE:
            return first
        self._was_used = False  # the service has read the head, so it cannot have closed an idle connection
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))
        final: Response | None = self.ask((body,), len(body), timeout_s, ancillary=(rights,))
        return final

    def _limit_waits(self, timeout_s: float) -> None:
        connected: Any = self._socket
        self._timeout_s = timeout_s
        if self.address.is_tls:
            connected.settimeout(timeout_s)
        else:
            limit_time(connected, timeout_s)

    def _limit_rest(self, until_s: float) -> None:
        """Limit the next wait to about the remaining time: exact limits take two system calls each.

        Raises:
            TimeoutError: it is over.
        """
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for the request is over")
        if left_s < _KEPT_LIMIT * self._timeout_s:
            self._limit_waits(left_s)

    def _send_rest(self, parts: Sequence[Any], sent: int, until_s: float) -> None:
        connected: Any = self._socket
        for part in parts:
            view = memoryview(part if type(part) is bytes else part.reshape(-1).view(np.uint8))
            while sent < len(view):
                self._limit_rest(until_s)
                sent += connected.send(view[sent:])
            sent -= len(view)

    def _receive(self, data: bytes, until_s: float) -> Response:
        connected: Any = self._socket
        while (end := data.find(b"\r\n\r\n") + 4) < 4:
            self._limit_rest(until_s)
            more = connected.recv(_READ_BYTES) if data else b""
            if not more or len(data) > _MAX_HEAD_BYTES:
                raise ConnectionResetError("the connection ended before an answer")
            data += more
        head = parse_head(data[:end], self._max_body_bytes)
        body = self._receive_body(data, end, head, until_s)
        if head.closes:
            self.close()
        return head, body

    def _receive_body(self, data: bytes, end: int, head: ResponseHead, until_s: float) -> memoryview:
        connected: Any = self._socket
        filled = len(data) - end
        if filled == head.body_bytes:
            return memoryview(data)[end:]
        if filled > head.body_bytes:
            raise ValueError("the service sent more than it announced")
        body = allocate_aligned(head.body_bytes, head.json_bytes or 0)
        body[:filled] = data[end:]
        while filled < head.body_bytes:
            self._limit_rest(until_s)
            count = connected.recv_into(body[filled:])
            if count == 0:
                raise ConnectionResetError("the connection ended in the middle of an answer")
            filled += count
        return body

    def _explain(self, cause: Exception, timeout_s: float) -> TransportError:
        if isinstance(cause, (BlockingIOError, TimeoutError)):
            return TransportError(f"{self.address}: no answer within {timeout_s:.3g} s")
        return TransportError(f"{self.address}: {cause}")


def read_tcp_field(connected: socket.socket, offset: int, size_bytes: int = 4) -> int | None:
    """Return a number from `tcp_info`, or None if the system or the connection does not have it.

    `offset` and `size_bytes` are those of the field in struct tcp_info of linux/tcp.h.
    """
    try:
        data = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + size_bytes)
    except (OSError, AttributeError):  # closed meanwhile, a Unix socket, or another system
        return None
    return int.from_bytes(data[offset:], sys.byteorder) if len(data) == offset + size_bytes else None


def open_connection(address: Address, timeout_s: float) -> socket.socket:
    """Return a connection to a service.

    `timeout_s` limits the total time of name resolution, all connection attempts and the TLS handshake.

    Raises:
        TransportError: the service cannot be reached.
    """
    try:
        if address.path is not None:
            return connect_local(address.path, timeout_s)
        until_s = time.monotonic() + timeout_s
        connected = _connect(address, until_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            return _wrap(connected, address, until_s)
        connected.settimeout(None)
    except (OSError, UnicodeError) as cause:  # the latter of names that no host can have
        raise TransportError(f"cannot reach the service at {address}: {cause}; is it running?") from cause
    return connected


def _connect(address: Address, until_s: float) -> socket.socket:
    """Return a connection to the first address that answers; each has an equal part of what is left."""
    candidates = _find_places(address, until_s)
    failure = OSError(f"{address.host} has no address")
    for tries, (family, kind, protocol, _, socket_address) in zip(
        range(len(candidates), 0, -1), candidates, strict=True
    ):
        connected = socket.socket(family, kind, protocol)
        try:
            connected.settimeout(_left_s(until_s) / tries)
            connected.connect(socket_address)
        except OSError as cause:
            connected.close()
            failure = cause
        else:
            return connected
    raise failure


def _find_places(address: Address, until_s: float) -> list[Any]:
    """Return the result of `getaddrinfo`; a thread that waits for a name server is abandoned."""
    try:
        ip_address(address.host)
    except ValueError:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def find() -> None:
            try:
                answers.put(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM))
            except (OSError, UnicodeError) as cause:
                answers.put(cause)

        threading.Thread(target=find, name="edgekit-name", daemon=True).start()
        try:
            answer = answers.get(timeout=_left_s(until_s))
        except queue.Empty:
            raise TimeoutError("timed out, no name server answers") from None
        if isinstance(answer, Exception):
            raise answer from None
        return list(answer)
    return socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)


def _wrap(connected: socket.socket, address: Address, until_s: float) -> socket.socket:
    """Return a connection over TLS; `connected` is closed if that fails."""
    import ssl

    try:
        context = ssl.create_default_context(cafile=address.ca_file)
        connected.settimeout(_left_s(until_s))  # of the whole handshake
        return context.wrap_socket(connected, server_hostname=address.host)
    except BaseException:
        connected.close()
        raise


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _join_small(parts: Sequence[Any]) -> list[Any]:
    """Join successive short parts: TLS makes a record and a packet of each part."""
    joined: list[Any] = []
    for part in parts:
        content = part if type(part) is bytes else part.reshape(-1).view(np.uint8)
        if joined and len(joined[-1]) + len(content) <= _RECORD_BYTES:
            joined[-1] = b"".join((joined[-1], content))
        else:
            joined.append(content)
    return joined
