"""A store with rows of every kind, which the migration of a next version changes, also under load.

The next version is made here: a migration with all that one may do beside managers of the version before.
The writer of today's version knows only the tables that the database had before that.
"""

import contextlib
import itertools
import os
import random
import threading
from collections import Counter

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Boolean, Float, Integer, LargeBinary, MetaData, create_engine, func, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session
from tests.fleet.postgresql_server import new_database

from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store, _parse, open_store, sqlite_url
from edgekit_fleet.store.migration import alembic_config, migrate
from edgekit_fleet.store.tables import SHARDS, Table
from edgekit_runtime.errors import ConfigError

MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision = "v9001"
down_revision = "{head}"


def upgrade():
    op.create_table("notes", sa.Column("number", sa.BigInteger(), primary_key=True))
    op.create_index("ix_devices_enrolled_at", "devices", ["enrolled_at"])
    op.add_column("devices", sa.Column("room", sa.String(), nullable=False, server_default="hall"))
"""
FILLED_BY_CODE = ("audit", "alembic_version", "shards", "lease")
TEXTS = {"facts": {"boot": "1", "os": "linux"}, "reported": None, "tags": {"site": "lyon"}}


class OlderVersion:
    """Writes rows of every kind as a version that knows the tables as they were."""

    def __init__(self, url):
        open_store(url).close()
        self.engine = create_engine(_parse(url))
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


@pytest.fixture
def next_version(tmp_path):
    """Return the configuration of a version with one more migration."""
    config = alembic_config()
    scripts = ScriptDirectory.from_config(config)
    (tmp_path / "v9001_next.py").write_text(MIGRATION.format(head=scripts.get_current_head()))
    config.set_main_option("version_locations", f"{scripts.versions}{os.pathsep}{tmp_path}")
    return config


def check(store, older):
    """Check that the code finds all rows, the tables that it expects, and the changes of the next version."""
    with store.engine.connect() as connection:
        changes = compare_metadata(MigrationContext.configure(connection), Table.metadata)
        assert sorted(kind for kind, *_ in changes) == ["remove_column", "remove_index", "remove_table"]
    with store.snapshot() as session:
        for each in Table.__subclasses__():
            assert len(session.scalars(select(each)).all()) == session.scalar(
                select(func.count()).select_from(each)
            )
        counts = {each.name: session.scalar(select(func.count()).select_from(each)) for each in older.kinds}
        assert set(counts.values()) == {older.written}, counts
        assert set(session.scalars(text("SELECT room FROM devices"))) == {"hall"}
        assert audit.find_break(session) is None


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path):
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "fleet.db")
        return
    with new_database(request.getfixturevalue("postgresql")) as url:
        yield url


def test_rows_are_there_after_the_upgrade_which_the_version_before_refuses_to_open(empty_url, next_version):
    older = OlderVersion(empty_url)
    for _ in range(5):
        older.write()
    with contextlib.closing(Store(older.engine)) as store:
        migrate(store.engine, next_version)
        check(store, older)
    with pytest.raises(ConfigError, match="newer edgekit"):
        open_store(empty_url)


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


def test_version_before_writes_on_while_the_tables_change(postgresql, next_version):
    with new_database(postgresql) as url:
        older = OlderVersion(url)
        for _ in range(10):
            older.write()
        stop, problems = threading.Event(), Counter()
        writer = threading.Thread(target=write_until, args=(older, stop, problems))
        writer.start()
        try:
            with contextlib.closing(Store(create_engine(_parse(url)))) as store:
                migrate(store.engine, next_version)
                after = older.written
                for _ in itertools.takewhile(lambda _: writer.is_alive(), range(200)):
                    if older.written >= after + 10:
                        break
                    stop.wait(0.1)
                stop.set()
                writer.join(20)
                assert older.written >= after + 10, problems
                assert set(problems) <= {"LockNotAvailable", "DeadlockDetected"}
                check(store, older)
        finally:
            stop.set()
            writer.join(20)
            older.engine.dispose()
