"""Stores the logs that devices send on request, with limits on their size and one answer per request."""

from typing import Final

from sqlalchemy import update
from sqlalchemy.orm import Session

from edgekit_fleet.store.tables import DeviceLogRow
from edgekit_runtime.agent.documents import Logs
from edgekit_runtime.agent.fleet_orders import unpack_lines
from edgekit_runtime.system.shown_text import clean_line

MAX_TEXT_BYTES: Final = 512 << 10
"""The maximum size of the text after decompression, for 1,000 lines of 500 characters. A compressed text can
claim any size."""


def keep_logs(session: Session, logs: Logs, now: float) -> None:
    """Store a device's answer to the newest request for its logs.

    A second answer, or one to an earlier request, is ignored. `now` is in seconds since 1970.
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
