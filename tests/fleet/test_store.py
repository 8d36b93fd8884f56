"""The store: its tables, the audit log that nobody can change, and what an open one keeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store, open_store, sqlite_url
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.migration import alembic_config
from edgekit_fleet.store.migrations import find_newest_revision
from edgekit_fleet.store.tables import Table
from edgekit_runtime.errors import ConfigError, OutputError


def test_first_open_makes_the_tables_of_the_code(store: Store):
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []


def test_newest_revision_is_that_of_the_last_migration() -> None:
    assert find_newest_revision() == ScriptDirectory.from_config(alembic_config()).get_current_head()


def test_open_store_that_is_there_imports_no_alembic(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "fleet.db")
    open_store(url).close()
    program = f"""if True:
        import sys
        from edgekit_fleet.store.database import open_store
        open_store({url!r}).close()
        sys.exit("alembic" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_second_open_keeps_what_is_there(store_url: str):
    first = open_store(store_url)
    with first.transaction() as session:
        audit.record(session, "ann", "device.revoke", "d1", why="lost")
    first.close()
    second = open_store(store_url)
    with second.transaction() as session:
        assert audit.find_break(session) is None
        assert session.execute(text("SELECT count(*) FROM audit")).scalar() == 1
    second.close()


def test_store_of_a_newer_edgekit_is_refused(store_url: str):
    store = open_store(store_url)
    with store.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'v9999'"))
    store.close()
    with pytest.raises(ConfigError, match="newer edgekit"):
        open_store(store_url)


def test_unknown_database_is_refused():
    with pytest.raises(ConfigError, match="expected sqlite"):
        open_store("nothing")


def test_password_of_a_database_is_in_no_message():
    url = "postgresql://ann:tea-time@127.0.0.1:1/fleet?password=tea-time&connect_timeout=1"
    with pytest.raises(OutputError, match="cannot open the store") as found:
        open_store(url)
    assert "tea-time" not in str(found.value)
    with pytest.raises(ConfigError, match="expected sqlite") as found:
        open_store(url.replace("postgresql:", "postgresqls:"))
    assert "tea-time" not in str(found.value)


@pytest.mark.parametrize("change", ["UPDATE audit SET actor = 'eve'", "DELETE FROM audit"])
def test_change_of_the_audit_log_is_refused(store: Store, change: str):
    with store.transaction() as session:
        audit.record(session, "ann", "device.revoke", "d1")
    with pytest.raises(DBAPIError, match="append-only"), store.engine.begin() as connection:
        connection.execute(text(change))


def test_changed_entry_breaks_the_chain(store: Store):
    with store.transaction() as session:
        for number in range(5):
            audit.record(session, "ann", "tag", f"d{number}", site="lyon", load=0.25)
    with store.engine.begin() as connection:
        is_remote = store.engine.dialect.name == "postgresql"
        trigger = "audit_append_only ON audit" if is_remote else "audit_no_update"
        connection.execute(text(f"DROP TRIGGER {trigger}"))
        connection.execute(text("UPDATE audit SET subject = 'other' WHERE number = 3"))
    with store.transaction() as session:
        assert audit.find_break(session) == 3


def test_failed_change_leaves_no_entry(store: Store):
    with pytest.raises(RuntimeError), store.transaction() as session:
        audit.record(session, "ann", "tag", "d1")
        raise RuntimeError
    with store.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM audit")).scalar() == 0


def test_only_the_owner_reads_a_store_also_in_a_folder_of_a_lax_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = FleetFolder(tmp_path / "fleet")
        folder.write_settings(FleetSettings())
        store = folder.open_store()
        with store.transaction() as session:
            audit.record(session, "test", "device.tag", "d1")
        modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("fleet.db", "fleet.db-wal", "fleet.db-shm", "fleet.json"), 0o600)


def test_store_that_others_could_read_is_closed_to_them(tmp_path):
    folder = FleetFolder(tmp_path / "fleet")
    folder.write_settings(FleetSettings())
    folder.database.chmod(0o644)
    folder.open_store().close()
    assert folder.database.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "act", [FleetFolder.read_settings, lambda folder: folder.write_settings(FleetSettings())]
)
def test_folder_that_others_may_read_is_refused_with_the_command_that_closes_it(tmp_path, act):
    folder = FleetFolder(tmp_path / "my fleet")
    folder.write_settings(FleetSettings())
    folder.path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"chmod 700 '.*my fleet'"):
        act(folder)
    subprocess.run(["chmod", "700", folder.path], check=True)
    act(folder)
