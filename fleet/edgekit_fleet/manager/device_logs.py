"""The answers of devices to requests for their logs: unpacked within limits, one for each request."""

from typing import Final

from sqlalchemy import update
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import DeviceLogRow
from edgekit_runtime.agent.documents import Logs
from edgekit_runtime.agent.fleet_orders import unpack_lines
from edgekit_runtime.system.shown_text import clean_line

MAX_TEXT_BYTES: Final = 512 << 10
"""1,000 lines of 500 characters; a deflated text may say anything of its size."""


def keep_logs(session: Session, logs: Logs, now: float) -> None:
    """Write a device's answer to the newest request for its logs into the store.

    An answer to an earlier request, or a second answer, changes nothing. `now`: seconds since 1970.
    """
    refusal, text = clean_line(logs.refusal, 200), ""
    try:
        text = unpack_lines(logs.text, MAX_TEXT_BYTES)
    except ValueError:
        refusal = "the device sent lines that cannot be unpacked"
    session.execute(
        update(DeviceLogRow)
        .where(
            DeviceLogRow.device == logs.device,
            DeviceLogRow.request == logs.request,
            DeviceLogRow.answered_at.is_(None),
        )
        .values(answered_at=now, source=clean_line(logs.source, 16), refusal=refusal, text=text)
    )
