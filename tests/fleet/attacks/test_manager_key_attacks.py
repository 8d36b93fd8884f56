"""The manager's signing key is stolen, and exchanged: devices follow the root, and nobody else.

docs/reference/fleet-attacks.md lists these cases.
"""

import shutil

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fleet.attacks.attack_site import only, site, with_any_clock  # noqa: F401  # a fixture
from tests.runtime.conftest import maker  # noqa: F401  # a fixture

from edgekit_fleet.releases.repository import TufRepository
from edgekit_runtime.agent import obeyed_documents
from edgekit_runtime.agent.agent import AgentOptions
from edgekit_runtime.agent.manager_keys import ManagerKeys
from edgekit_runtime.agent.signing import key_id

SOON_S = 5.0
HOUR_S = 3600.0
DAY_S = 86_400.0


def held(site):  # noqa: F811
    return (site.reported or {}).get("desired_version", 0)


def take(site, envelope):  # noqa: F811
    """Deliver the newest document, and wait until the device reports that it holds it."""
    site.broker.deliver(envelope)
    site.run_until(lambda: held(site) == site.version, SOON_S)


def order_by(site, key):  # noqa: F811
    """Return a document that wants what is installed, signed by a key."""
    return site.order(site.publish("1.0.0"), key=key)


def check_refused(site, key):  # noqa: F811
    """Check that a document by a key that counts no more is reported as an attack, and changes nothing."""
    before = held(site)
    site.broker.deliver(site.order(key=key, removed=("linear",)))
    words = f"signed by key {key_id(key.public_key())}"
    site.run_until(lambda: any(words in text for text in site.attacks()), SOON_S)
    site.run(5.0)
    assert held(site) == before
    site.check_unharmed()


def count_refreshes(site):  # noqa: F811
    return sum(path == "metadata/timestamp.json" for path in site.mirror.requests)


@with_any_clock
def test_exchange_of_the_managers_key_reaches_an_online_device_which_loses_nothing(site):  # noqa: F811
    seen = []
    site.exchange_key()
    site.broker.deliver(order_by(site, site.manager))
    site.run_until(lambda: seen.append(site.reported["status"]) or held(site) == 2, SOON_S)
    assert "stale" not in seen
    assert site.attacks() == []
    site.check_unharmed()
    site.check_recovers("2.0.0")


@with_any_clock
def test_documents_by_the_old_key_are_refused_after_the_exchange(site):  # noqa: F811
    """One that was withheld before, and one that a thief signs now with a higher number."""
    withheld = order_by(site, site.manager)
    thief = site.exchange_key()
    take(site, order_by(site, site.manager))
    site.broker.deliver(withheld)
    site.run_until(site.attacks, SOON_S)
    check_refused(site, thief)
    site.restart()
    site.run_until(lambda: held(site) == 3, SOON_S)
    check_refused(site, thief)
    site.check_recovers()


def test_document_that_the_journal_holds_by_the_old_key_counts_no_more(site):  # noqa: F811
    """The device learns of the exchange by a root alone: the model stays, the order goes."""
    thief = site.manager
    site.broker.deliver(site.order(site.publish("1.0.0"), version=2**53 - 1, sequence=2**53))
    site.run_until(lambda: held(site) == 2**53 - 1, SOON_S)
    assert site.reported["sequence"] < 2**52
    site.exchange_key()
    site.restart()
    site.run_until(lambda: site.reported and site.reported["status"] == "stale", DAY_S, 60.0)
    assert "no desired document" in site.reported["because"]
    assert ("hello", 0) in [(kind, plain.get("desired_version", 0)) for kind, plain in site.broker.sent]
    site.check_unharmed()
    take(site, order_by(site, site.manager))
    assert site.reported["sequence"] < 2**52
    check_refused(site, thief)


def test_thief_of_all_keys_but_the_roots_cannot_prevent_the_exchange(site):  # noqa: F811
    """He numbers documents and metadata up to the end, and offers a root of his own."""
    thief, keys = site.manager, site.steal_keys()
    for path in keys.glob("root-*.pem"):
        path.unlink()
    site.broker.deliver(
        site.order(version=2**53 - 1, issued_at=2.0**52, expires_at=2.0**53, sequence=2**53, epoch=2**53)
    )
    site.run_until(lambda: held(site) == 2**53 - 1, SOON_S)
    own = site.forge_root(TufRepository(site.folder / "none", keys)._keys.signers("timestamp"))
    site.mirror.change = only("2.root.json", own)
    site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
    site.run_until(lambda: any("forged" in text for text in site.attacks()), SOON_S)

    def forward(signed):
        signed.version = 2**31 - 1

    site.mirror.change = only("timestamp.json", site.forge("timestamp.json", forward, keys=keys))
    site.clock.passed_s += HOUR_S
    site.exchange_key()
    take(site, order_by(site, site.manager))
    check_refused(site, thief)


def test_exchange_reaches_a_device_three_roots_behind(site):  # noqa: F811
    thief = site.manager
    for roles in (["manager", "root"], ["manager", "timestamp"], ["manager", "root"]):
        site.clock.passed_s += 10.0
        site.repository.rotate(site.clock.true_time(), roles=roles)
    take(site, order_by(site, site.manager))
    assert site.attacks() == []
    check_refused(site, thief)


def test_device_whose_documents_are_withheld_learns_the_new_key_within_a_day(site):  # noqa: F811
    """A hostile broker goes on with the thief's documents, and the device asks for nothing else."""
    thief = site.exchange_key()
    site.run(DAY_S + HOUR_S, 600.0)
    check_refused(site, thief)
    assert site.reported["status"] == "stale"


def test_flood_of_documents_by_unknown_keys_costs_few_refreshes(site):  # noqa: F811
    """Each refresh that finds no new key doubles the pause; its bytes are counted, and block nothing."""
    site.options = AgentOptions(fixed={"month-mb": "0.000001"})
    site.restart()
    before_bytes, before = site.mirror.sent_bytes, count_refreshes(site)
    counted_bytes = site.agent._journal.record.metered_bytes
    (package,) = site.agent._journal.record.executions
    while site.clock.passed_s < DAY_S:
        for _ in range(3):
            site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
        site.run(300.0, 150.0)
    assert 5 <= count_refreshes(site) - before <= 16
    assert (
        0 < site.agent._journal.record.metered_bytes - counted_bytes <= site.mirror.sent_bytes - before_bytes
    )
    assert site.mirror.sent_bytes - before_bytes < 100_000
    (progress,) = site.agent._journal.record.executions
    assert progress.report.sent_bytes == package.report.sent_bytes
    site.exchange_key()
    site.run(9 * HOUR_S, 600.0)
    take(site, order_by(site, site.manager))
    site.check_unharmed()


def test_refreshes_after_an_exchange_are_spread_over_the_window_of_reconnects(site, monkeypatch):  # noqa: F811
    """As wide as the manager states it, since all devices get the new document at once."""
    widths = []
    monkeypatch.setattr(
        obeyed_documents.random, "uniform", lambda low, high: widths.append((low, high)) or high
    )
    site.broker.deliver(site.order(site.publish("1.0.0"), reconnect_s=40.0))
    site.run_until(lambda: held(site) == site.version, SOON_S)
    widths.clear()
    before = count_refreshes(site)
    site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
    site.run(39.0)
    assert (count_refreshes(site), widths) == (before, [(0.0, 40.0)])
    site.run(3.0)
    assert (count_refreshes(site), widths) == (before + 1, [(0.0, 40.0), (0.5, 1.5)])


@pytest.mark.parametrize(
    ("name", "bytes_per_s"), [("2.root.json", None), ("2.root.json", 1000.0), (".snapshot.json", None)]
)
def test_hostile_mirror_costs_a_bounded_number_of_bytes(site, name, bytes_per_s):  # noqa: F811
    """Somebody at the broker causes the refreshes; he may have the keys that lie on the server, too."""

    def state_more(signed):
        signed.version += 1
        signed.snapshot_meta.version += 1
        signed.snapshot_meta.length = 1 << 30

    timestamp = site.forge("timestamp.json", state_more)

    def change(path, data):
        site.mirror.is_endless = path.endswith(name)
        if site.mirror.is_endless:
            return b""
        return timestamp if path.endswith("timestamp.json") else data

    before_bytes, before = site.agent._journal.record.metered_bytes, len(site.mirror.requests)
    site.mirror.change, site.mirror.bytes_per_s = change, bytes_per_s
    while site.clock.passed_s < DAY_S:
        site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
        site.run(300.0, 150.0)
    came_bytes = site.agent._journal.record.metered_bytes - before_bytes
    looks = sum(path.endswith("2.root.json") for path in site.mirror.requests[before:])
    assert 5 <= looks <= 16
    assert 0 < came_bytes <= looks * (272 << 10)


def test_old_flood_does_not_delay_an_exchange_a_week_later(site):  # noqa: F811
    for _ in range(10):
        site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
        site.run(HOUR_S, 60.0)
    site.run(3 * DAY_S, 600.0)
    site.repository.refresh(site.clock.true_time())
    site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
    site.run(900.0, 60.0)
    site.exchange_key()
    site.broker.sent.clear()
    site.broker.deliver(order_by(site, site.manager))
    site.run_until(lambda: site.reported, SOON_S)
    assert site.attacks() == []
    assert held(site) == site.version


def test_document_by_a_new_key_waits_for_a_repository_that_does_not_answer(site):  # noqa: F811
    def fail(path, data):
        raise OSError("no route")

    site.exchange_key()
    site.mirror.change = fail
    site.broker.deliver(order_by(site, site.manager))
    site.run(DAY_S, 60.0)
    assert site.attacks() == []
    site.mirror.change = lambda _path, data: data
    site.run_until(lambda: held(site) == site.version, 500.0)
    site.check_unharmed()


def test_document_by_a_new_key_interrupts_a_download(site, monkeypatch):  # noqa: F811
    """A thief could order a download that drips for days."""
    from tests.fleet.attacks import attack_site

    begun = []
    monkeypatch.setattr(attack_site.InlineThread, "__init__", lambda self, target, **_: begun.append(target))
    monkeypatch.setattr(attack_site.InlineThread, "start", lambda self: None, raising=False)
    site.broker.deliver(site.order(site.publish("2.0.0")))
    site.run_until(lambda: site.execution == ("downloading", ""), SOON_S)
    stop = site.agent._steps._stop
    assert not stop.is_set()
    site.exchange_key()
    site.broker.deliver(order_by(site, site.manager))
    site.run(2.0)
    assert stop.is_set()
    assert len(begun) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"keys":["zz"]}', b"\x00" * 200])
def test_damaged_file_of_keys_gives_no_old_key_back_and_costs_only_a_refresh(site, content):  # noqa: F811
    def fail(path, data):
        raise OSError("no route")

    thief = site.exchange_key()
    take(site, order_by(site, site.manager))
    (site.folder / "agent" / "manager-keys.json").write_bytes(content)
    site.mirror.change, before = fail, len(site.mirror.requests)
    site.restart()
    site.broker.deliver(site.order(key=thief, removed=("linear",)))
    site.run(2.0)
    assert len(site.mirror.requests) > before
    site.run(60.0)
    site.check_unharmed()
    assert held(site) != site.version
    site.mirror.change = lambda _path, data: data
    take(site, order_by(site, site.manager))
    site.run(600.0)  # the thief's document waited for the repository
    check_refused(site, thief)


def test_keys_of_another_fleet_count_no_more_after_a_new_enrolment(site):  # noqa: F811
    site.exchange_key()
    take(site, order_by(site, site.manager))
    other = TufRepository(site.folder / "other", site.folder / "other-keys")
    other.create(site.clock.true_time())
    keys = ManagerKeys(site.folder / "agent", other.read_root(1).decode()).read()
    assert key_id(site.manager.public_key()) not in keys
    assert len(keys) == 1


def test_root_that_is_withheld_later_takes_no_key_back(site):  # noqa: F811
    """The device lost its copy of the roots, and a hostile mirror serves the repository as it was before."""
    before = site.folder / "before"
    shutil.copytree(site.repository.folder, before)
    thief = site.exchange_key()
    take(site, order_by(site, site.manager))
    shutil.rmtree(site.folder / "agent" / "tuf")
    site.mirror.folder = before
    site.run(DAY_S + HOUR_S, 600.0)
    check_refused(site, thief)


def test_bytes_of_a_refresh_count_in_the_month_and_for_no_execution(site):  # noqa: F811
    (before,) = site.agent._journal.record.executions
    metered_bytes = site.agent._journal.record.metered_bytes
    site.broker.deliver(site.order(key=Ed25519PrivateKey.generate()))
    site.run_until(site.attacks, SOON_S)
    assert site.agent._journal.record.metered_bytes > metered_bytes
    (progress,) = site.agent._executions
    assert progress.report.sent_bytes == before.report.sent_bytes
