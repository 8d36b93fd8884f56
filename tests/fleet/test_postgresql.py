"""A database and brokers elsewhere: several addresses, restarts, lost connections, writers at once."""

import contextlib
import signal
import threading

import pytest
from sqlalchemy import String, cast, func, select, text
from tests.fleet.filled_store import fill_store
from tests.fleet.postgresql_server import PostgresqlServer

from edgekit_fleet.access import tokens, users
from edgekit_fleet.api.repeats import KeyedRequest, begin_request
from edgekit_fleet.broker.mosquitto import list_brokers
from edgekit_fleet.identity.authority import open_authority
from edgekit_fleet.operations import records, samples, saved, webhooks
from edgekit_fleet.releases.repository import open_repository
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import open_store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import (
    SHARDS,
    AuditRow,
    ContentKeyRow,
    DeviceLogRow,
    DeviceRow,
    FailureRow,
    SampleRow,
    SecondFactorRow,
    Table,
)
from edgekit_runtime.errors import ConfigError, OutputError


def test_url_with_several_hosts_finds_the_one_that_answers(postgresql, postgresql_url):
    dead = postgresql_url.replace("@", "@127.0.0.1:1,", 1) + "?target_session_attrs=read-write"
    store = open_store(dead)
    with store.transaction() as session:
        assert session.execute(text("SELECT 1")).scalar() == 1
    password = postgresql_url.split(":")[2].split("@")[0]
    assert password not in store.name
    store.close()


@pytest.fixture
def own_server():
    """A server that a test may stop."""
    pytest.importorskip("psycopg")
    with PostgresqlServer() as server:
        yield server


def test_store_is_used_again_after_a_crash_of_its_server(own_server):
    store = open_store(own_server.url())
    with store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d1")
    with pytest.raises(OutputError), store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d2")
        own_server.stop(signal.SIGKILL)
    with pytest.raises(OutputError), store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d3")
    own_server.start()
    with store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d4")
    with store.transaction() as session:
        assert session.execute(text("SELECT subject FROM audit ORDER BY number")).scalars().all() == [
            "d1",
            "d4",
        ]
        assert audit.find_break(session) is None
    store.close()


def test_writers_at_once_leave_one_chain(postgresql_url):
    store = open_store(postgresql_url)

    def write(name):
        for number in range(25):
            with store.transaction() as session:
                audit.record(session, name, "device.tag", f"d{number}")

    writers = [threading.Thread(target=write, args=(f"writer {number}",)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with store.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM audit")).scalar() == 100
        assert audit.find_break(session) is None
    store.close()


@pytest.mark.parametrize("address", ["broker", "mqtt://broker:1883", "broker:0", "broker:port"])
def test_malformed_broker_is_refused(address):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        FleetSettings(brokers=(address,))


def test_settings_keep_brokers_and_database(tmp_path):
    folder = FleetFolder(tmp_path)
    settings = FleetSettings(brokers=("a.example:8883", "[::1]:8884"), store_url="postgresql://u@h/d")
    folder.write_settings(settings)
    assert folder.read_settings() == settings
    assert list_brokers(settings) == (("a.example", 8883), ("::1", 8884))


@pytest.fixture
def full(tmp_path):
    """The folder of a fleet on SQLite with rows in every table that a fleet fills."""
    folder, settings = FleetFolder(tmp_path / "old"), FleetSettings()
    folder.write_settings(settings)
    open_authority(folder, settings)
    open_repository(folder).create(1_700_000_000.0)
    store = folder.open_store()
    fill_store(store, 60)
    with store.transaction() as session:
        users.add_user(session, "ann", "correct horse battery", "admin", actor="root")
        tokens.add_token(session, "ci", ["read"], actor="ann")
        session.add(FailureRow(key_sha256="0" * 64, begun_at=1.5, count=3))
        session.add(ContentKeyRow(key_id="0" * 32, content_key=bytes(range(32)), created_at=1.5))
        factor = SecondFactorRow(user="ann", secret="0" * 32, is_confirmed=True, recovery_sha256=["1" * 64])
        session.add(factor)
        session.execute(text("UPDATE devices SET reported = 'null' WHERE name = 'd1' OR reported IS NULL"))
        session.execute(text("UPDATE shards SET epoch = number * 3"))
        name = session.scalars(select(DeviceRow.name).limit(1)).one()
        audit.record(session, "ann", "device.tag", name, tags={"käse": "\u2603 \0"}, share=0.1)
        session.execute(
            text("UPDATE devices SET reported = NULL, sequence = :n WHERE name = :d"),
            {"n": 1 << 40, "d": name},
        )
    begin_request(store, KeyedRequest("token:ci", "k", "0" * 64), 5.0)
    webhooks.add_webhook(store, "chat", "https://chat.example/", [], actor="ann")
    saved.save_query(store, "mine", "class=rpi5", "ann")
    saved.save_window(store, "night", "01:00-04:00", "ann")
    samples.switch(store, SampleVault(folder, settings), is_on=True, actor="ann")
    triggers = samples.parse_triggers("random")
    request = samples.StartSamples(model="detector", selector="all", triggers=triggers)
    order = samples.start(store, request, actor="ann")
    with store.transaction() as session:
        session.add(
            DeviceLogRow(device=name, request="r1", lines=5, asked_at=1.5, asked_by="ann", answered_at=None)
        )
        session.add(
            SampleRow(
                id="0" * 32,
                device=name,
                order=order.id,
                model="detector",
                version="1.4.0",
                triggers=" random ",
                probability=0.1,
                media_type="image/jpeg",
                size_bytes=9,
                taken_at=1.5,
                received_at=2.5,
            )
        )
    store.close()
    return folder


def read_all(store):
    """Return table -> its rows as text; JSON as it is stored."""
    with store.snapshot() as session:
        found = {}
        for table in Table.metadata.sorted_tables:
            columns = [cast(each, String) if str(each.type) == "JSON" else each for each in table.columns]
            found[table.name] = sorted(map(repr, session.execute(select(*columns)).all()))
    return found


def test_store_moves_from_sqlite_to_postgresql_with_every_row(full, postgresql_url, tmp_path):
    records.back_up(full, tmp_path / "fleet.backup")
    new = FleetFolder(tmp_path / "new")
    records.restore(new, tmp_path / "fleet.backup", postgresql_url)
    assert new.read_settings() == FleetSettings(store_url=postgresql_url)
    assert not new.database.exists()
    with contextlib.closing(full.open_store()) as before, contextlib.closing(new.open_store()) as after:
        rows, moved = read_all(before), read_all(after)
        with after.transaction() as session:
            assert audit.find_break(session) is None
            newest = session.scalars(select(AuditRow).order_by(AuditRow.number.desc())).first()
            assert (newest.action, newest.number) == ("fleet.restore", len(rows["audit"]) + 1)
            audit.record(session, "ann", "device.tag", "d1")
    told = [each for each in moved["audit"] if each not in rows["audit"]]
    moved["audit"] = [each for each in moved["audit"] if each not in told]
    empty = {name for name, each in rows.items() if not each}
    rows.pop("managers"), moved.pop("managers")
    assert moved == rows
    assert empty <= {
        "managers",
        "logins",
        "known_addresses",
        "enrolment_codes",
        "rollouts",
        "rollout_members",
    }


def test_store_is_not_moved_into_one_that_holds_a_fleet(full, postgresql_url, tmp_path):
    other = open_store(postgresql_url)
    with other.transaction() as session:
        audit.record(session, "ann", "device.tag", "d1")
    records.back_up(full, tmp_path / "fleet.backup")
    new = FleetFolder(tmp_path / "new")
    with pytest.raises(ConfigError, match="holds a fleet already"):
        records.restore(new, tmp_path / "fleet.backup", postgresql_url)
    assert not new.path.exists()
    with other.snapshot() as session:
        assert session.scalar(select(func.count()).select_from(DeviceRow)) == 0
        assert session.scalar(text("SELECT count(*) FROM shards")) == SHARDS
    other.close()


def test_store_whose_audit_log_was_changed_is_not_moved(full, postgresql_url, tmp_path):
    store = full.open_store()
    with store.transaction() as session:
        session.execute(text("DROP TRIGGER audit_no_update"))
        session.execute(text("UPDATE audit SET actor = 'eve' WHERE number = 2"))
    store.close()
    records.back_up(full, tmp_path / "fleet.backup")
    with pytest.raises(ConfigError, match="broken at entry 2"):
        records.restore(FleetFolder(tmp_path / "new"), tmp_path / "fleet.backup", postgresql_url)


def test_store_is_moved_to_postgresql_only(full, tmp_path):
    records.back_up(full, tmp_path / "fleet.backup")
    with pytest.raises(ConfigError, match="expected postgresql://"):
        records.restore(FleetFolder(tmp_path / "new"), tmp_path / "fleet.backup", "sqlite:///new.db")
