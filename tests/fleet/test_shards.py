"""Several managers on one PostgreSQL: who is in charge of what, and that nothing falls between them."""

import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select, update
from tests.fleet.test_rollouts import NOW, add_devices, add_release

from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.manager.publisher import Publisher
from edgekit_fleet.operations import devices, rollouts
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts.runner import RolloutRunner, read_entries
from edgekit_fleet.store.database import open_store
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.shards import LEASE_S, Shards, describe_ranges
from edgekit_fleet.store.tables import SHARDS, DesiredRow, ExecutionRow, ManagerRow, MemberRow, shard_of
from edgekit_runtime.agent.documents import topic
from edgekit_runtime.errors import UnavailableError


@pytest.fixture
def shared(postgresql_url):
    """A store that several managers may use."""
    opened = open_store(postgresql_url)
    yield opened
    opened.close()


def join(store):
    shards = Shards()
    with store.transaction() as session:
        shards.join(session, time.time())
        balance = shards.balance(session, time.time())
    shards.apply(balance)
    return shards


def balance(store, *managers, **options):
    for shards in managers:
        with store.concurrent_transaction() as session:
            changes = shards.balance(session, time.time(), **options)
        shards.apply(changes)


def silence(store, shards, for_s=LEASE_S + 0.1):
    """Make a manager look as if it had stopped so long ago."""
    with store.transaction() as session:
        session.execute(
            update(ManagerRow)
            .where(ManagerRow.number == shards.number)
            .values(heartbeat_at=ManagerRow.heartbeat_at - for_s)
        )


@pytest.mark.parametrize(("numbers", "text"), [((), ""), (range(64), "0-63"), ((5, 1, 2, 3, 9), "1-3, 5, 9")])
def test_shards_are_named_in_ranges(numbers, text):
    assert describe_ranges(numbers) == text


def test_managers_share_all_shards_and_none_twice(shared):
    managers = [join(shared)]
    assert managers[0].is_complete
    for count in (2, 3):
        managers.append(join(shared))
        balance(shared, *managers)
        balance(shared, *managers)
        held = [shard for each in managers for shard in each.epochs]
        assert sorted(held) == list(range(SHARDS))
        assert max(len(each.epochs) for each in managers) <= -(-SHARDS // count)


def test_shards_of_a_silent_manager_go_to_the_others_with_a_higher_epoch(shared):
    first, second = join(shared), join(shared)
    balance(shared, first, second)
    silence(shared, first)
    before = {**first.epochs, **second.epochs}
    balance(shared, second)
    assert second.is_complete
    assert all(second.epochs[shard] > before[shard] for shard in first.epochs)
    with pytest.raises(UnavailableError, match="taken charge"), shared.concurrent_transaction() as session:
        first.check(session)


def test_silent_manager_in_mid_transaction_keeps_its_shards_until_it_ends(shared):
    first, second = join(shared), join(shared)
    balance(shared, first, second)
    silence(shared, first)
    with shared.concurrent_transaction() as session:
        first.check(session)
        balance(shared, second)
        assert not second.is_complete
        session.execute(select(1))
    balance(shared, second)
    assert second.is_complete


def test_manager_that_was_late_itself_removes_nobody_at_once(shared):
    """As after a restart of the database, when all heartbeats are old."""
    first, second = join(shared), join(shared)
    balance(shared, first, second)
    for each in (first, second):
        silence(shared, each)
    balance(shared, second)
    balance(shared, first)
    assert len(first.epochs) == len(second.epochs) == SHARDS // 2


def test_manager_that_is_behind_leaves_no_shards(shared):
    first, second = join(shared), join(shared)
    balance(shared, first, may_leave=False)
    balance(shared, second)
    assert first.is_complete
    assert not second.epochs


def commit_without_answer(store, shards):
    """Balance as where the connection ends while the database commits: the manager does not know."""
    with store.concurrent_transaction() as session:
        shards.balance(session, time.time())


def test_shards_that_were_left_without_an_answer_stay_with_who_took_them(shared):
    first, second = join(shared), join(shared)
    commit_without_answer(shared, first)
    balance(shared, second)
    taken = dict(second.epochs)
    assert len(taken) == SHARDS // 2
    balance(shared, first)
    third = join(shared)
    assert not third.epochs
    balance(shared, second)
    assert second.epochs.items() <= taken.items()
    assert not first.epochs.keys() & taken.keys()


def test_shards_that_were_taken_without_an_answer_are_held(shared):
    first, second = join(shared), join(shared)
    balance(shared, first)
    commit_without_answer(shared, second)
    balance(shared, second)
    assert len(second.epochs) == SHARDS // 2
    assert not first.epochs.keys() & second.epochs.keys()


def test_message_of_a_foreign_shard_is_taken_when_its_manager_is_lost():
    shards = Shards.of_all()
    shards.epochs.pop(shard_of("d1"))
    inbox = Inbox(DeviceIndex(shards), shards)
    inbox.put(topic("d1", "event"), b"1")
    assert inbox.count_pending() == 0
    shards.epochs[shard_of("d1")] = 1
    inbox.take_over()
    assert inbox.count_pending() == 1


def halves(store):
    """Return two managers, the first of which holds the shard of rollout `r-r1`."""
    first, second = join(store), join(store)
    balance(store, first, second, first, second)
    return (first, second) if first.holds("r-r1") else (second, first)


def start(store):
    add_devices(store, 8)
    add_release(store)
    request = StartRollout(release="r", selector="all", waves="100%", minimum=8)
    return rollouts.start_rollout(store, request, "ann")


def turn(store, runner, now):
    with store.concurrent_transaction() as session:
        return runner.turn(session, now)


def test_rollout_is_decided_by_the_manager_of_its_shard_alone(shared):
    first, second = halves(shared)
    name = start(shared)
    turn(shared, RolloutRunner(second), NOW)
    with shared.snapshot() as session:
        assert len(read_entries(session, name)) == 1
    turn(shared, RolloutRunner(first), NOW)
    with shared.snapshot() as session:
        assert len(read_entries(session, name)) == 2


def test_answer_that_another_manager_commits_late_is_not_forgotten(shared):
    first, second = halves(shared)
    name, runner = start(shared), RolloutRunner(first)
    turn(shared, runner, NOW)
    with shared.concurrent_transaction() as session:
        second.check(session).turned_at = NOW
    with shared.concurrent_transaction() as session:
        session.execute(
            update(ExecutionRow)
            .where(ExecutionRow.rollout == name)
            .values(state="succeeded", changed_at=NOW + 1.0, ended_at=NOW + 1.0)
        )
        session.flush()
        turn(shared, runner, NOW + 2.0)  # sees nothing of that yet
        second.check(session).turned_at = NOW + 1.0
    assert rollouts.find_rollout(shared, name).members == {"offered": 8}
    turn(shared, runner, NOW + 3.0)
    assert rollouts.find_rollout(shared, name).members == {"succeeded": 8}


def test_order_during_a_turn_is_followed_at_the_next(shared):
    first, _ = halves(shared)
    name, runner = start(shared), RolloutRunner(first)
    with shared.concurrent_transaction() as session:
        runner.turn(session, NOW)
        order = threading.Thread(target=rollouts.give_order, args=(shared, name, "pause", "ann"))
        order.start()
        time.sleep(0.2)
    order.join()
    turn(shared, runner, NOW + 1.0)
    assert rollouts.find_rollout(shared, name).state == "paused"
    assert rollouts.replay_rollout(shared, name) == []


def test_device_that_another_rollout_takes_in_the_same_moment_does_not_join(shared, monkeypatch):
    add_devices(shared, 8)
    add_release(shared)
    request = StartRollout(release="r", selector="site=lyon", is_dynamic=True)
    first = rollouts.start_rollout(shared, request, "ann")
    devices.tag(shared, "d000", {"site": "lyon"}, "ann")
    runner, is_written, may_commit = RolloutRunner(join(shared)), threading.Event(), threading.Event()
    log_entries = rollouts.log_entries

    def log_slowly(*arguments):
        log_entries(*arguments)
        is_written.set()
        may_commit.wait(10.0)

    monkeypatch.setattr(rollouts, "log_entries", log_slowly)
    request = StartRollout(release="r", selector="name=d000")
    starting = threading.Thread(target=rollouts.start_rollout, args=(shared, request, "bob"))
    starting.start()
    assert is_written.wait(10.0)
    turn(shared, runner, NOW)
    may_commit.set()
    starting.join()
    turn(shared, runner, NOW + 20.0)
    with shared.snapshot() as session:
        taken = session.scalars(select(MemberRow.rollout).where(MemberRow.device == "d000")).all()
    assert len(taken) == 1
    assert first not in taken


def test_document_that_is_marked_while_it_is_made_is_made_again(shared):
    """One manager decides over a device while another one writes its document."""
    add_devices(shared, 1)
    shards = join(shared)
    key = Ed25519PrivateKey.generate()
    publisher = Publisher(DeviceIndex(shards), shards, lambda: key, 86_400.0)

    def mark():
        with shared.concurrent_transaction() as session:
            mark_due(session, ["d000"])

    mark()
    with shared.concurrent_transaction() as session:
        assert len(publisher.make_due(session, NOW)) == 1
        marking = threading.Thread(target=mark)
        marking.start()
        time.sleep(0.2)
    marking.join()
    with shared.snapshot() as session:
        assert session.get(DesiredRow, "d000").is_due
