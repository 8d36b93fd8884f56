"""Receives samples from devices with `HEAD` and `PUT /samples/ID`, see `edgekit_runtime.protocol.samples`.

A device authenticates with its certificate in the TLS handshake, before its request is read. It may send only
samples that its orders ask for, within their limits and one at a time.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import NameOID
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edgekit_fleet.samples.orders import list_orders_of, read_setting
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import DeviceRow, SampleOrderRow, SampleRow
from edgekit_fleet.web.request_body import discard_body, read_pieces
from edgekit_runtime.errors import DataError, EdgekitError, OutputError, RequestError
from edgekit_runtime.protocol.samples import MAX_SEALED_BYTES, SAMPLE_ID, TRIGGERS, SampleHeader
from edgekit_runtime.system.atomic_files import DISK, make_folders

CERTIFICATE: Final = "certificate"
"""The key in a request's state for the client's certificate in DER, which TLS has verified, or None."""

FLOOD: Final = "alarm.sample-flood"
POISON: Final = "alarm.sample-refused"

_RANGE: Final = re.compile(r"bytes ([0-9]{1,12})-([0-9]{1,12})/([0-9]{1,12})", re.ASCII)
_PIECE_S: Final = 30.0
_DAY_S: Final = 86_400.0
_LATE_S: Final = 7 * _DAY_S  # after the end of an order: devices still send what waits
_TOLERANCE: Final = 1.05
_BURST: Final = 10
_COUNT_S: Final = 60.0  # after this time the sum of all samples is read again
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """Limits for uploads from devices.

    Attributes:
        requests: The maximum number of requests of a device in a minute. Further requests are refused. More
            than twice this number raises an alarm.
        uploads: The maximum number of simultaneous uploads of all devices.
        parts: The maximum number of incomplete samples of a device.
    """

    requests: int = 600
    uploads: int = 32
    parts: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The byte range of an encrypted file that a request contains.

    Attributes:
        begin: The position of the first byte, from 0.
        end: The position after the last byte.
        size_bytes: The size of the whole file.
    """

    begin: int
    end: int
    size_bytes: int

    @classmethod
    def parse(cls, text: str) -> "Stretch":
        """Parse the value of a `Content-Range` header.

        Raises:
            RequestError: 400 if the value is malformed, or 413 if the sample is too large.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            raise RequestError(400, "expected Content-Range: bytes FIRST-LAST/SIZE")
        begin, last, size_bytes = map(int, match.groups())
        if not begin <= last < size_bytes:
            raise RequestError(400, f"Content-Range {text[:80]!r} is no part of its size")
        if size_bytes > MAX_SEALED_BYTES:
            raise RequestError(413, f"a sample has at most {MAX_SEALED_BYTES} bytes")
        return cls(begin=begin, end=last + 1, size_bytes=size_bytes)


class _OtherOffsetError(RequestError):
    """The upload begins at another offset than the manager expects."""

    def __init__(self, offset: int) -> None:
        super().__init__(409, f"the next byte is {offset}")
        self.offset = offset


class SampleUploads:
    """Receives samples from devices and stores them in the vault."""

    def __init__(self, store: Store, vault: SampleVault, limits: UploadLimits) -> None:
        self._store, self._vault, self._limits = store, vault, limits
        self._uploading: set[str] = set()  # devices
        self._opening = Lock()  # opened, a sample takes its size several times
        self._minute = 0
        self._requests: Counter[str] = Counter()  # of devices in this minute
        self._alarms: dict[tuple[str, str], float] = {}  # (device, action) -> when it was written
        self._stored_bytes, self._counted_at = 0, float("-inf")

    async def answer(self, request: Request) -> Response:
        """Answer a `HEAD` or `PUT` request for a sample. Errors become HTTP error responses."""
        device = ""
        try:
            device = await run_in_threadpool(self._identify, request)
            await run_in_threadpool(self._count, device)
            sample_id = _read_id(request)
            if request.method == "HEAD":
                return await run_in_threadpool(self._show_offset, device, sample_id)
            with self._alone(device):
                return await self._take(request, device, sample_id)
        except RequestError as refusal:
            await discard_body(request)  # a device reads no answer while it sends
            after = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
            if isinstance(refusal, _OtherOffsetError):
                after["upload-offset"] = str(refusal.offset)
            return PlainTextResponse(f"{refusal}\n", refusal.status, after)
        except EdgekitError as error:
            _log.error("sample of '%s': %s", device, error)
            return PlainTextResponse("the fleet cannot do this now\n", 503, {"retry-after": "60"})

    def _identify(self, request: Request) -> str:
        """Return the name of the device.

        Raises:
            RequestError: 401 without a certificate, or 403 if the device is unknown or revoked.
        """
        encoded = getattr(request.state, CERTIFICATE, None)
        if encoded is None:
            raise RequestError(401, "send the certificate of the device")
        certificate = x509.load_der_x509_certificate(encoded)
        key = certificate.public_key()
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        with self._store.snapshot() as session:
            row = session.get(DeviceRow, str(names[0].value)) if names else None
            is_ours = (
                row is not None
                and row.revoked_at is None
                and isinstance(key, Ed25519PublicKey)
                and key.public_bytes_raw() == row.public_key
            )
        if not is_ours or row is None:
            raise RequestError(403, "the certificate is of no device of this fleet, or it is revoked")
        return row.name

    def _count(self, device: str) -> None:
        """Count a request.

        Raises:
            RequestError: 429 if the device sends too many requests.
        """
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute = minute
            self._requests.clear()
        self._requests[device] += 1
        if self._requests[device] > self._limits.requests:
            if self._requests[device] > 2 * self._limits.requests:
                self._alarm(device, FLOOD, f"it goes on over {self._limits.requests} requests in a minute")
            raise RequestError(429, "too many requests", retry_after_s=60)

    @contextmanager
    def _alone(self, device: str) -> Iterator[None]:
        """Reserve an upload for a device during the block.

        Raises:
            RequestError: 429 if the device is already uploading, or 503 if too many devices are.
        """
        if device in self._uploading:
            raise RequestError(429, "send one sample after the other", retry_after_s=1)
        if len(self._uploading) >= self._limits.uploads:
            raise RequestError(503, "many devices send samples", retry_after_s=30)
        self._uploading.add(device)
        try:
            yield
        finally:
            self._uploading.discard(device)

    def _show_offset(self, device: str, sample_id: str) -> Response:
        with self._store.snapshot() as session:
            self._admit(session, device)
            is_stored = self._is_stored(session, device, sample_id)
            if is_stored:
                return Response(status_code=200)
        path = self._find_part(device, sample_id)
        offset = 0 if path is None else path.stat().st_size
        return (
            Response(status_code=204, headers={"upload-offset": str(offset)})
            if offset
            else Response(status_code=404)
        )

    async def _take(self, request: Request, device: str, sample_id: str) -> Response:
        stretch = Stretch.parse(request.headers.get("content-range", ""))
        is_stored = await run_in_threadpool(self._check, device, sample_id, stretch)
        if is_stored:  # the answer to the last part was lost
            return Response(status_code=201)
        path = await run_in_threadpool(self._open_part, device, sample_id, stretch)
        with DISK.append(path, stretch.begin) as file:
            async for piece in read_pieces(request, stretch.end - stretch.begin, _PIECE_S):
                await run_in_threadpool(file.write, piece)
            offset = file.tell()
        if offset < stretch.size_bytes:
            return Response(status_code=202, headers={"upload-offset": str(offset)})
        await run_in_threadpool(self._complete, device, sample_id, path)
        return Response(status_code=201)

    def _check(self, device: str, sample_id: str, stretch: Stretch) -> bool:
        """Return whether the sample is already stored.

        Raises:
            RequestError: 403 if the device has no order or another device sent the sample, 429 if its
                orders allow no more samples now, or 503 if the fleet stores no more.
        """
        now = time.monotonic()
        with self._store.snapshot() as session:
            orders, max_bytes = self._admit(session, device)
            if self._is_stored(session, device, sample_id):
                return True
            statement = select(func.count(), func.coalesce(func.sum(SampleRow.size_bytes), 0))
            is_counted = (SampleRow.device == device) & SampleRow.order.in_([order.id for order in orders])
            count, size_bytes = session.execute(statement.where(is_counted)).one()
            if now - self._counted_at >= _COUNT_S:
                self._counted_at = now
                self._stored_bytes = session.scalar(select(func.sum(SampleRow.size_bytes))) or 0
        days = [max(0.0, time.time() - order.created_at) / _DAY_S + 1 for order in orders]
        most = _BURST + _TOLERANCE * sum(order.per_day * days[i] for i, order in enumerate(orders))
        most_bytes = _TOLERANCE * sum(order.max_bytes * days[i] for i, order in enumerate(orders))
        if count >= most or size_bytes + stretch.size_bytes > most_bytes:
            self._alarm(device, FLOOD, f"it has sent {count} samples, over what its orders allow")
            raise RequestError(429, "the orders allow no more samples now", retry_after_s=3600)
        if self._stored_bytes + stretch.size_bytes > max_bytes:
            self._alarm("samples", "alarm.samples-full", f"{max_bytes} bytes are stored: delete some")
            raise RequestError(503, "the fleet stores no more samples", retry_after_s=3600)
        return False

    def _admit(self, session: Session, device: str) -> tuple[list[SampleOrderRow], int]:
        """Return the orders of a device, and the maximum size of all samples in bytes.

        Raises:
            RequestError: 403 if there is no order, or the fleet collects no samples.
        """
        setting = read_setting(session)
        orders = list_orders_of(session, device, time.time() - _LATE_S) if setting is not None else []
        if setting is None or not orders:
            raise RequestError(403, "the fleet wants no samples of this device")
        return orders, setting.max_bytes

    def _is_stored(self, session: Session, device: str, sample_id: str) -> bool:
        """Return whether a sample is in the vault.

        Raises:
            RequestError: 403 if the sample is from another device.
        """
        row = session.get(SampleRow, sample_id)
        if row is not None and row.device != device:
            raise RequestError(403, "this sample is of another device")
        return row is not None

    def _find_part(self, device: str, sample_id: str) -> Path | None:
        """Return the file of an incomplete sample. Its name ends with the size of the whole sample."""
        return next(self._vault.incoming.joinpath(device).glob(f"{sample_id}.*"), None)

    def _open_part(self, device: str, sample_id: str, stretch: Stretch) -> Path:
        """Return the file to append a part to. If there are too many incomplete samples, delete the oldest.

        Raises:
            RequestError: 409 if the part does not begin where the file ends.
            OutputError: The disk is full.
        """
        folder = self._vault.incoming / device
        try:
            make_folders(folder, 0o700)
            path = self._find_part(device, sample_id)
            if path is not None and path.suffix != f".{stretch.size_bytes}":  # another file of this name
                path.unlink()
                path = None
            offset = path.stat().st_size if path is not None else 0
            others = sorted(folder.iterdir(), key=lambda part: part.stat().st_mtime)
        except OSError as cause:
            raise OutputError(f"cannot take a sample: {cause}") from cause
        if offset >= stretch.size_bytes:  # complete, and it was not stored: from the beginning
            offset = 0
        if stretch.begin != offset:
            raise _OtherOffsetError(offset)
        if path is None:
            for part in others[: max(0, len(others) + 1 - self._limits.parts)]:
                part.unlink(missing_ok=True)
        return path or folder / f"{sample_id}.{stretch.size_bytes}"

    def _complete(self, device: str, sample_id: str, path: Path) -> None:
        """Check a complete sample, and store it.

        Raises:
            RequestError: 422 if it is not a sample or has no order, 410 if its order was stopped or no longer
                applies to the device, or 403 if another device sent it, the device has no order or no
                samples are collected.
            OutputError: The sample cannot be written.
        """
        sealed = path.read_bytes()
        try:
            with self._opening:
                header = self._vault.unseal(sample_id, sealed).header
            with self._store.snapshot() as session:
                self._is_stored(session, device, sample_id)  # another device may have sent it meanwhile
                orders, _ = self._admit(session, device)
                _check_header(session, header, orders)
        except RequestError:
            path.unlink()
            raise
        except DataError as error:
            path.unlink()
            self._alarm(device, POISON, str(error)[:200])
            raise RequestError(422, str(error)) from error
        self._vault.put(sample_id, sealed)
        with self._store.transaction() as session:
            session.add(
                SampleRow(
                    id=sample_id,
                    device=device,
                    order=header.order,
                    model=header.model,
                    version=header.version,
                    triggers=f" {' '.join(sorted(header.triggers))} ",
                    probability=header.probability,
                    media_type=header.media_type,
                    size_bytes=len(sealed),
                    taken_at=header.taken_at,
                    received_at=time.time(),
                )
            )
        self._stored_bytes += len(sealed)
        with suppress(OSError):
            path.unlink()

    def _alarm(self, subject: str, action: str, text: str) -> None:
        """Write an alarm to the audit log, at most once an hour for a device."""
        now = time.monotonic()
        if now - self._alarms.get((subject, action), float("-inf")) < 3600:
            return
        self._alarms[subject, action] = now
        with self._store.transaction() as session:
            audit.record(session, "web", action, subject, text=text)


def _read_id(request: Request) -> str:
    sample_id: str = request.path_params["id"]
    if SAMPLE_ID.fullmatch(sample_id) is None:
        raise RequestError(404, "a sample is named by 32 hexadecimal digits")
    return sample_id


def _check_header(session: Session, header: SampleHeader, orders: list[SampleOrderRow]) -> None:
    unknown = set(header.triggers) - TRIGGERS.keys()
    if unknown:
        raise DataError(f"the sample has the triggers {sorted(unknown)}, expected {sorted(TRIGGERS)}")
    order = session.get(SampleOrderRow, header.order)
    if order is None or order.model != header.model:
        raise DataError("the sample is of no order of this fleet")
    if order not in orders:
        raise RequestError(410, "its order was stopped, or means this device no more")
