"""A database and brokers elsewhere: several addresses, restarts, lost connections, writers at once."""

import signal
import threading

import pytest
from sqlalchemy import text

from edgekit_fleet.broker.mosquitto import list_brokers
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import open_store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_runtime.errors import ConfigError, OutputError


def test_url_with_several_hosts_finds_the_one_that_answers(postgresql, postgresql_url):
    dead = postgresql_url.replace("@", "@127.0.0.1:1,", 1) + "?target_session_attrs=read-write"
    store = open_store(dead)
    with store.transaction() as session:
        assert session.execute(text("SELECT 1")).scalar() == 1
    password = postgresql_url.split(":")[2].split("@")[0]
    assert password not in store.name
    store.close()


def test_store_is_used_again_after_a_crash_of_its_server(postgresql, postgresql_url):
    store = open_store(postgresql_url)
    with store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d1")
    with pytest.raises(OutputError), store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d2")
        postgresql.stop(signal.SIGKILL)
    with pytest.raises(OutputError), store.transaction() as session:
        audit.record(session, "ann", "device.tag", "d3")
    postgresql.start()
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
