"""The audit log, and backups of a whole fleet."""

import contextlib
import dataclasses
import os
import sqlite3
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from sqlalchemy import delete, select

from edgekit_fleet.releases.repository import open_repository
from edgekit_fleet.store import audit
from edgekit_fleet.store.copying import copy_store
from edgekit_fleet.store.database import Store, open_store
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.tables import AuditRow, ManagerRow, read_record
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import ConfigError, OutputError, RequestError
from edgekit_runtime.system.atomic_files import DISK, make_folders, write_atomically

one_check: Final = threading.Lock()
_DATABASE: Final = "fleet.db"
_SAVED: Final = ("fleet.json", "identity", "repository-keys", "repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """An entry of the audit log. See `AuditRow`."""

    number: Annotated[int, Range(1, 1 << 50)]
    at: Annotated[float, Range(0, 10**11)]
    actor: str
    action: str
    subject: str
    detail: Mapping[str, Any]


def read_audit(
    store: Store,
    *,
    subject: str | None = None,
    action: str | None = None,
    limit: int = 100,
    before: int | None = None,
) -> list[AuditRecord]:
    """Return the newest entries of the audit log, oldest first.

    Args:
        store: The store of the fleet.
        subject: The device, release or rollout of the entries, or None for all entries.
        action: A prefix of the actions, such as `rollout` or `alarm.`, or None for all entries.
        limit: The maximum number of entries.
        before: Only entries with a lower number are returned. None selects the newest entries.
    """
    statement = select(AuditRow).order_by(AuditRow.number.desc()).limit(limit)
    if subject is not None:
        statement = statement.where(AuditRow.subject == subject)
    if action is not None:
        statement = statement.where(AuditRow.action.startswith(action, autoescape=True))
    if before is not None:
        statement = statement.where(AuditRow.number < before)
    with store.snapshot() as session:
        return [read_record(AuditRecord, row) for row in reversed(session.scalars(statement).all())]


def find_audit_break(store: Store) -> int | None:
    """Check the audit log, which takes half a minute for a million entries.

    Returns:
        The number of the first entry that is missing or changed, or None if the log is intact.

    Raises:
        RequestError: 429, another check is running.
    """
    if not one_check.acquire(blocking=False):
        raise RequestError(429, "the audit log is being checked; wait for the result", retry_after_s=30)
    try:
        with store.snapshot() as session:
            return audit.find_break(session)
    finally:
        one_check.release()


def back_up(folder: FleetFolder, path: Path) -> None:
    """Write the settings, authority, keys, repository and store of a fleet to a file, even while it runs.

    A PostgreSQL database is not included. Dump it first, with its own tools.

    The file gives control over the fleet, so only its owner can read it. Devices may have newer documents
    than a restored backup. The manager then continues from the devices' state, and writes an alarm to the
    audit log.

    Raises:
        ConfigError: There is no fleet.
        OutputError: The file exists or cannot be written.
    """
    if path.exists():
        raise OutputError(f"{path} exists; choose a new file")
    has_file = not folder.read_settings().store_url
    try:
        with tempfile.TemporaryDirectory(prefix="edgekit-backup-") as temporary:
            copy = Path(temporary) / _DATABASE
            if has_file:
                _copy_store(folder.path / _DATABASE, copy)
            with (
                open_repository(folder).lock(),  # so that no release is half in it
                write_atomically(path, mode=0o600) as file,
                tarfile.open(fileobj=file, mode="w:gz") as archive,
            ):
                if has_file:
                    archive.add(copy, _DATABASE)
                for name in _SAVED:
                    if (folder.path / name).exists():
                        archive.add(folder.path / name, name)
    except (OSError, sqlite3.Error) as cause:
        raise OutputError(f"cannot write the backup {path}: {cause}") from cause


def restore(folder: FleetFolder, path: Path, database: str = "") -> None:
    """Restore a fleet from a backup into an empty folder.

    This also creates the folder of an additional manager for a fleet on PostgreSQL.

    Args:
        folder: A folder that is empty or does not exist.
        path: The path of the backup.
        database: The URL of the PostgreSQL database that holds the store from now on. A store in the backup
            is copied into it. If the backup has no store, the database must already contain it.

    Raises:
        ConfigError: The folder is not empty, or the file is not a backup. The backup and the database both
            contain a fleet's store, or both lack it.
        OutputError: The folder or the database cannot be written.
    """
    if database and not database.startswith(("postgresql://", "postgres://")):
        raise ConfigError("the database is not one of PostgreSQL: expected postgresql://USER@HOST/NAME")
    if folder.path.exists() and any(folder.path.iterdir()):
        raise ConfigError(f"{folder.path} is not empty; move it away, or choose another folder with --folder")
    try:
        with tarfile.open(path) as archive:
            names = archive.getnames()
            if "fleet.json" not in names:
                raise ConfigError(f"{path} is no backup of a fleet")
            _restore(folder.path, archive, path.name, database)
    except (tarfile.TarError, EOFError, zlib.error) as cause:
        raise ConfigError(f"{path} is no backup of a fleet: {cause}") from cause
    except OSError as cause:
        raise OutputError(f"cannot restore {path} to {folder.path}: {cause}") from cause


def _copy_store(path: Path, copy: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(path)) as source,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)


def _check_store(database: str) -> None:
    with contextlib.closing(open_store(database)) as store, store.snapshot() as session:
        if session.scalar(select(AuditRow.number).limit(1)) is None:
            raise ConfigError(
                "the database holds no fleet, and the backup has no store: restore the database first, with"
                " its own tools"
            )


def _restore(path: Path, archive: tarfile.TarFile, name: str, database: str) -> None:
    """Extract a fleet beside `path`, and rename it to `path` once it is complete."""
    make_folders(path.parent)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        archive.extractall(temporary, filter="data")
        copied_folder = FleetFolder(Path(temporary))
        settings = copied_folder.read_settings()
        if not settings.store_url:
            with contextlib.closing(copied_folder.open_store()) as store:
                if database:
                    with contextlib.closing(open_store(database)) as target:
                        copy_store(store, target, actor="restore", subject=name)
                else:
                    with store.transaction() as session:
                        session.execute(delete(ManagerRow))  # managers that ran when the backup was made
                        audit.record(session, "restore", "fleet.restore", name)
        elif database:
            _check_store(database)
        if database:
            copied_folder.write_settings(dataclasses.replace(settings, store_url=database))
            for old in copied_folder.path.glob(f"{_DATABASE}*"):
                old.unlink()
        os.sync()
        DISK.replace(copied_folder.path, path)
        DISK.sync_folder(path.parent)
