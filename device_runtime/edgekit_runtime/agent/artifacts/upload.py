"""Sends samples to the fleet in parts. An upload resumes after an interruption.

`protocol.samples` defines the requests and answers. A sample stays on the device until the manager has stored
it or refused it for good.
"""

import http.client
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from edgekit_runtime.agent.artifacts.download import DownloadLimits, RateCap, connect
from edgekit_runtime.agent.membership import ResumingContext
from edgekit_runtime.errors import TransportError
from edgekit_runtime.samples.folder import SampleFolder, StoredSample

_PART_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 4 << 10
_MAX_REPLY_BYTES: Final = 4 << 10
_MAX_REPEATS: Final = 3  # requests for a sample beyond two for each part
_DURABLE: Final = (200, 201)
_REFUSED: Final = (403, 410, 413, 422)
_GO_ON: Final = (202, 204, 409)


class UploadReply(NamedTuple):
    """The manager's answer to a request.

    Attributes:
        status: HTTP status.
        offset: value of the header `Upload-Offset` in bytes, or None if the header is missing.
    """

    status: int
    offset: int | None


Ask: TypeAlias = Callable[[str, str, Mapping[str, str], bytes], UploadReply]
"""Sends a request (method, path, headers, body) and returns the reply. Can raise TransportError."""


class UploadBudgetError(TransportError):
    """The next part would exceed the limit of bytes for this month."""


def send_samples(
    samples: Iterable[StoredSample],
    folder: SampleFolder,
    ask: Ask,
    *,
    stop: threading.Event,
    most_bytes: int | None = None,
) -> int:
    """Send samples one after the other, and return how many the manager has stored.

    A sample is deleted once the manager has stored it or refused it for good.

    Args:
        samples: samples to send.
        folder: folder that stores the samples.
        ask: sends a request to the manager, see `Ask`.
        stop: event that ends the upload after the current part.
        most_bytes: maximum number of bytes to send, or None.

    Raises:
        UploadBudgetError: the next part would exceed `most_bytes`.
        TransportError: there is no connection, or the manager takes no samples now.
        OutputError: a sample cannot be deleted.
    """
    accepted, sent_bytes, is_first = 0, 0, True
    for sample in samples:
        path, offset = f"/samples/{sample.id}", 0
        requests_left = _MAX_REPEATS + 2 * sample.size_bytes // _PART_BYTES
        if is_first:  # the one that an interruption may have left in two parts
            offset = ask("HEAD", path, {}, b"").offset or 0
            is_first = False
            if offset == sample.size_bytes:  # whole, and the answer was lost, or it could not be stored
                offset = 0
        while not stop.is_set():
            try:
                data = sample.path.read_bytes()
            except OSError:  # deleted by the owner, or too old
                break
            if offset >= len(data) or not requests_left:
                raise TransportError(f"{path}: the manager wants other bytes again and again")
            requests_left -= 1
            part = data[offset : offset + _PART_BYTES]
            if most_bytes is not None and sent_bytes + len(part) > most_bytes:
                raise UploadBudgetError(f"a part has {len(part)} bytes, {most_bytes - sent_bytes} are left")
            sent_bytes += len(part)
            stretch = f"bytes {offset}-{offset + len(part) - 1}/{len(data)}"
            reply = ask("PUT", path, {"Content-Range": stretch}, part)
            if reply.status in (*_DURABLE, *_REFUSED):
                accepted += reply.status in _DURABLE
                folder.remove(sample)
                break
            if reply.status not in _GO_ON or reply.offset is None:
                raise TransportError(f"{path}: the manager answers with status {reply.status}")
            offset = reply.offset
        if stop.is_set():
            break
    return accepted


class SampleLink:
    """Sends requests to the fleet's web server over one connection, and limits the rate."""

    def __init__(
        self,
        web: str,
        context: ssl.SSLContext,
        limits: DownloadLimits,
        *,
        count: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        """Connect with the first request; `count` gets the bytes of bodies as they are sent."""
        address = urlsplit(web)
        self._host_and_port = address.hostname or "", address.port or 443
        self._context, self._limits, self._count, self._stop = context, limits, count, stop
        self._cap = RateCap(limits)
        self._connection: http.client.HTTPSConnection | None = None

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> UploadReply:
        try:
            connection = self._connection or self._connect()
            stated = {**headers, "Content-Length": str(len(body)), "User-Agent": "edgekit"}
            connection.request(method, path, self._cap_rate(body), stated)
            response = connection.getresponse()
            if response.read(_MAX_REPLY_BYTES) and not response.isclosed():
                self.close()
            offset = response.headers.get("Upload-Offset", "")
        except (OSError, http.client.HTTPException) as cause:
            self.close()
            raise TransportError(f"{path}: {cause}") from cause
        is_number = offset.isascii() and offset.isdecimal() and len(offset) < 16
        return UploadReply(response.status, int(offset) if is_number else None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(*self._host_and_port, context=self._context)
        plain = connect(self._host_and_port, self._limits)
        try:
            secured = connection.sock = self._context.wrap_socket(
                plain, server_hostname=self._host_and_port[0]
            )
        except BaseException:
            plain.close()
            raise
        if isinstance(self._context, ResumingContext):
            self._context.remember(secured)
        self._connection = connection
        return connection

    def _cap_rate(self, body: bytes) -> Iterator[bytes]:
        for begin in range(0, len(body), _PIECE_BYTES):
            piece = body[begin : begin + _PIECE_BYTES]
            self._count(len(piece))
            self._cap.count(len(piece), self._stop)
            yield piece
