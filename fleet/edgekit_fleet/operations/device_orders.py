"""Orders to a single device: changed settings, and requests for its last log lines."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from edgekit_fleet.identity.enrolment import find_device
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import DeviceLogRow, read_record
from edgekit_runtime.agent.documents import LogRequest
from edgekit_runtime.dataclass_json import Range, to_plain
from edgekit_runtime.errors import FleetError, NotFoundError, RequestError
from edgekit_runtime.protocol.device_settings import SETTINGS, find_fault

_PAUSE_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLog:
    """The last log lines of a device.

    Attributes:
        device, lines, asked_at, asked_by, answered_at: See `DeviceLogRow`.
        source: `journal`, or `memory`, which has no lines from before a restart.
        refusal: The reason why the device refuses to send logs, or empty.
        text: The lines, oldest first, without secrets. The text is untrusted.
    """

    device: str
    lines: Annotated[int, Range(0, 1000)]
    asked_at: float
    asked_by: str
    answered_at: float | None
    source: str
    refusal: str
    text: str


def change_settings(store: Store, device: str, changes: Mapping[str, str], *, actor: str) -> None:
    """Change settings of a device. With an empty value, the device uses its own setting again.

    Raises:
        FleetError: There is no such device or setting, or a value is invalid.
    """
    faults = [
        find_fault(key, value)
        for key, value in changes.items()
        if (value or key not in SETTINGS) and find_fault(key, value)
    ]
    if faults:
        raise FleetError("; ".join(faults))
    with store.transaction() as session:
        row = find_device(session, device)
        row.settings = {key: value for key, value in {**row.settings, **changes}.items() if value}
        audit.record(session, actor, "device.settings", device, settings=dict(changes))
        mark_due(session, [device])


def ask_for_logs(store: Store, device: str, lines: int, *, actor: str) -> DeviceLog:
    """Request the last log lines of a device. `find_log` returns the answer. An earlier request is replaced.

    Raises:
        FleetError: There is no such device.
        RequestError: 429, the last request was made just now.
    """
    now = time.time()
    request = LogRequest(request=secrets.token_hex(8), lines=lines)
    with store.transaction() as session:
        row = find_device(session, device)
        log = session.get(DeviceLogRow, device) or DeviceLogRow(device=device)
        if log.asked_at is not None and 0 <= now - log.asked_at < _PAUSE_S:
            raise RequestError(429, f"'{device}' was asked for its logs just now", retry_after_s=2)
        log.request, log.lines, log.asked_at, log.asked_by = request.request, lines, now, actor
        log.answered_at, log.source, log.refusal, log.text = None, "", "", ""
        session.add(log)
        row.logs = to_plain(request)
        audit.record(session, actor, "device.logs", device, lines=lines)
        mark_due(session, [device])
        return read_record(DeviceLog, log)


def find_log(store: Store, device: str) -> DeviceLog:
    """Return the newest request for the logs of a device, with its answer.

    Raises:
        FleetError: There is no such device.
        NotFoundError: There is no request.
    """
    with store.snapshot() as session:
        find_device(session, device)
        log = session.get(DeviceLogRow, device)
        if log is None:
            raise NotFoundError(
                f"nobody has asked '{device}' for its logs: edgekit fleet device {device} --logs 200"
            )
        return read_record(DeviceLog, log)
