"""Two managers on one PostgreSQL and one broker: each serves its devices, and one of them all if need be."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from sqlalchemy import delete, select, text
from tests.fleet.conftest import Fleet
from tests.fleet.console.conftest import PASSWORD, Client
from tests.fleet.fleet_device import eventually
from tests.fleet.test_manager import versions, want
from tests.fork_server import host_server
from tests.free_port import free_port

from edgekit_fleet.access import tokens, users
from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.operations import records, running
from edgekit_fleet.operations.releases import rotate_keys
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import SHARDS, shard_of
from edgekit_fleet.store.tables import ManagerRow
from edgekit_runtime.errors import ConfigError, FleetError
from edgekit_runtime.system.child_process import child_environment


class Joining(Fleet):
    """A further manager in this process."""

    joins = True


@pytest.fixture
def shared(tmp_path, mosquitto, postgresql_url):
    """A folder, settings with a database and a broker that run elsewhere, and that broker."""
    folder = FleetFolder(tmp_path / "fleet")
    port = free_port()
    settings = FleetSettings(broker_port=port, web_port=free_port(), store_url=postgresql_url)
    settings = replace(settings, brokers=(f"127.0.0.1:{port}",))
    folder.write_settings(settings)
    authority = running.open_authority(folder, settings)
    TufRepository(folder.repository, folder.repository_keys).create(time.time())
    with Mosquitto(write_configuration(folder, settings, authority), settings, authority) as broker:
        yield folder, settings, broker


def copy_of(folder):
    """Return the folder of a further manager, as on another machine."""
    return FleetFolder(shutil.copytree(folder.path, folder.path.with_name("second")))


@pytest.fixture
def two(shared):
    folder, settings, _ = shared
    with Fleet(folder, settings).up() as first, contextlib.ExitStack() as second:
        other = second.enter_context(Joining(copy_of(folder), settings).up())
        yield first, other, second.close


async def is_shared(*managers):
    await eventually(lambda: all(len(one.loop.shards.epochs) == SHARDS // 2 for one in managers))


def test_device_gets_its_documents_from_whoever_has_its_shard(two):
    first, second, end_second = two

    async def run():
        await is_shared(first, second)
        names = [f"d{number}" for number in range(8)]
        assert {shard_of(name) in first.loop.shards.epochs for name in names} == {True, False}
        devices = [first.device(name).enrol() for name in names]
        assert devices[0].enrolment.brokers == first.settings.brokers
        for device in devices:
            await device.connect()
        await eventually(lambda: all(device.desired for device in devices))
        want_all(first, names, "7")
        await eventually(lambda: all(versions(device)[-1] == ["7"] for device in devices))
        end_second()
        await eventually(lambda: first.loop.shards.is_complete)
        want_all(first, names, "8")
        await eventually(lambda: all(versions(device)[-1] == ["8"] for device in devices))
        for device in devices:
            device.report(status="converged")
        await eventually(lambda: all(first.detail(name).summary.status == "converged" for name in names))
        for device in devices:
            await device.disconnect()

    asyncio.run(run())


def test_manager_that_was_taken_for_dead_joins_anew(two):
    first, second, _ = two

    def holders():
        with first.store.snapshot() as session:
            return set(session.scalars(select(ManagerRow.holder)))

    async def run():
        await is_shared(first, second)
        before = holders()
        number = second.loop.shards.number
        with first.store.transaction() as session:
            session.execute(delete(ManagerRow).where(ManagerRow.number == number))
        await eventually(lambda: len(holders()) == 2 and holders() != before)
        await is_shared(first, second)

    asyncio.run(run())


def test_tables_that_grow_do_not_disturb_managers_of_the_version_before(two):
    first, second, _ = two

    async def run():
        device = first.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        with first.store.engine.begin() as connection:
            connection.execute(text("ALTER TABLE devices ADD COLUMN colour varchar NOT NULL DEFAULT ''"))
            connection.execute(text("CREATE INDEX ix_devices_colour ON devices (colour)"))
        want(first, "d1", "9")
        device.report(status="working", because="on the way")
        await eventually(lambda: versions(device)[-1] == ["9"])
        await eventually(lambda: second.detail("d1").summary.status == "working")
        await device.disconnect()

    asyncio.run(run())


def test_manager_whose_broker_is_gone_ends_when_it_is_told_to(shared):
    folder, settings, broker = shared
    for wait_s in (0.8, 1.3):
        with Joining(folder, settings).up() as fleet:
            broker.__exit__(None, None, None)
            time.sleep(wait_s)
        assert not fleet.thread.is_alive()
        broker._start()


def want_all(fleet, names, version):
    for name in names:
        want(fleet, name, version)


def test_join_without_a_shared_database_is_refused(tmp_path):
    folder = FleetFolder(tmp_path / "fleet")
    folder.write_settings(FleetSettings())
    with pytest.raises(ConfigError, match="--database"), running.start(folder, FleetSettings(), joins=True):
        pass


def test_manager_that_joins_in_the_first_ones_folder_leaves_it_as_it_is(shared):
    folder, settings, _ = shared
    with Fleet(folder, settings).up(), Joining(folder, replace(settings, console_port=free_port())).up():
        folder.check_repository()
        assert folder.read_settings() == settings
    with Fleet(folder, settings).up():
        folder.check_repository()


def test_copy_for_a_further_manager_starts_with_join_only(shared):
    folder, settings, _ = shared
    copy = copy_of(folder)
    with Joining(copy, settings).up(), pytest.raises(FleetError, match="has joined a fleet"):
        copy.check_repository()
    with pytest.raises(ConfigError, match="start it with --join"), running.start(copy, settings):
        pass
    with Joining(copy, settings).up():
        pass


def test_backup_of_a_fleet_with_its_own_database_holds_the_folder(two, tmp_path, postgresql):
    """pg_dump is the other half; a further machine gets the folder like this."""
    first, _, end_second = two
    first.device("d1").enrol()
    database = first.settings.store_url.rpartition("/")[2]
    url = ["-h", "127.0.0.1", "-p", str(postgresql.port), "-U", "edgekit"]
    dump = postgresql.run("pg_dump", "--format=custom", *url, database)
    records.back_up(first.folder, tmp_path / "fleet.backup")
    first.device("d2").enrol()
    end_second()
    restored = FleetFolder(tmp_path / "restored")
    records.restore(restored, tmp_path / "fleet.backup")
    assert restored.read_settings() == first.settings
    postgresql.sql("CREATE DATABASE restored_fleet")
    elsewhere = FleetFolder(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="the database holds no fleet"):
        records.restore(elsewhere, tmp_path / "fleet.backup", postgresql.url("restored_fleet"))
    assert not elsewhere.path.exists()
    postgresql.sql("DROP DATABASE restored_fleet")
    postgresql.sql("CREATE DATABASE restored_fleet")
    postgresql.run("pg_restore", "--no-owner", "-d", "restored_fleet", *url, data=dump)
    names = "SELECT string_agg(name, ',') FROM devices"
    assert postgresql.sql(names, "restored_fleet") == "d1"
    records.restore(elsewhere, tmp_path / "fleet.backup", postgresql.url("restored_fleet"))
    assert elsewhere.read_settings().store_url == postgresql.url("restored_fleet")
    postgresql.sql("DROP DATABASE restored_fleet")


@contextlib.contextmanager
def served(folder, *options):
    """Yield process and port of the console of a manager."""
    port = free_port()
    command = [sys.executable, "-m", "edgekit_cli", "fleet", "up", "--json", "--console-port", str(port)]
    process = host_server().popen(
        [*command, "--folder", str(folder.path), *options],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        assert json.loads(line)["console"].endswith(f":{port}")
        yield process, port
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def ask(port, token, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    own = {"authorization": f"Bearer {token}", "content-type": "application/json", **headers}
    connection.request(method, f"/api/v1{path}", None if body is None else json.dumps(body), own)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def test_every_manager_serves_console_and_interface(shared):
    folder = shared[0]
    with served(folder) as (process, first), served(copy_of(folder), "--join") as (_, second):
        with contextlib.closing(folder.open_store()) as store, store.transaction() as session:
            users.add_user(session, "maria", PASSWORD, "admin", actor="test")
            token = tokens.add_token(session, "ci", ["admin", "read", "release"], actor="test")
        one = Client(first, host="fleet.example:8443")
        csrf = one.get("/login").text.partition('name="csrf" value="')[2].partition('"')[0]
        assert one.post("/login", name="maria", password=PASSWORD, csrf=csrf).status == 303
        other = Client(second, one.cookies, host=one.host)
        csrf = one.get("/").text.partition('name="csrf" value="')[2].partition('"')[0]
        assert other.post("/queries", name="mine", selector="class=rpi5", next="/", csrf=csrf).status == 303
        assert "mine" in one.get("/devices").text

        request = {"name": "made-once", "scopes": ["read"]}
        answers = [
            ask(port, token, "POST", "/tokens", request, **{"idempotency-key": "k1"})[0]
            for port in (first, second, first)
        ]
        assert answers == [201, 409, 409]

        status, problem = ask(second, token, "POST", "/releases", {"packages": ["0" * 64]})
        assert (status, "has joined a fleet" in problem["detail"]) == (409, True)

        process.kill()
        process.wait(20)
        assert other.get("/devices").status == 200
        assert other.post("/queries/remove", name="mine", next="/").status == 303
        assert ask(second, token, "GET", "/tokens")[0] == 200
        assert other.post("/logout").status == 303
        assert other.get("/devices").status == 303


def test_managers_key_is_not_exchanged_while_another_manager_has_a_copy(two):
    first, _other, stop = two
    with pytest.raises(FleetError, match="stop the further ones"):
        rotate_keys(first.folder, first.store, ("manager",), actor="test")
    stop()
    rotate_keys(first.folder, first.store, ("manager",), actor="test")


def test_managers_key_is_not_exchanged_beside_a_joined_manager_alone(shared):
    folder, settings, _ = shared
    with contextlib.closing(folder.open_store()) as store:
        with Joining(copy_of(folder), settings).up(), pytest.raises(FleetError, match="1 further"):
            rotate_keys(folder, store, ("manager",), actor="test")
        with store.transaction() as session:
            session.add_all(
                ManagerRow(number=each, holder=f"dead-{each}", heartbeat_at=time.time() - 60.0, turned_at=0.0)
                for each in range(2)
            )
        rotate_keys(folder, store, ("manager",), actor="test")


def test_manager_with_a_copy_from_before_the_exchange_does_not_start(shared):
    folder, settings, _ = shared
    copy = copy_of(folder)
    with contextlib.closing(folder.open_store()) as store:
        rotate_keys(folder, store, ("manager",), actor="test")
        rotate_keys(folder, store, ("timestamp",), actor="test")
    with (
        pytest.raises(ConfigError, match="of root 1, and was exchanged by root 2"),
        Joining(copy, settings).up(),
    ):
        pass
    with Fleet(folder, settings).up() as fleet:
        assert fleet.failure is None
