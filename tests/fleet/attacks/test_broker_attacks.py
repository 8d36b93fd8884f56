"""A hostile broker, a lying clock, a bad disk: only the manager's newest document counts."""

import errno
import json
import os
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select
from tests.faults.disk_calls import DiskCalls
from tests.fleet.attacks.attack_site import CLOCKS, NOW_S, site  # noqa: F401  # a fixture
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.identity.enrolment import revoke
from edgekit_fleet.manager import inbox
from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.manager.publisher import Publisher
from edgekit_fleet.store.audit import COPY_ALARM
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.shards import LEASE_S, Shards
from edgekit_fleet.store.tables import AttributeRow, AuditRow, DesiredRow, DeviceRow, FigureRow
from edgekit_runtime.agent.documents import (
    MAX_DOCUMENT_BYTES,
    Desired,
    Event,
    Execution,
    Hello,
    ModelFigures,
    Reported,
    ReportedModel,
    topic,
)
from edgekit_runtime.agent.execution import step_runner
from edgekit_runtime.agent.execution.local_steps import LocalSteps
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.signing import key_id, seal, seal_payload, unseal
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import UnavailableError

DAY_S = 86_400.0
SOON_S = 5.0
"""Deadline by which an attack by the broker must be reported."""


def check_attack(site, word):  # noqa: F811
    site.run_until(lambda: any(word in text for text in site.attacks()), SOON_S)
    site.check_unharmed()


def test_forged_document_is_refused_and_reported(site):  # noqa: F811
    site.broker.deliver(site.order(site.publish("2.0.0"), key=Ed25519PrivateKey.generate()))
    check_attack(site, "signed by key")


def test_changed_document_is_refused_and_reported(site):  # noqa: F811
    envelope = site.order(site.publish("2.0.0"))
    site.broker.deliver(envelope.replace(b'"payload":"e', b'"payload":"f'))
    check_attack(site, "desired:")


def test_document_of_another_device_is_refused_and_reported(site):  # noqa: F811
    site.broker.deliver(site.order(site.publish("2.0.0"), device="d2"))
    check_attack(site, "is for 'd2'")


def test_own_report_does_not_pass_for_a_document(site):  # noqa: F811
    site.broker.deliver(
        seal(Hello(device="d1", sequence=1, desired_version=9, runtime="0"), "hello", site.key)
    )
    check_attack(site, "expected")


@pytest.mark.parametrize("size", [MAX_DOCUMENT_BYTES + 1, 2 * MAX_DOCUMENT_BYTES])
def test_document_over_the_size_limit_is_refused_and_reported(site, size):  # noqa: F811
    site.broker.deliver(b"{" * size)
    check_attack(site, f"has {size} bytes")


def test_replayed_document_is_refused_and_reported(site):  # noqa: F811
    old = site.order()
    site.broker.deliver(old)
    site.run(3.0)
    site.broker.deliver(site.order())
    site.run(3.0)
    site.broker.deliver(old)
    check_attack(site, "is not newer")


def test_document_with_the_same_number_and_other_content_is_refused(site):  # noqa: F811
    site.broker.deliver(site.order(site.publish("2.0.0"), version=site.version))
    check_attack(site, "is not newer")


def test_two_managers_at_once_the_replaced_one_is_refused(site):  # noqa: F811
    """The one that lost its lease has a lower epoch, whatever number it takes."""
    site.broker.deliver(site.order(epoch=6))
    site.run(3.0)
    site.broker.deliver(site.order(site.publish("2.0.0"), epoch=5))
    check_attack(site, "of epoch 5 is not newer")


def test_two_managers_at_once_only_one_is_in_charge(tmp_path):
    store = open_store(sqlite_url(tmp_path / "fleet.db"))
    first, second = Shards(), Shards()
    with store.transaction() as session:
        first.join(session, NOW_S)
        first.apply(first.balance(session, NOW_S))
    with store.transaction() as session, pytest.raises(UnavailableError, match="in charge"):
        second.join(session, NOW_S + 1.0)
    later = NOW_S + 2 * LEASE_S
    with store.transaction() as session:
        second.join(session, later)
        second.apply(second.balance(session, later))
    with pytest.raises(UnavailableError, match="taken charge"), store.transaction() as session:
        first.check(session)
    assert second.is_complete
    assert second.epoch_of("d1") > first.epoch_of("d1")
    store.close()


def test_repeated_document_starts_nothing_twice(site):  # noqa: F811
    envelope = site.order(site.publish("2.0.0"))
    for _ in range(20):
        site.broker.deliver(envelope)
        site.run(2.0)
    assert site.execution == ("succeeded", "")
    assert len([path for path in site.mirror.requests if "2.0.0" in path]) == 1
    assert site.attacks() == []


def test_flood_of_forged_documents_is_told_in_one_place_and_bounded(site):  # noqa: F811
    forged = site.order(key=Ed25519PrivateKey.generate())
    for _ in range(500):
        site.broker.deliver(forged)
    site.run(2.0)
    site.check_unharmed()
    site.check_recovers("2.0.0")


@pytest.mark.parametrize("seed", range(8))
def test_broker_that_replays_reorders_repeats_drops_and_forges_installs_nothing_wrong(site, seed):  # noqa: F811
    """Whatever the order: the device ends on the newest document that came through, and never goes back."""
    chance = random.Random(seed)
    packages = {version: site.publish(version) for version in ("1.1.0", "1.2.0", "1.3.0")}
    true = [(version, site.order(model)) for version, model in packages.items()]
    thief = Ed25519PrivateKey.generate()
    traffic = []
    for version, envelope in true:
        traffic += [(version, envelope)] * chance.randint(0, 3)
    traffic += [("", site.order(packages["1.1.0"], key=thief)) for _ in range(3)]
    traffic += [("", site.order(packages["1.1.0"], device="d2", version=1000 + each)) for each in range(3)]
    chance.shuffle(traffic)
    held = [site.active()]
    for _version, envelope in traffic:
        site.broker.deliver(envelope)
        site.run(chance.choice((1.0, 6.0)))
        held.append(site.active())
    site.run(20.0)
    held.append(site.active())
    assert held == sorted(held)
    assert held[-1] == max(["1.0.0", *(version for version, _ in traffic if version)])
    assert site.attacks()


def test_clock_at_1970_neither_revives_old_metadata_nor_stops_updates(site):  # noqa: F811
    site.run(2 * 86_400.0, 3600.0)  # the repository is not signed again: its timestamp expires
    site.broker.deliver(site.order())
    site.run(3.0)
    site.clock.lie_s = -(NOW_S + site.clock.passed_s)
    site.restart()
    site.broker.deliver(site.order(issued_at=NOW_S + site.clock.passed_s, expires_at=NOW_S * 2))
    wanted = site.publish("2.0.0", now=NOW_S)
    site.broker.deliver(site.order(wanted, issued_at=NOW_S + site.clock.passed_s, expires_at=NOW_S * 2))
    site.run_until(lambda: any("freeze" in text for text in site.attacks()))
    site.check_unharmed()
    site.repository.refresh(NOW_S + site.clock.passed_s)
    site.run_until(lambda: site.execution == ("succeeded", ""), 700.0)
    assert site.running() == "2.0.0"


def test_device_without_journal_and_clock_numbers_on_from_where_the_manager_is(site):  # noqa: F811
    (site.folder / "agent" / "journal.json").write_bytes(b"torn")
    site.clock.lie_s = -(NOW_S + site.clock.passed_s)
    site.restart()
    site.run(3.0)
    taken = 10**13
    assert all(plain["sequence"] < taken for _, plain in site.broker.sent)
    now_s = NOW_S + site.clock.passed_s
    site.broker.sent.clear()
    site.broker.deliver(site.order(sequence=taken, issued_at=now_s, expires_at=now_s + 86_400.0))
    site.run(3.0)
    kinds = [kind for kind, plain in site.broker.sent if plain["sequence"] > taken]
    assert kinds == ["hello", "reported"] == [kind for kind, _ in site.broker.sent]
    site.restart()
    site.run(3.0)
    assert all(plain["sequence"] > taken for _, plain in site.broker.sent)


def test_restarted_device_spreads_its_reconnects_as_its_document_states(site):  # noqa: F811
    site.broker.deliver(site.order(reconnect_s=400.0))
    site.run(1)
    site.restart()
    assert site.broker.reconnect_s == 400.0


def test_device_follows_a_manager_whose_clock_was_a_year_ahead(site):  # noqa: F811
    year_s = 365 * 86_400.0
    ahead_s = NOW_S + site.clock.passed_s + year_s
    site.broker.deliver(site.order(issued_at=ahead_s, expires_at=ahead_s + 7 * 86_400.0))
    site.run(3.0)
    wanted = site.publish("2.0.0")
    site.repository.refresh(NOW_S + site.clock.passed_s)
    site.broker.deliver(site.order(replace(wanted, window="00:00-23:59")))
    site.run_until(lambda: site.execution == ("succeeded", ""))
    assert site.running() == "2.0.0"


def test_clock_far_ahead_stops_updates_and_says_so(site):  # noqa: F811
    site.clock.lie_s = 10 * 365 * 86_400.0
    site.run(5.0)
    assert site.reported["status"] == "stale"
    assert int(site.reported["facts"]["clock"]) > 2 * NOW_S - NOW_S
    site.check_unharmed()


def test_clock_far_ahead_leaves_nothing_behind_once_it_is_right(site):  # noqa: F811
    """Metadata is looked at with it, a document comes, the agent starts again: nothing of that sticks."""
    site.clock.lie_s = 10 * 365 * 86_400.0
    site.restart()
    site.broker.deliver(site.order(site.publish("2.0.0")))
    site.run(2 * 86_400.0, 600.0)
    assert "here it is 2037-01" in site.reported["because"]
    assert all("freeze" in text for text in site.attacks())
    site.check_unharmed()
    site.clock.lie_s = 0.0
    site.repository.refresh(site.clock.true_time())
    site.check_recovers()
    assert site.reported["status"] == "converged"


@pytest.mark.parametrize("clock_s", CLOCKS.values(), ids=CLOCKS)
def test_clock_behind_that_is_set_later_changes_nothing(site, clock_s):  # noqa: F811
    site.set_clock(clock_s)
    site.broker.deliver(site.order(site.publish("2.0.0")))
    site.run_until(lambda: site.execution == ("succeeded", ""))
    assert site.reported["facts"]["clock_fault"] == "behind"
    site.slots().confirm("linear", site.running())
    site.clock.lie_s = 0.0
    site.check_recovers()
    assert "clock_fault" not in site.reported["facts"]
    assert site.attacks() == []


def test_document_ages_over_restarts_of_a_device_whose_clock_begins_in_1970_each_time(site):  # noqa: F811
    for _ in range(8):
        site.set_clock(0.0)
        site.run(86_400.0, 600.0)
    assert site.reported["status"] == "stale"
    site.check_unharmed()


@pytest.mark.parametrize("clock_s", CLOCKS.values(), ids=CLOCKS)
def test_window_waits_for_a_clock_that_tells_the_hour(site, clock_s):  # noqa: F811
    site.set_clock(clock_s)
    site.broker.deliver(site.order(replace(site.publish("2.0.0"), window="00:00-23:59")))
    site.run_until(
        lambda: site.execution == ("installing", "clock") or site.execution == ("waiting", "clock")
    )
    site.check_unharmed()
    site.clock.lie_s = 0.0
    site.run_until(lambda: site.execution == ("succeeded", ""))


def test_full_disk_ends_the_execution_and_keeps_the_old_model(site):  # noqa: F811
    is_full = False

    def act(_number, name):
        if is_full and name in ("open", "write", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    site.broker.deliver(site.order(site.publish("2.0.0")))
    with DiskCalls(site.folder, act).installed() as calls:
        calls.arm()
        site.run(1.0)
        is_full = True
        site.run(30.0)
        site.check_unharmed()
        is_full = False
        site.run_until(
            lambda: site.execution is not None and site.execution[0] in ("failed", "succeeded"), 700.0
        )
    site.check_recovers()


TORN = (
    "journal.json",
    "tuf/timestamp.json",
    "tuf/snapshot.json",
    "tuf/targets.json",
    "tuf/root_history/1.root.json",
)


@pytest.mark.parametrize("name", [*TORN, "tuf/class-x86-64.json"])
@pytest.mark.parametrize("damage", ["empty", "half", "zeros", "missing"])
def test_torn_file_of_the_agent_costs_only_time(site, name, damage):  # noqa: F811
    path = site.folder / "agent" / name
    data = path.read_bytes()
    changed = {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(changed[damage])
    site.restart()
    site.run(3.0)
    site.check_unharmed()
    site.check_recovers("2.0.0")


class ManagerSite:
    """A store, its inbox and its publisher, with one device."""

    def __init__(self, url):
        self.store = open_store(url)
        self.key, self.manager = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        self.add({"d1": self.key, "d2": Ed25519PrivateKey.generate()})

    def add(self, keys):
        """Enrol devices with these keys, and restart the manager."""
        with self.store.transaction() as session:
            for name, key in keys.items():
                session.add(
                    DeviceRow(
                        name=name,
                        target="x86-64",
                        public_key=key.public_key().public_bytes_raw(),
                        certificate_serial=name,
                        certificate_expires_at=2 * NOW_S,
                        enrolled_at=NOW_S,
                    )
                )
                session.flush()
                session.add(DesiredRow(device=name))
        self.open()

    def open(self):
        shards = Shards.of_all(5)
        self.index = DeviceIndex(shards)
        with self.store.transaction() as session:
            self.index.load_shards(session, shards.epochs)
        self.inbox = Inbox(self.index, shards)
        self.publisher = Publisher(self.index, shards, lambda: self.manager, 7 * 86_400.0)

    def take(self, now=NOW_S):
        hellos = self.inbox.take(now)
        with self.store.transaction() as session:
            self.inbox.write(session, now)
            answers = self.publisher.answer(session, [hello.device for hello in hellos])
        self.inbox.forget()
        return answers

    def make_due(self, now=NOW_S):
        with self.store.transaction() as session:
            made = self.publisher.make_due(session, now)
        self.publisher.note_published(made, now)
        return {one.device: one for one in made}

    def take_hello(self, instance, sequence, now=NOW_S):
        """Take a hello of a run of an agent of `d1`."""
        stated = {"instance": instance, "sequence": sequence, "address": f"at {instance}", "runtime": "1"}
        self.inbox.put(topic("d1", "hello"), seal(Hello(device="d1", **stated), "hello", self.key))
        self.take(now)

    def alarms(self):
        with self.store.transaction() as session:
            return [row.action for row in session.scalars(select(AuditRow)) if row.action.startswith("alarm")]


@pytest.fixture
def manager(store_url):
    made = ManagerSite(store_url)
    yield made
    made.store.close()


def report(sequence, status="converged", device="d1"):
    return Reported(device=device, sequence=sequence, status=status, facts={})


@pytest.mark.parametrize("seed", range(8))
def test_manager_keeps_the_newest_report_whatever_the_broker_does(manager, seed):
    chance = random.Random(seed)
    statuses = ("working", "converged", "diverged")
    true = [seal(report(each, statuses[each % 3]), "reported", manager.key) for each in range(1, 30)]
    traffic = [chance.choice(true) for _ in range(60)]
    traffic += [seal(report(99, "stale"), "reported", Ed25519PrivateKey.generate())] * 5
    chance.shuffle(traffic)
    for payload in traffic:
        manager.inbox.put(topic("d1", "reported"), payload)
    manager.take()
    newest = max(true.index(payload) for payload in traffic if payload in true) + 1
    with manager.store.transaction() as session:
        assert session.get(DeviceRow, "d1").status == statuses[newest % 3]
    assert manager.inbox.refused["forged"] == 5
    assert "alarm.forged" in manager.alarms()


def test_document_of_a_clock_that_was_a_year_ahead_is_written_again(manager):
    with manager.store.transaction() as session:
        manager.publisher.make_due(session, NOW_S + 365 * 86_400.0)
    with manager.store.transaction() as session:
        manager.publisher.mark_expiring(session, NOW_S)
    made = manager.make_due()["d1"]
    public = manager.manager.public_key()
    found = unseal(made.envelope, "desired", Desired, {key_id(public): public}, "desired")
    assert (found.version, found.issued_at) == (2, NOW_S)


@pytest.mark.parametrize(
    "hellos",
    [
        "a10 b12 a10 b13",
        "b12 a10 b13",
        "a10 b12 a11 b13",  # a11 was delayed
        "a10 b12 c13 a10 b12 c14",
        "a10 c1 c11 c12",  # c has lost its journal, and numbers on
        "b12 a10 b12 b13",
    ],
)
def test_hellos_of_one_machine_that_are_repeated_or_late_are_no_copy(manager, hellos):
    for hello in hellos.split():
        manager.take_hello(hello[0], int(hello[1:]))
    assert COPY_ALARM not in manager.alarms()


@pytest.mark.parametrize(
    "hellos",
    [
        "a10 b12 a14",
        "a10 b10 a13 b13",  # both number on from one journal
        "b10 a12 b11 b14",  # b has been behind, and was sent the highest number
    ],
)
def test_hellos_of_two_machines_that_alternate_are_a_copy(manager, hellos):
    for hello in hellos.split():
        manager.take_hello(hello[0], int(hello[1:]))
    assert COPY_ALARM in manager.alarms()


@pytest.mark.parametrize("is_restarted", [False, True])
def test_notice_of_a_copy_ends_after_a_day(manager, is_restarted):
    """Also if another manager has the device by then."""
    for instance, sequence in (("a", 10), ("b", 12), ("a", 14)):
        manager.take_hello(instance, sequence)
    public = manager.manager.public_key()

    def read_notice(now):
        with manager.store.transaction() as session:
            manager.publisher.mark_expiring(session, now)
        made = manager.make_due(now).get("d1")
        keys = {key_id(public): public}
        return None if made is None else unseal(made.envelope, "desired", Desired, keys, "d1").notice

    assert "two machines use the identity of d1" in read_notice(NOW_S)
    with manager.store.transaction() as session:  # as after a rollout
        mark_due(session, ["d1"], content_sha256="")
    assert "two machines use the identity of d1" in read_notice(NOW_S + DAY_S / 2)
    if is_restarted:
        manager.open()
    assert read_notice(NOW_S + DAY_S - 60.0) is None
    assert read_notice(NOW_S + DAY_S + 60.0) == ""
    assert read_notice(NOW_S + DAY_S + 120.0) is None


def test_retained_documents_after_a_reconnect_are_not_verified_again(manager, monkeypatch):
    hello = Hello(device="d1", sequence=1, runtime="0.1.0")
    retained = {
        topic("d1", "hello"): seal(hello, "hello", manager.key),
        topic("d1", "reported"): seal(report(2), "reported", manager.key),
    }
    verified = []
    monkeypatch.setattr(inbox, "unseal", lambda *words: verified.append(words[1]) or unseal(*words))
    for _ in range(3):
        for name, payload in retained.items():
            manager.inbox.put(name, payload)
        manager.take()
    assert verified == ["hello", "reported"]
    assert manager.inbox.refused["replayed"] == 4


def test_device_reports_its_pins_and_unpins(manager):
    for sequence, pinned in ((1, "1.0.0"), (2, "")):
        model = ReportedModel(
            model="kws", version="1.0.0", manifest_sha256="0" * 64, health="healthy", pinned=pinned
        )
        document = replace(report(sequence), models=(model,))
        manager.inbox.put(topic("d1", "reported"), seal(document, "reported", manager.key))
        manager.take()
        with manager.store.transaction() as session:
            assert session.get(DeviceRow, "d1").pinned == ({"kws": "1.0.0"} if pinned else {})


def test_hello_that_comes_while_its_device_is_revoked_does_not_show_it_online(manager):
    hello = Hello(device="d1", sequence=1, runtime="1")
    manager.inbox.put(topic("d1", "hello"), seal(hello, "hello", manager.key))
    with manager.store.transaction() as session:
        revoke(session, "d1", "anna", "stolen")
    manager.take()
    with manager.store.transaction() as session:
        row = session.get(DeviceRow, "d1")
        assert (row.status, row.is_online) == ("revoked", False)


def test_messages_that_find_no_memory_are_counted_in_the_audit_log(manager, monkeypatch):
    monkeypatch.setattr(inbox, "MAX_PENDING", 2)
    for sequence in range(1, 6):
        manager.inbox.put(topic("d1", "reported"), seal(report(sequence), "reported", manager.key))
    manager.take()
    manager.take()
    with manager.store.transaction() as session:
        (alarm,) = session.scalars(select(AuditRow).where(AuditRow.action == "alarm.overload"))
    assert alarm.detail["dropped"] == 3


def test_flood_of_one_device_delays_no_other_and_raises_one_alarm(manager):
    others = [f"other-{number}" for number in range(48)]
    manager.add(dict.fromkeys(others, manager.key))
    manager.make_due()
    for begin in (0, 2000):
        for sequence in range(begin + 1, begin + 2001):
            manager.inbox.put(topic("d1", "reported"), seal(report(sequence), "reported", manager.key))
        for name in others:
            hello = seal(Hello(device=name, sequence=begin + 1, runtime="1"), "hello", manager.key)
            manager.inbox.put(topic(name, "hello"), hello)
        assert {answer.device for answer in manager.take()} == set(others)
    assert manager.alarms() == ["alarm.flood"]
    assert manager.inbox.refused["flood"] > 3500
    assert manager.index.devices["d1"].lacks_report(NOW_S)  # so it is asked for its newest one
    manager.take(NOW_S + 3600.0)
    with manager.store.transaction() as session:
        alarms = session.scalars(select(AuditRow).where(AuditRow.action == "alarm.flood"))
        assert sum(alarm.detail["dropped"] for alarm in alarms) == manager.inbox.refused["flood"]


def test_device_that_holds_the_highest_number_is_sent_one_document(manager):
    hello = Hello(device="d1", sequence=1, desired_version=2**52 - 1, runtime="1")
    manager.inbox.put(topic("d1", "hello"), seal(hello, "hello", manager.key))
    manager.take()
    version = manager.make_due()["d1"].version
    said = replace(report(2), desired_version=version)
    manager.inbox.put(topic("d1", "reported"), seal(said, "reported", manager.key))
    manager.take()
    known = manager.index.devices["d1"]
    assert (known.desired_held, known.desired_sent) == (version, version)


def test_figures_of_versions_that_a_device_invents_are_bounded(manager):
    model = ReportedModel(model="kws", version="1", manifest_sha256="0" * 64, health="healthy")
    for sequence in range(1, 41):
        figures = tuple(ModelFigures(model="kws", version=f"{sequence}.{each}") for each in range(50))
        document = replace(report(sequence), models=(model,), figures=figures)
        manager.inbox.put(topic("d1", "reported"), seal(document, "reported", manager.key))
        manager.take()
    with manager.store.transaction() as session:
        assert session.scalar(select(func.count()).select_from(FigureRow)) == 128
    assert manager.alarms() == ["alarm.figures"]
    manager.inbox.put(topic("d1", "reported"), seal(replace(document, sequence=99), "reported", manager.key))
    manager.take(NOW_S + 86_400.0)
    with manager.store.transaction() as session:
        assert session.scalar(select(func.count()).select_from(FigureRow)) == 128 + 50


def test_facts_that_a_device_invents_are_bounded(manager):
    document = replace(report(1), facts={f"f{number}": "x" for number in range(1000)})
    manager.inbox.put(topic("d1", "reported"), seal(document, "reported", manager.key))
    manager.take()
    with manager.store.transaction() as session:
        assert session.scalar(select(func.count()).select_from(AttributeRow)) == 256


def test_entries_of_a_device_in_the_audit_log_are_bounded(manager, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: minute * 60.0)
    monkeypatch.setattr(inbox, "time", clock)
    for minute in range(60):
        for number in range(1, 13):
            event = Event(device="d1", sequence=100 * minute + number, kind="a", text="b", at=0.0)
            manager.inbox.put(topic("d1", "event"), seal(event, "event", manager.key))
        manager.inbox.put(topic("d1", "event"), b"forged")
        manager.take(NOW_S + 60.0 * minute)
    with manager.store.transaction() as session:
        rows = session.scalars(select(AuditRow.action).where(AuditRow.subject == "d1")).all()
    assert rows.count("device.event") > 200
    assert len(rows) <= 302  # one more for each kind of alarm


def test_device_that_impersonates_another_is_refused_and_raises_an_alarm(manager):
    manager.inbox.put(topic("d2", "reported"), seal(report(1, device="d2"), "reported", manager.key))
    manager.inbox.put(topic("d1", "reported"), seal(report(1, device="d2"), "reported", manager.key))
    manager.take()
    assert (manager.inbox.refused["forged"], manager.inbox.refused["impersonated"]) == (1, 1)
    assert {"alarm.forged", "alarm.impersonated"} <= set(manager.alarms())
    with manager.store.transaction() as session:
        assert session.get(DeviceRow, "d2").status == "new"


@pytest.mark.parametrize("text", ["\0", "\ud800", "x" * 300], ids=["nul", "half-a-pair", "long"])
def test_text_that_a_database_refuses_does_not_stop_the_others(manager, text):
    hostile = Reported(
        device="d1",
        sequence=1,
        status="diverged",
        because=text,
        models=(ReportedModel(model=text, version=text, manifest_sha256=text, health="healthy"),),
        executions=(Execution(execution=text, model=text, version="1", state="failed", code=text),),
        figures=(ModelFigures(model=text, version=text),),
        facts={"site": text},
    )
    payload = json.dumps(to_plain(hostile)).encode()
    manager.inbox.put(topic("d1", "reported"), seal_payload(payload, "reported", manager.key))
    manager.take()
    manager.inbox.put(topic("d1", "reported"), seal(report(2), "reported", manager.key))
    manager.take()
    with manager.store.transaction() as session:
        assert session.get(DeviceRow, "d1").status == "converged"


def test_document_over_the_size_limit_does_not_reach_the_store(manager):
    manager.inbox.put(topic("d1", "reported"), b"{" * (MAX_DOCUMENT_BYTES + 1))
    manager.take()
    assert manager.inbox.refused["forged"] == 1


def test_manager_restored_from_an_old_backup_goes_on_above_the_device(manager):
    held = 41
    hello = Hello(device="d1", sequence=10, desired_version=held, runtime="0.1.0")
    manager.make_due()
    manager.inbox.put(topic("d1", "hello"), seal(hello, "hello", manager.key))
    manager.take()
    assert "alarm.restored" in manager.alarms()
    made = manager.make_due()["d1"]
    public = manager.manager.public_key()
    document = unseal(made.envelope, "desired", Desired, {key_id(public): public}, "desired")
    assert document.version == held + 1


def test_install_that_hangs_for_ever_does_not_block_the_next_execution(site, monkeypatch):  # noqa: F811
    hung = threading.Event()

    def carry_out(steps, order, stop, note, count):
        assert order.step.action == "install"
        if hung.is_set():
            return StepResult(outcome="refused", code="engine")
        hung.set()
        return StepResult() if stop.wait(60.0) else StepResult(outcome="failed")

    def get_state():
        (progress,) = site.agent._executions
        return progress.report.state

    monkeypatch.setattr(step_runner, "threading", threading)  # a step is not over when it has begun
    monkeypatch.setattr(LocalSteps, "carry_out", carry_out)
    wanted = site.publish("2.0.0")
    (site.folder / "agent/downloads" / wanted.sha256).write_bytes(b"whole")
    site.broker.deliver(site.order(replace(wanted, timeout_s=600.0)))
    site.run(500.0)
    assert hung.wait(60.0)
    assert (site.agent._steps.is_busy, get_state()) == (True, "installing")
    site.run_until(lambda: get_state() == "timed_out", 200.0)
    wait_for(lambda: site.run(1.0) or not site.agent._steps.is_busy, "the end of the step")
    assert get_state() == "timed_out"
    site.broker.deliver(site.order(wanted))
    wait_for(lambda: site.run(1.0) or get_state() == "refused", "the next execution")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_documents_are_signed_again_after_the_exchange_of_the_managers_key(manager, is_restarted):
    """Also if the exchange was made while the manager was down; the old ones go out no more."""
    assert {name: made.version for name, made in manager.make_due().items()} == {"d1": 1, "d2": 1}
    manager.manager = Ed25519PrivateKey.generate()
    if is_restarted:
        manager.open()
    else:
        assert manager.publisher.follow_key()
    assert not manager.publisher.follow_key()
    manager.inbox.put(
        topic("d1", "hello"), seal(Hello(device="d1", sequence=1, runtime="1"), "hello", manager.key)
    )
    assert manager.take() == []
    with manager.store.transaction() as session:
        manager.publisher.mark_expiring(session, NOW_S)
    made = manager.make_due()
    public = manager.manager.public_key()
    for name in ("d1", "d2"):
        desired = unseal(made[name].envelope, "desired", Desired, {key_id(public): public}, name)
        assert desired.version == 2
    assert manager.make_due() == {}


def test_number_at_the_end_that_a_thief_gave_a_document_is_not_followed(manager):
    """After the exchange of the manager's key the device must take a higher number, and there must be one."""
    manager.make_due()
    hello = Hello(device="d1", sequence=1, desired_version=2**53, runtime="1")
    manager.inbox.put(topic("d1", "hello"), seal(hello, "hello", manager.key))
    assert [one.version for one in manager.take()] == [1]
    assert manager.alarms() == []
