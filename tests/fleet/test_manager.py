"""A real broker, a real web server and a real manager; devices that behave, and devices that do not."""

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from gmqtt.mqtt.handler import MQTTConnectError
from sqlalchemy import delete, select, update
from tests.fleet.conftest import Fleet
from tests.fleet.fleet_device import eventually, make_csr, post
from tests.free_port import free_port
from tests.waiting import wait_for

from edgekit_fleet.access.tokens import add_token, list_tokens
from edgekit_fleet.manager import control_loop, inbox
from edgekit_fleet.operations import devices, running
from edgekit_fleet.operations.webhooks import add_webhook, list_webhooks
from edgekit_fleet.releases.repository import NewTarget, TufRepository, open_repository
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import LEASE_S, Shards
from edgekit_fleet.store.tables import (
    AuditRow,
    DesiredRow,
    DeviceRow,
    FigureRow,
    ManagerRow,
    ReleasePackageRow,
    ReleaseRow,
    WantedModelRow,
)
from edgekit_runtime.agent.documents import DesiredModel, Event, Hello
from edgekit_runtime.agent.signing import key_id, seal
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import ConfigError, OutputError, UnavailableError


def want(fleet, device, version):
    model = DesiredModel(
        model="eyes",
        version=version,
        manifest_sha256=version * 8,
        path=f"x86-64/eyes-{version}",
        size_bytes=10,
        sha256="0" * 64,
        execution=f"{device}-{version}",
        release="r",
        rollout="r1",
    )
    with fleet.store.transaction() as session:
        session.merge(
            WantedModelRow(
                device=device, model="eyes", rollout="r1", document=to_plain(model), is_removed=False
            )
        )
        mark_due(session, [device])


def actions(fleet, subject):
    with fleet.store.transaction() as session:
        return list(session.scalars(select(AuditRow.action).where(AuditRow.subject == subject)))


def is_due(fleet, device):
    with fleet.store.transaction() as session:
        return session.get(DesiredRow, device).is_due


def versions(device):
    return [[model.version for model in document.models] for document in device.desired]


@pytest.mark.parametrize("promises_will", [True, False])
def test_enrolled_device_gets_its_document_and_its_report_is_kept(fleet, promises_will):
    async def run():
        device = fleet.device("d1", tags={"site": "lyon"}).enrol()
        await device.connect(promises_will=promises_will)
        await eventually(lambda: device.desired)
        want(fleet, "d1", "7")
        await eventually(lambda: versions(device)[-1] == ["7"])
        assert device.desired[-1].version == device.desired[0].version + 1
        device.report(status="working", because="on the way")
        await eventually(lambda: fleet.detail("d1").summary.status == "working")
        assert fleet.detail("d1").summary.is_online
        device.drop()
        await eventually(lambda: not fleet.detail("d1").summary.is_online)

    asyncio.run(run())


def test_figures_of_over_a_week_ago_are_deleted(fleet_settings):
    hour = int(time.time() // 3600)
    hours = (hour - 24 * 8, hour - 24 * 6, hour)
    with Fleet(*fleet_settings).up() as fleet:
        fleet.device("d1").enrol()
        with fleet.store.transaction() as session:
            places = {"device": "d1", "model": "eyes", "version": "1", "figures": {}, "reported_at": 0.0}
            session.add_all([FigureRow(hour=each, **places) for each in hours])
    with Fleet(*fleet_settings).up() as fleet:

        def kept():
            with fleet.store.snapshot() as session:
                return sorted(session.scalars(select(FigureRow.hour)))

        asyncio.run(eventually(lambda: kept() == list(hours[1:])))


def withdraw_in_the_store(fleet, published, at):
    row = {"model": "digits", "target": "x86-64", "version": "2", "manifest_sha256": "0" * 64}
    with fleet.store.transaction() as session:
        session.add(ReleaseRow(name="r", created_at=at, withdrawn_at=at))
        session.flush()
        session.add(
            ReleasePackageRow(release="r", path=published.path, size_bytes=1, sha256=published.sha256, **row)
        )


def test_files_that_no_metadata_names_are_deleted_by_the_manager(fleet_settings):
    folder, _ = fleet_settings
    with Fleet(*fleet_settings).up():
        pass
    left = folder.repository / "targets" / "x86-64" / f"{'0' * 64}.digits-1.edgepkg"
    left.parent.mkdir()
    left.write_bytes(b"of a process that was killed")
    os.utime(left, (time.time() - 2 * 86_400.0,) * 2)
    target = NewTarget(device_class="x86-64", name="digits-2.edgepkg", source=left)
    repository = open_repository(folder)
    (published,) = repository.publish([target], time.time())
    with Fleet(*fleet_settings).up() as fleet:
        asyncio.run(eventually(lambda: not left.exists()))
        withdraw_in_the_store(fleet, published, time.time() - 2 * 86_400.0)
    with Fleet(*fleet_settings).up() as fleet:
        asyncio.run(eventually(lambda: repository.list_targets() == {}))
        assert fleet.failure is None


def test_manager_serves_its_devices_while_it_cleans_and_a_rejoin_cleans_no_more(fleet_settings, monkeypatch):
    cleaned, may_end = [], threading.Event()
    monkeypatch.setattr(
        TufRepository, "remove_unused", lambda *_: cleaned.append(1) or (may_end.wait(60) and 0)
    )
    with Fleet(*fleet_settings).up() as fleet:

        async def run():
            await eventually(lambda: cleaned)
            turned_at, holder = fleet.loop._turned_at, fleet.loop.shards._holder
            device = fleet.device("d1").enrol()
            await device.connect()
            await eventually(lambda: device.desired and fleet.loop._turned_at > turned_at)
            may_end.set()
            with fleet.store.transaction() as session:
                session.execute(delete(ManagerRow))
            await eventually(
                lambda: fleet.loop.shards._holder != holder and fleet.loop._repository._refreshed_at > 0
            )
            await eventually(fleet.loop._repository._task.done)
            assert cleaned == [1]
            await device.disconnect()

        try:
            asyncio.run(run())
        finally:
            may_end.set()


def test_fleet_on_an_ipv6_address_serves_its_devices(tmp_path, mosquitto):
    settings = FleetSettings(host="::1", names=("::1",), broker_port=free_port(), web_port=free_port())
    with Fleet(FleetFolder(tmp_path / "fleet"), settings).up() as fleet:

        async def run():
            device = fleet.device("d1").enrol()
            assert device.enrolment.brokers == (f"[::1]:{settings.broker_port}",)
            await device.connect()
            await eventually(lambda: device.desired)
            await device.disconnect()

        asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"names": ("[::1]",)}, "name '[::1]': expected a DNS name or an address, without port or brackets"),
        ({"names": ("fleet.example:8443",)}, "name 'fleet.example:8443': expected"),
        ({"host": "[::1]"}, "host is '[::1]', expected an address such as 0.0.0.0 or ::1"),
    ],
)
def test_address_that_no_device_could_use_is_refused(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        FleetSettings(**settings)


def test_fleet_whose_devices_would_be_sent_elsewhere_is_refused(tmp_path):
    settings = FleetSettings(host="::1")
    with (
        pytest.raises(ConfigError, match="name this machine with --name"),
        running.start(FleetFolder(tmp_path), settings),
    ):
        pass


def test_device_that_was_offline_gets_the_newest_document_at_hello(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        for version in ("1", "2", "3"):
            want(fleet, "d1", version)
        await asyncio.sleep(0.5)
        await device.connect()
        await eventually(lambda: device.desired and versions(device)[-1] == ["3"])
        await device.disconnect()

    asyncio.run(run())


def test_forged_replayed_and_foreign_documents_change_nothing(fleet):
    async def run():
        honest, thief = fleet.device("d1").enrol(), fleet.device("d2").enrol()
        await honest.connect()
        await thief.connect()
        await eventually(lambda: honest.desired and thief.desired)
        stated = honest.report(status="working", because="as it is")
        await eventually(lambda: fleet.detail("d1").summary.status == "working")
        # As a broker could: the manager's own rights, and no key of the device.
        put = fleet.loop.inbox.put
        refused = fleet.loop.inbox.refused
        lie = replace(stated, sequence=stated.sequence + 5, status="diverged")
        put("ek/v1/d/d1/reported", seal(lie, "reported", thief.key))
        await eventually(lambda: refused["forged"] == 1)
        put("ek/v1/d/d2/reported", seal(lie, "reported", thief.key))
        await eventually(lambda: refused["impersonated"] == 1)
        put("ek/v1/d/d1/reported", seal(stated, "reported", honest.key))
        await eventually(lambda: refused["replayed"] == 1)
        put("ek/v1/d/nobody/reported", seal(stated, "reported", honest.key))
        await eventually(lambda: refused["unknown"] == 1)
        put("ek/v1/d/d1/hello", seal(lie, "reported", honest.key))  # one kind for another
        await eventually(lambda: refused["forged"] == 2)
        thief.send("reported", replace(lie, device="d1"), to="d1")  # which the broker's ACL drops
        thief.report(status="converged")
        await eventually(lambda: fleet.detail("d2").summary.status == "converged")
        assert sum(refused.values()) == 5
        assert fleet.detail("d1").summary.status == "working"
        assert "alarm.forged" in actions(fleet, "d1")
        await honest.disconnect()
        await thief.disconnect()

    asyncio.run(run())


def test_device_that_states_too_many_events_is_named_in_the_audit_log(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        for number in range(13):
            device.sequence += 1
            text = f"number {number}"
            device.send("event", Event(device="d1", sequence=device.sequence, kind="a", text=text, at=0.0))
        await eventually(lambda: fleet.loop.inbox.refused["flood"] == 3)
        await eventually(lambda: "alarm.events" in actions(fleet, "d1"))
        found = actions(fleet, "d1")
        assert (found.count("device.event"), found.count("alarm.events")) == (10, 1)
        await device.disconnect()

    asyncio.run(run())


def test_alarm_of_events_counts_the_dropped_and_hides_no_other_alarm(tmp_path):
    key = Ed25519PrivateKey.generate()
    shards = Shards.of_all()
    index = inbox.DeviceIndex(shards)
    index.devices["d1"] = inbox.KnownDevice(
        name="d1",
        keys={key_id(key.public_key()): key.public_key()},
        is_revoked=False,
        sequence=0,
        hello_sequence=0,
        event_sequence=0,
        is_online=True,
        desired_held=0,
        desired_sent=0,
        last_seen_at=0.0,
    )
    taken = inbox.Inbox(index, shards)

    def state(numbers, now):
        for number in numbers:
            event = Event(device="d1", sequence=number, kind="a", text=f"number {number}", at=0.0)
            taken.put("ek/v1/d/d1/event", seal(event, "event", key))
        taken.take(now)

    state(range(1, 12), 1000.0)
    state(range(12, 16), 1001.0)
    taken.put("ek/v1/d/d1/event", b"forged")
    taken.put("ek/v1/d/d1/event", b"forged again")
    taken.take(1002.0)
    taken.take(1061.0)
    with contextlib.closing(open_store(sqlite_url(tmp_path / "fleet.db"))) as store:
        with store.transaction() as session:
            taken.write(session, 1061.0)
        with store.snapshot() as session:
            rows = session.scalars(select(AuditRow).where(AuditRow.action.startswith("alarm.")))
            found = [(row.action, row.detail.get("dropped")) for row in rows]
    assert found == [("alarm.events", 1), ("alarm.forged", None), ("alarm.events", 4)]


def test_device_that_a_restored_store_does_not_know_is_named_with_the_way_back(fleet):
    async def run():
        put, inbox = fleet.loop.inbox.put, fleet.loop.inbox
        for turn in (1, 2):
            put("ek/v1/d/newcomer/hello", b"by a certificate that the broker has checked")
            await eventually(lambda turn=turn: inbox.refused["unknown"] == turn)
        await eventually(lambda: actions(fleet, "manager").count("alarm.unknown") == 1)
        with fleet.store.snapshot() as session:
            (detail,) = session.scalars(select(AuditRow.detail).where(AuditRow.action == "alarm.unknown"))
        assert "newcomer has a certificate of this fleet" in detail["text"]
        assert "`edgekit fleet enroll --name newcomer`" in detail["text"]

    asyncio.run(run())


def test_device_that_floods_the_broker_is_silenced_and_others_are_heard(fleet, monkeypatch):
    monkeypatch.setattr(control_loop, "FLOOD", 100)

    async def run():
        hostile, other = fleet.device("d1").enrol(), fleet.device("d2").enrol()
        await hostile.connect()
        acl = fleet.folder.broker / "acl"
        while "user d1" not in acl.read_text():
            hostile.report(status="working")
            await asyncio.sleep(0)
        await asyncio.sleep(1.0)  # the broker reads the file, and passes on what it has taken
        accepted = fleet.loop.index.devices["d1"].sequence
        monkeypatch.setattr(inbox, "BURST", 1e9)
        hostile.report(status="diverged")
        await other.connect()
        await eventually(lambda: fleet.detail("d2").summary.is_online)
        other.report(status="working")
        await eventually(lambda: fleet.detail("d2").summary.status == "working")
        assert fleet.loop.index.devices["d1"].sequence == accepted

        def is_let_in():
            fleet.loop._silent_until.update(d1=0.0)
            return "user d1" not in acl.read_text()

        await eventually(is_let_in)

        def is_heard():
            hostile.report(status="diverged")
            return fleet.detail("d1").summary.status == "diverged"

        await eventually(is_heard)
        await hostile.disconnect()
        await other.disconnect()

    asyncio.run(run())


def test_silenced_device_is_heard_again_though_the_manager_has_joined_again(fleet, monkeypatch):
    monkeypatch.setattr(control_loop, "FLOOD", 1)
    monkeypatch.setattr(control_loop, "SILENT_S", 4.0)
    acl = fleet.folder.broker / "acl"
    fleet.device("d1").enrol()

    async def run():
        await eventually(lambda: "d1" in fleet.loop.index.devices)
        fleet.loop.index.devices["d1"].paid_until = float("inf")
        fleet.events.call_soon_threadsafe(fleet.loop.inbox.put, "ek/v1/d/d1/event", b"")
        await eventually(lambda: "user d1" in acl.read_text())
        holder = fleet.loop.shards._holder
        with fleet.store.transaction() as session:
            session.execute(delete(ManagerRow))
        await eventually(lambda: fleet.loop.shards._holder != holder)
        await eventually(lambda: "user d1" not in acl.read_text())

    asyncio.run(run())


def test_manager_that_skips_a_flood_goes_on_reading_at_once(fleet, monkeypatch):
    """While it waits, the broker's queue for it overflows."""
    fleet.device("d1").enrol()
    asyncio.run(eventually(lambda: "d1" in fleet.loop.index.devices))
    done, take, sleep = [], inbox.Inbox.take, control_loop.sleep_until

    def note_take(self, *arguments):
        done.append(self.skipped)
        return take(self, *arguments)

    async def note_sleep(stop, limit_s):
        done.append(limit_s)
        await sleep(stop, limit_s)

    def flood():
        fleet.loop.index.devices["d1"].paid_until = float("inf")
        for _ in range(control_loop._MESSAGES_A_TURN):
            fleet.loop.inbox.put("ek/v1/d/d1/event", b"")

    monkeypatch.setattr(inbox.Inbox, "take", note_take)
    monkeypatch.setattr(control_loop, "sleep_until", note_sleep)
    fleet.events.call_soon_threadsafe(flood)
    skipped = control_loop._MESSAGES_A_TURN
    asyncio.run(eventually(lambda: skipped in done[:-1]))
    assert done[done.index(skipped) + 1] == control_loop._READ_S


def test_late_last_will_of_an_old_connection_is_ignored(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        late = Hello(device="d1", sequence=device.sequence, online=False, runtime="0.1.0")
        await eventually(lambda: fleet.detail("d1").summary.is_online)
        await device.disconnect()
        await device.connect()
        await eventually(lambda: fleet.loop.index.devices["d1"].hello_sequence == device.sequence)
        fleet.loop.inbox.put("ek/v1/d/d1/hello", seal(late, "hello", device.key))
        await eventually(lambda: fleet.loop.inbox.refused["replayed"])
        assert fleet.detail("d1").summary.is_online
        await device.disconnect()

    asyncio.run(run())


def test_report_that_the_manager_lacks_is_asked_for_by_a_new_document(fleet, monkeypatch):
    monkeypatch.setattr(inbox, "REPORT_S", 0.5)

    async def run():
        device = fleet.device("d1").enrol()
        await device.connect(reported=device.sequence + 5)
        await eventually(lambda: len(device.desired) > 1)
        device.sequence += 5
        device.report(status="converged")
        await eventually(lambda: fleet.detail("d1").summary.status == "converged")
        await asyncio.sleep(1.0)
        sent = len(device.desired)
        await asyncio.sleep(3.0)
        assert len(device.desired) == sent
        await device.disconnect()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["d1", "authority"])
def test_revoked_device_is_disconnected_and_let_in_no_more(name, fleet):
    async def run():
        device = fleet.device(name).enrol()
        files = sorted(path.name for path in fleet.authority.folder.iterdir())
        other = fleet.device("d2").enrol()
        await device.connect()
        await other.connect()
        await eventually(lambda: device.desired and other.desired)
        devices.revoke(fleet.store, name, "test", "lost")
        await eventually(lambda: not device.client.is_connected)
        assert sorted(path.name for path in fleet.authority.folder.iterdir()) == files
        with pytest.raises((OSError, AssertionError, asyncio.TimeoutError, MQTTConnectError)):
            await device.connect()
        assert other.client.is_connected
        request = {"device": name, "csr": make_csr(device.key)}
        status, _ = post(device.code.address, device.authority, "/renew", request)
        assert status == 403
        await other.disconnect()

    asyncio.run(run())


def test_device_ahead_of_a_restored_store_gets_a_higher_number_and_an_alarm(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect(held=41)
        await eventually(lambda: any(document.version == 42 for document in device.desired))
        assert "alarm.restored" in actions(fleet, "d1")
        await device.disconnect()

    asyncio.run(run())


@pytest.mark.parametrize("said", ["hello", "reported"])
def test_device_that_numbers_its_documents_anew_is_told_the_highest_number(fleet, said):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        if said == "hello":
            device.sequence = 2_000_000
            await device.disconnect()
            await device.connect()
        device.sequence = 1_000_000 if said == "reported" else 3_000_000
        device.report(status="working")
        await eventually(lambda: fleet.detail("d1").summary.status == "working")
        highest = device.sequence
        await device.disconnect()
        device.desired.clear()
        device.sequence = 1 if said == "hello" else 500_000  # lost its journal, and its clock is wrong
        await device.connect(held=0)
        if said == "reported":
            await eventually(lambda: fleet.detail("d1").summary.is_online)
            device.report(status="converged")
        await eventually(lambda: any(document.sequence == highest for document in device.desired))
        device.sequence = highest
        await device.disconnect()
        await device.connect()
        device.report(status="converged")
        await eventually(lambda: fleet.detail("d1").summary.status == "converged")
        await device.disconnect()

    asyncio.run(run())


def test_manager_whose_clock_was_a_year_ahead_renews_what_it_wrote_then(fleet, monkeypatch):
    ahead_s = 365 * 86_400.0
    clock = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
    monkeypatch.setattr(control_loop, "time", clock)

    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired and device.desired[-1].issued_at > time.time() + 1e6)
        device.report(status="working")
        await eventually(lambda: fleet.detail("d1").summary.status == "working")
        nonlocal ahead_s
        ahead_s = 0.0
        await eventually(lambda: device.desired[-1].issued_at < time.time())
        assert device.desired[-1].version > device.desired[0].version
        assert device.desired[-1].epoch > device.desired[0].epoch
        with fleet.store.transaction() as session:
            assert session.get(DeviceRow, "d1").last_seen_at <= time.time()
            said = session.scalars(select(AuditRow.detail).where(AuditRow.action == "alarm.clock")).all()
        assert [round(one["ahead_s"], -5) for one in said] == [31_500_000]
        device.report(status="converged")
        await eventually(lambda: fleet.detail("d1").summary.status == "converged")
        await device.disconnect()

    asyncio.run(run())


def test_lost_retained_message_follows_at_hello(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        await device.disconnect()
        # What a broker does that drops retained messages:
        fleet.events.call_soon_threadsafe(lambda: fleet.loop._link.publish("d1", "desired", b"", retain=True))
        await asyncio.sleep(0.3)
        device.desired.clear()
        await device.connect(held=0)
        await eventually(lambda: device.desired)
        await device.disconnect()

    asyncio.run(run())


def test_broker_that_dies_comes_back_and_devices_are_served(fleet):
    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        os.kill(fleet.fleet.broker.pid, signal.SIGKILL)
        await eventually(lambda: not device.client.is_connected)
        await eventually(lambda: fleet.loop._link.connections == 2)
        want(fleet, "d1", "9")
        await device.connect()
        await eventually(lambda: versions(device)[-1] == ["9"])
        await device.disconnect()

    asyncio.run(run())


def test_unchanged_wish_writes_no_document(fleet):
    async def run():
        fleet.device("d1").enrol()
        want(fleet, "d1", "1")
        await eventually(lambda: not is_due(fleet, "d1"))
        sent = fleet.detail("d1").desired_sent
        with fleet.store.transaction() as session:
            mark_due(session, ["d1"])
        await eventually(lambda: not is_due(fleet, "d1"))
        assert fleet.detail("d1").desired_sent == sent

    asyncio.run(run())


def test_second_manager_is_refused_while_the_first_one_runs(fleet):
    with fleet.store.transaction() as session, pytest.raises(UnavailableError, match="in charge"):
        Shards().join(session, time.time())


def test_manager_that_was_replaced_stops(fleet):
    with fleet.store.transaction() as session:
        Shards().join(session, time.time() + 2 * LEASE_S)
        session.execute(update(ManagerRow).values(heartbeat_at=time.time()))
    limit = time.monotonic() + 10
    while fleet.failure is None and time.monotonic() < limit:
        time.sleep(0.05)
    assert isinstance(fleet.failure, UnavailableError)


def test_turn_that_failed_after_a_balance_is_done_again(fleet, monkeypatch):
    """A restart of the database may fall into a balance, and the next one into the turn after it."""
    loop, moments = fleet.loop, []
    balance, write = loop.shards.balance, loop.inbox.write

    def fail_balance_once(*arguments, **options):
        if moments == ["begin"]:
            moments.append("balance failed")
            loop.inbox.put("ek/v1/d/d1/event", event)
            raise OutputError("the database was stopped")
        return balance(*arguments, **options)

    def fail_write_once(*arguments):
        has_ended = write(*arguments)
        if moments[-1:] == ["balance failed"] and not loop.inbox.is_empty:
            moments.append("turn failed")
            raise OutputError("the database was stopped again")
        return has_ended

    device = fleet.device("d1").enrol()
    event = Event(device="d1", sequence=1, kind="fallback", text="once", at=0.0)
    event = seal(event, "event", device.key)
    monkeypatch.setattr(loop.shards, "balance", fail_balance_once)
    monkeypatch.setattr(loop.inbox, "write", fail_write_once)
    moments.append("begin")

    async def run():
        await eventually(lambda: moments[-1] == "turn failed")
        await eventually(lambda: actions(fleet, "d1").count("device.event") == 1)

    asyncio.run(run())


def test_turns_whose_commits_were_not_confirmed_count_once(fleet, monkeypatch):
    real, lost = fleet.store.concurrent_transaction, []

    @contextlib.contextmanager
    def lose_answers():
        with real() as session:
            yield session
        if 0 < len(lost) < 6:
            lost.append("answer")
            raise OutputError("the answer to COMMIT was lost")

    monkeypatch.setattr(fleet.store, "concurrent_transaction", lose_answers)

    async def run():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        device.sequence += 1
        event = Event(device="d1", sequence=device.sequence, kind="fallback", text="once", at=0.0)
        lost.append("begin")
        device.send("event", event)
        await eventually(lambda: len(lost) == 6)
        await eventually(lambda: "device.event" in actions(fleet, "d1"))
        await asyncio.sleep(1.5)
        assert actions(fleet, "d1").count("device.event") == 1
        await device.disconnect()

    asyncio.run(run())


def test_what_an_expired_token_has_made_ends_with_it(fleet):
    for name, actor in (("of-ci", "token:ci"), ("of-other", "token:other"), ("of-ann", "ann")):
        add_webhook(fleet.store, name, "http://127.0.0.1:9/", [], actor=actor)
    with fleet.store.transaction() as session:
        add_token(session, "made", ["read"], actor="token:ci")
        add_token(session, "other", ["read"], actor="ann", life_s=600.0)
        add_token(session, "ci", ["admin"], actor="ann", life_s=0.0)
    wait_for(lambda: [one.name for one in list_webhooks(fleet.store)] == ["of-ann", "of-other"])
    with fleet.store.snapshot() as session:
        assert [one.name for one in list_tokens(session)] == ["ci", "other"]
