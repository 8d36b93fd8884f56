"""A store of an older version with rows of every kind, brought to the newest form, also under load.

The writer of the version before knows only its own tables: it is made of what the database itself says of
them before the upgrade. So it stands for an older manager, whose code is not here.
"""

import contextlib
import itertools
import random
import threading
from collections import Counter

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Boolean, Float, Integer, LargeBinary, MetaData, create_engine, func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from tests.fleet.postgresql_server import new_database

from edgekit_fleet.store import audit
from edgekit_fleet.store.database import _parse, alembic_config, open_store, sqlite_url
from edgekit_fleet.store.tables import SHARDS, Table

REVISIONS = [each.revision for each in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]
FILLED_BY_CODE = ("audit", "alembic_version", "shards", "lease")
TEXTS = {"facts": {"boot": "1", "os": "linux"}, "reported": None, "tags": {"site": "lyon"}}


class OlderVersion:
    """Writes rows of every kind as a version that knows the tables as they were."""

    def __init__(self, url, revision):
        self.engine = create_engine(_parse(url))
        with self.engine.begin() as connection:
            command.upgrade(alembic_config(connection), revision)
        self.tables = MetaData()
        self.tables.reflect(self.engine)
        self.kinds = [each for each in self.tables.sorted_tables if each.name not in FILLED_BY_CODE]
        self.written = 0

    def write(self):
        """Add a row of each kind, change an older one, and read what it wrote."""
        number, some = self.written, random.Random(self.written).randrange(self.written + 1)
        with Session(self.engine) as session, session.begin():
            for table in self.kinds:
                session.execute(table.insert().values(make_row(table, number)))
                row = make_row(table, some)
                is_it = [column == row.pop(column.name) for column in table.primary_key]
                if row:
                    assert session.execute(table.update().where(*is_it).values(row)).rowcount == 1
                assert session.execute(select(table).where(*is_it)).one()
            audit.record(session, "manager", "device.tag", f"d{number}", number=number)
            audit.write(session)
        self.written += 1


def make_row(table, number):
    """Return column -> value; keys of another table are those of its row of the same number."""
    return {column.name: make_value(column, number) for column in table.columns}


def make_value(column, number):
    for key in column.foreign_keys:
        return make_value(key.column, number)
    kind = column.type
    if isinstance(kind, JSON):
        return TEXTS.get(column.name, {})
    if isinstance(kind, Boolean):
        return bool(number % 2)
    if isinstance(kind, Integer):
        return number % SHARDS if column.name == "shard" else number
    if isinstance(kind, Float):
        return float(number)
    if isinstance(kind, LargeBinary):
        return bytes((number % 256,))
    return f"{column.name}-{number}"[-(kind.length or 99) :]


def check(store, older):
    """Check that the newest code finds all rows, and the tables that it expects."""
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    with store.snapshot() as session:
        for each in Table.__subclasses__():
            assert len(session.scalars(select(each)).all()) == session.scalar(
                select(func.count()).select_from(each)
            )
        counts = {each.name: session.scalar(select(func.count()).select_from(each)) for each in older.kinds}
        assert set(counts.values()) == {older.written}, counts
        assert audit.find_break(session) is None


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "fleet.db")
        return
    with new_database(request.getfixturevalue("postgresql")) as url:
        yield url


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_rows_of_every_older_version_are_there_after_the_upgrade(empty_url, revision):
    older = OlderVersion(empty_url, revision)
    for _ in range(5):
        older.write()
    older.engine.dispose()
    with contextlib.closing(open_store(empty_url)) as store:
        check(store, older)


def write_until(older, stop, problems):
    """Write as a manager: what a lock or a deadlock refuses is tried again."""
    while not stop.is_set():
        try:
            older.write()
        except OperationalError as refusal:  # noqa: PERF203
            problems[type(refusal.orig).__name__] += 1
        except Exception as error:
            problems[f"{type(error).__name__}: {error}"] += 1
            return


def test_version_before_writes_on_while_the_tables_change(postgresql):
    with new_database(postgresql) as url:
        older = OlderVersion(url, REVISIONS[-2])
        for _ in range(200):
            older.write()
        stop, problems = threading.Event(), Counter()
        writer = threading.Thread(target=write_until, args=(older, stop, problems))
        writer.start()
        try:
            with contextlib.closing(open_store(url)) as store:
                after = older.written
                for _ in itertools.takewhile(lambda _: writer.is_alive(), range(200)):
                    if older.written >= after + 20:
                        break
                    stop.wait(0.1)
                stop.set()
                writer.join(20)
                assert older.written >= after + 20, problems
                assert set(problems) <= {"LockNotAvailable", "DeadlockDetected"}
                check(store, older)
        finally:
            stop.set()
            writer.join(20)
            older.engine.dispose()
