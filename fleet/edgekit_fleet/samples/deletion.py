"""Deletes samples: first the files and then the rows, so that no file remains without its row."""

from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, select

from edgekit_fleet.samples.orders import SETTING
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import DeviceRow, SampleRow, SampleSettingRow

_BATCH: Final = 200
_DAY_S: Final = 86_400.0
_PART_LIFE_S: Final = 7 * _DAY_S


def delete_where(
    store: Store, vault: SampleVault, condition: ColumnElement[bool], actor: str, **detail: Any
) -> int:
    """Delete the samples that meet a condition, record it in the audit log, and return their number.

    Args:
        store: The store of the fleet.
        vault: The vault with the files.
        condition: A condition for statements on `SampleRow`.
        actor: The actor for the audit log.
        detail: Further fields for the audit log.

    Raises:
        OutputError: A file cannot be deleted. Files that were already deleted are not restored.
    """
    total = 0
    while True:
        with store.snapshot() as session:
            ids = session.scalars(select(SampleRow.id).where(condition).limit(_BATCH)).all()
        if not ids:
            return total
        for sample_id in ids:
            vault.remove(sample_id)
        with store.transaction() as session:
            session.execute(delete(SampleRow).where(SampleRow.id.in_(ids)))
            audit.record(session, actor, "sample.delete", "samples", count=len(ids), ids=[*ids], **detail)
        total += len(ids)


def delete_unwanted(store: Store, vault: SampleVault, now: float) -> int:
    """Delete old samples and samples of revoked devices, and return their number.

    Incomplete uploads are also deleted if they belong to a revoked device or were not continued for a week.
    `SampleSettingRow` says how long samples are stored. If there is no such row, nothing is deleted. `now` is
    in seconds since 1970.

    Raises:
        OutputError: A file cannot be deleted.
    """
    with store.snapshot() as session:
        setting = session.get(SampleSettingRow, SETTING)
        days = None if setting is None else setting.days
        revoked = set(session.scalars(select(DeviceRow.name).where(DeviceRow.revoked_at.is_not(None))))
    if days is None:
        return 0
    for part in vault.incoming.glob("*/*"):
        with suppress(FileNotFoundError):  # it was completed just now
            if part.parent.name in revoked or part.stat().st_mtime < now - _PART_LIFE_S:
                _remove_part(store, vault, part)
    is_old = SampleRow.received_at < now - days * _DAY_S
    is_revoked = SampleRow.device.in_(select(DeviceRow.name).where(DeviceRow.revoked_at.is_not(None)))
    return sum(
        delete_where(store, vault, condition, "manager", why=why)
        for condition, why in ((is_old, f"older than {days:g} days"), (is_revoked, "revoked device"))
    )


def _remove_part(store: Store, vault: SampleVault, part: Path) -> None:
    """Delete an upload, and the file of its sample if an interruption left the file without a row."""
    sample_id = part.name.partition(".")[0]
    with store.snapshot() as session:
        is_stored = session.get(SampleRow, sample_id) is not None
    if not is_stored:
        vault.remove(sample_id)
    part.unlink()
