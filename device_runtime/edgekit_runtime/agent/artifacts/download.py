"""Downloads over HTTPS that resume after an interruption and have limits of size, rate and waiting time.

An incomplete file is stored under the final name plus `.part`. After an interruption or a restart, the
download resumes at the end of this file.

Source: RFC 9110, sections 14 and 15.3.7 (ranges).
"""

import contextlib
import hashlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from edgekit_runtime.agent.membership import ResumingContext
from edgekit_runtime.errors import DigestError, EdgekitError, OutputError, TransportError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, find_size, hash_file

_CHUNK_BYTES: Final = 16 << 10
_SYNC_BYTES: Final = 1 << 20
_BURST_S: Final = 0.5  # of the cap that may arrive at once after a pause
_LEAST_WINDOW_BYTES: Final = 8 << 10
_KERNEL_WINDOW_BYTES: Final = 64 << 10  # Linux's initial value
_RECONNECT_S: Final = 1.0
_OK, _PARTIAL, _OUT_OF_RANGE = 200, 206, 416


class HttpStatusError(TransportError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class SlowError(TransportError):
    """The download is too slow, perhaps because of an attack."""


class DownloadLimitError(EdgekitError):
    """The download exceeds its limit of bytes. The received bytes stay on the disk."""


class DownloadStoppedError(EdgekitError):
    """The caller stopped the download. The received bytes stay on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Limits of downloads.

    Attributes:
        bytes_per_s: maximum rate, or None.
        least_bytes_per_s: minimum mean rate over `slow_s` seconds. A slower download fails with `SlowError`.
        slow_s: period over which the rate is averaged.
        timeout_s: longest wait for the connection or the next byte.
    """

    bytes_per_s: float | None = None
    least_bytes_per_s: float = 256.0
    slow_s: float = 60.0
    timeout_s: float = 30.0


class RateCap:
    """Limits the rate of a download or upload, and raises `SlowError` if the transfer is too slow."""

    def __init__(self, limits: DownloadLimits) -> None:
        self._limits = limits
        self._due_s = self._window_s = time.monotonic()
        self._window_bytes = 0

    def count(self, moved_bytes: int, stop: threading.Event) -> None:
        now_s = time.monotonic()
        self._window_bytes += moved_bytes
        passed_s = now_s - self._window_s
        if passed_s >= self._limits.slow_s:
            rate = self._window_bytes / passed_s
            if rate < self._limits.least_bytes_per_s:
                raise SlowError(
                    f"{rate:.0f} bytes/s over {passed_s:.0f} s, expected at least"
                    f" {self._limits.least_bytes_per_s:.0f}"
                )
            self._window_s, self._window_bytes = now_s, 0
        if self._limits.bytes_per_s is not None:
            self._due_s = max(self._due_s, now_s - _BURST_S) + moved_bytes / self._limits.bytes_per_s
            stop.wait(max(0.0, self._due_s - now_s))


class Downloader:
    def __init__(self, context: ssl.SSLContext, limits: DownloadLimits, disk: Disk = DISK) -> None:
        """Use the TLS `context`, which trusts the fleet's authority; `disk` writes files."""
        self.limits = limits
        self._context, self._disk = context, disk

    def fetch(
        self,
        url: str,
        path: Path,
        size_bytes: int,
        *,
        sha256: str,
        count: Callable[[int], None],
        stop: threading.Event,
        most_bytes: int | None = None,
    ) -> None:
        """Download `url` to `path`, over as many connections as needed. Resume a partial file.

        Args:
            url: address of the file.
            path: path of the file. An incomplete file is stored in the same folder.
            size_bytes: expected size of the file. Further bytes are not read.
            sha256: expected digest. A file with another digest is removed.
            count: called with the number of received bytes, including discarded bytes.
            stop: event that stops the download.
            most_bytes: maximum number of bytes to receive, or None.

        Raises:
            TransportError: the connection failed, the server answered with an error, or the rate is too low.
            DigestError: the file has another digest.
            DownloadLimitError: more than `most_bytes` bytes were received.
            DownloadStoppedError: `stop` was set.
            OutputError: the disk is full or fails.
        """
        part = path.with_name(f"{path.name}.part")
        rate_cap, came_bytes = RateCap(self.limits), 0

        def add(received_bytes: int) -> None:
            nonlocal came_bytes
            came_bytes += received_bytes
            count(received_bytes)
            if most_bytes is not None and came_bytes > most_bytes:
                raise DownloadLimitError(f"{came_bytes} bytes came, {most_bytes} were left of the budget")
            rate_cap.count(received_bytes, stop)
            if stop.is_set():
                raise DownloadStoppedError("the download was stopped")

        while (begin := find_size(part)) < size_bytes:
            try:
                self._append(url, part, size_bytes, add)
            except (OSError, http.client.HTTPException) as cause:
                if find_size(part) <= begin:  # nothing came on this connection
                    raise TransportError(f"{url}: {cause}") from cause
                stop.wait(_RECONNECT_S)
            if stop.is_set():
                raise DownloadStoppedError("the download was stopped")
        try:
            part_sha256 = hash_file(part) if size_bytes else hashlib.sha256().hexdigest()
            if part_sha256 != sha256:
                self._disk.remove(part)
                raise DigestError(f"{url}: has sha256 {part_sha256}, expected {sha256}")
            self._disk.replace(part, path)
            self._disk.sync_folder(path.parent)
        except OSError as cause:
            raise OutputError(f"cannot write {path}: {cause.strerror}") from cause

    def _append(self, url: str, part: Path, size_bytes: int, add: Callable[[int], None]) -> None:
        begin = find_size(part)
        headers = {"Range": f"bytes={begin}-{size_bytes - 1}"} if begin else {}
        with self.open(url, headers) as response:
            if response.status == _OK and begin:
                begin = 0  # the server does not support ranges
            elif response.status == _PARTIAL:
                stated = response.headers.get("Content-Range", "")
                if not stated.startswith(f"bytes {begin}-"):
                    raise TransportError(f"{url}: answers with range {stated!r}, expected one from {begin}")
            elif response.status != _OK:
                raise HttpStatusError(response.status, f"{url}: answers with status {response.status}")
            self._copy(response, part, begin, size_bytes, add)

    def _copy(
        self,
        response: http.client.HTTPResponse,
        part: Path,
        begin: int,
        size_bytes: int,
        add: Callable[[int], None],
    ) -> None:
        unsynced, remaining = 0, size_bytes - begin
        try:
            file = self._disk.append(part, begin)
        except OSError as cause:
            raise OutputError(f"cannot write {part}: {cause.strerror}; free space") from cause
        with file:
            try:
                while remaining > 0:
                    data = response.read1(min(_CHUNK_BYTES, remaining))
                    if not data:
                        raise ConnectionResetError("the connection ended too early")
                    _write(file.write, data, part)
                    remaining -= len(data)
                    unsynced += len(data)
                    if unsynced >= _SYNC_BYTES or remaining == 0:
                        _write(lambda _: self._disk.sync(file), b"", part)
                        unsynced = 0
                    add(len(data))
            finally:
                with contextlib.suppress(OSError):
                    file.flush()

    def read(self, url: str, timeout_s: float, count: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the content of a small file in pieces. The caller limits the size.

        `count` is called with the number of bytes of each piece.

        Raises:
            TransportError: the connection failed, the server answered with an error, or `timeout_s` has
                passed.
        """
        give_up_s = time.monotonic() + timeout_s
        try:
            with self.open(url, {}) as response:
                if response.status != _OK:
                    raise HttpStatusError(response.status, f"{url}: answers with status {response.status}")
                while data := response.read1(_CHUNK_BYTES):
                    count(len(data))
                    yield data
                    if time.monotonic() > give_up_s:
                        raise SlowError(f"{url}: is not there after {timeout_s:.0f} s")
        except (OSError, http.client.HTTPException) as cause:
            raise TransportError(f"{url}: {cause}") from cause

    @contextlib.contextmanager
    def open(self, url: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        address = urlsplit(url)
        if address.scheme != "https":
            raise TransportError(f"{url}: expected https")
        host_and_port = address.hostname or "", address.port or 443
        # Without a context it makes one, and reads all certificates of the system: 20 ms.
        connection = http.client.HTTPSConnection(*host_and_port, context=self._context)
        try:
            plain = connect(host_and_port, self.limits)
            with plain, _deadline(plain, self.limits.slow_s, url):
                secured = connection.sock = self._context.wrap_socket(plain, server_hostname=host_and_port[0])
                connection.request("GET", address.path, headers={**headers, "User-Agent": "edgekit"})
                response = connection.getresponse()
                if isinstance(self._context, ResumingContext):  # certificates are most of a small answer
                    self._context.remember(secured)
            yield response
        finally:
            connection.close()


def connect(host_and_port: tuple[str, int], limits: DownloadLimits) -> socket.socket:
    """Return a TCP connection.

    If the maximum rate is below 64 KiB/s, the receive buffer is limited to about one second of data.

    Raises:
        OSError: no address can be reached.
    """
    cause: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(*host_and_port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(limits.timeout_s)
            if limits.bytes_per_s is not None and limits.bytes_per_s < _KERNEL_WINDOW_BYTES:
                window_bytes = max(_LEAST_WINDOW_BYTES, int(limits.bytes_per_s))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
            connection.connect(address)
        except OSError as error:
            connection.close()
            cause = error
        else:
            return connection
    raise cause or OSError(f"{host_and_port[0]} has no address")


@contextlib.contextmanager
def _deadline(connection: socket.socket, limit_s: float, url: str) -> Iterator[None]:
    """End a connection whose handshake or head is not complete in time, even if bytes drip in.

    Raises:
        SlowError: the connection was ended.
    """
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        with contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)

    with connection.dup() as same:
        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException) as cause:
            if is_over.is_set():
                raise SlowError(f"{url}: no answer within {limit_s:.0f} s") from cause
            raise
        finally:
            timer.cancel()


def _write(write: Callable[[bytes], object], data: bytes, path: Path) -> None:
    """Write, and distinguish errors of the disk from those of the network."""
    try:
        write(data)
    except OSError as cause:
        raise OutputError(f"cannot write {path}: {cause.strerror}; free space") from cause
