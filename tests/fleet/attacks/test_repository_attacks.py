"""The attacks of TUF's and Uptane's lists, one test each: nothing wrong is installed, the old model stays.

Each also checks what is reported, and by when in simulated time. docs/reference/fleet-attacks.md lists them.
"""

import shutil
from dataclasses import replace

import pytest
from tests.fleet.attacks.attack_site import (
    REPORTED_WITHIN_S,
    only,
    read_requests,
    site,  # noqa: F401  # a fixture
    with_any_clock,
)
from tests.runtime.conftest import (
    make_signer,
    maker,  # noqa: F401  # a fixture
)

from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.releases.repository_keys import read_root_signers
from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_toolkit.packaging.signing_keys import StatementSigner

DAY_S = 86_400.0


def order_second(site, **changes):  # noqa: F811
    """Publish 2.0.0 and ask for it; returns what is asked for."""
    wanted = site.publish("2.0.0", **changes)
    site.broker.deliver(site.order(wanted))
    return wanted


def check_attack(site, word, limit_s=REPORTED_WITHIN_S):  # noqa: F811
    """Check that the attack is reported in time, under its name, and did no harm."""
    site.run_until(lambda: any(word in text for text in site.attacks()), limit_s)
    site.check_unharmed()


def test_arbitrary_installation_of_another_file(site):  # noqa: F811
    wanted = order_second(site)
    site.mirror.change = only(".edgepkg", b"malware" * 1000)
    check_attack(site, wanted.sha256[:12])
    assert site.execution == ("downloading", "digest")
    site.check_recovers()


def test_endless_data_in_a_package_is_cut_at_its_size(site):  # noqa: F811
    wanted = order_second(site)

    def endless(path, data):
        site.mirror.is_endless = path.endswith(".edgepkg")
        return b"" if site.mirror.is_endless else data

    site.mirror.change = endless
    check_attack(site, "expected")
    assert site.mirror.sent_bytes < 4 * wanted.size_bytes + (64 << 10)
    assert site.execution == ("downloading", "digest")


def test_endless_data_in_metadata_is_cut_and_reported(site):  # noqa: F811
    order_second(site)
    site.mirror.is_endless = True
    check_attack(site, "endless-data")
    assert site.execution == ("downloading", "endless-data")


def test_extraneous_dependencies_are_not_fetched(site):  # noqa: F811
    """Metadata that asks for more software changes nothing: a device fetches what it was told to run."""
    other = site.folder / "other-1.edgepkg"
    other.write_bytes(b"dependency")
    new = NewTarget(
        device_class="x86-64", name=other.name, source=other, custom={"requires": ["x86-64/other-1.edgepkg"]}
    )
    site.repository.publish([new], site.clock.true_time())
    order_second(site)
    site.run_until(lambda: site.execution == ("succeeded", ""))
    assert len({path.name for path in read_requests(site.mirror, "targets/")}) == 2  # 1.0.0 and 2.0.0
    assert set(site.slots().models()) == {"linear"}


def test_extraneous_file_in_a_package_is_refused(site):  # noqa: F811
    path = site.folder / "more.edgepkg"
    data = site.maker.write(path, version="2.0.0")
    members = site.maker.layout(data)
    contents = [
        (name, data[one.payload_offset : one.payload_offset + one.size_bytes])
        for name, one in members.items()
    ]
    with path.open("wb") as file:
        write_archive(file, [*contents, ("zz-dropper.so", b"malware")])
    order_second(site, data=path.read_bytes())
    check_attack(site, "zz-dropper.so")
    assert site.execution == ("failed", "package")


@with_any_clock
def test_fast_forward_ends_with_the_exchange_of_the_keys(site):  # noqa: F811
    """A thief of timestamp and snapshot keys states the highest versions; new keys make them void."""
    keys = site.steal_keys()

    def forward(signed):
        signed.version = 2**31 - 1

    forged = site.forge("timestamp.json", forward, keys=keys)
    site.mirror.change = only("timestamp.json", forged)
    order_second(site)
    site.run(10.0)
    site.mirror.change = lambda _path, data: data
    site.broker.deliver(site.order(site.publish("2.1.0")))
    check_attack(site, "rollback")  # the true metadata looks old now
    site.repository.rotate(site.clock.true_time(), roles=["timestamp", "snapshot"])
    site.check_recovers()


@with_any_clock
def test_indefinite_freeze_is_reported_when_the_timestamp_expires(site):  # noqa: F811
    frozen = site.folder / "frozen"
    shutil.copytree(site.repository.folder, frozen)
    site.mirror.folder = frozen
    site.run(DAY_S + 60.0, 600.0)
    order_second(site)
    check_attack(site, "freeze")
    assert site.execution == ("downloading", "freeze")
    site.repository.refresh(site.clock.true_time())
    site.check_recovers()


@with_any_clock
def test_indefinite_freeze_of_the_documents_shows_as_stale(site):  # noqa: F811
    """Who withholds documents can do so for their lifetime; from then on every report states it."""
    site.run(7 * DAY_S + 600.0, 3600.0)
    assert site.reported["status"] == "stale"
    assert "has expired" in site.reported["because"]
    site.check_unharmed()


def test_malicious_mirror_that_offers_nothing_is_reported_as_missing(site):  # noqa: F811
    order_second(site)
    site.mirror.change = lambda path, data: None if path.endswith(".edgepkg") else data
    site.run_until(lambda: site.execution == ("downloading", "network"))
    site.check_unharmed()
    site.check_recovers()


def test_malicious_mirror_that_serves_another_fleets_repository_is_refused(site):  # noqa: F811
    other = TufRepository(site.folder / "other", site.folder / "other-keys")
    other.create(site.clock.true_time() + 100.0)
    order_second(site)
    site.mirror.folder = other.folder
    check_attack(site, "forged")


@with_any_clock
def test_mix_and_match_of_metadata_of_two_times_is_refused(site):  # noqa: F811
    old = (site.repository.folder / "metadata" / site.newest("class-x86-64")).read_bytes()
    site.clock.passed_s += 10.0
    order_second(site)
    site.mirror.change = only(f"/{site.newest('class-x86-64')}", old)
    check_attack(site, "mix-and-match")
    site.check_recovers()


@with_any_clock
def test_rollback_of_the_metadata_is_refused(site):  # noqa: F811
    before = site.folder / "before"
    shutil.copytree(site.repository.folder, before)
    site.clock.passed_s += 10.0
    order_second(site)
    site.run_until(lambda: site.execution == ("succeeded", ""))
    assert site.running() == "2.0.0"
    site.mirror.folder = before
    site.broker.deliver(site.order(site.publish("2.1.0")))
    site.run_until(lambda: any("rollback" in text for text in site.attacks()))
    assert site.running() == "2.0.0"


def test_rollback_to_an_older_package_is_refused(site):  # noqa: F811
    older = site.publish("0.9.0")
    site.broker.deliver(site.order(older))
    site.run_until(lambda: site.execution == ("refused", "older"))
    site.check_unharmed()


def test_key_compromise_of_the_manager_installs_nothing_that_is_not_offered(site):  # noqa: F811
    """The manager's online key alone: the repository does not offer what the thief wants."""
    wanted = site.publish("2.0.0")
    site.repository.withdraw([wanted.path], site.clock.true_time() + 1)
    site.broker.deliver(site.order(wanted))
    site.run_until(lambda: site.execution == ("refused", "not-offered"))
    site.check_unharmed()


@with_any_clock
def test_key_compromise_of_the_manager_ends_with_its_exchange(site):  # noqa: F811
    """The thief drives number and time to the end; a new key of the manager makes both void."""
    site.broker.deliver(site.order(version=2**53 - 1, issued_at=2.0**52, expires_at=2.0**53))
    site.run(5.0)
    assert site.reported["desired_version"] == 2**53 - 1
    site.exchange_key()
    site.check_unharmed()
    site.check_recovers()


def test_key_compromise_of_a_class_role_offers_nothing_without_the_snapshot_key(site):  # noqa: F811
    wanted = order_second(site)
    name = site.newest("class-x86-64")

    def replace_file(signed):
        signed.targets[wanted.path].hashes["sha256"] = "0" * 64

    site.mirror.change = only(f"/{name}", site.forge(name, replace_file, keys=site.steal_keys()))
    check_attack(site, "mix-and-match")


def test_key_compromise_of_all_online_roles_installs_no_package_of_a_foreign_key(site):  # noqa: F811
    """Class, targets, snapshot, timestamp and manager: the package's own signature still stands."""
    path = site.folder / "malware.edgepkg"
    manifest = site.maker.manifest(version="2.0.0")
    write_package(path, manifest, site.maker.artifacts, StatementSigner(make_signer(2)))
    order_second(site, data=path.read_bytes())
    check_attack(site, "signed by")
    assert site.execution == ("failed", "package")
    site.check_recovers()


def test_key_compromise_of_the_package_key_installs_nothing_without_the_repository(site):  # noqa: F811
    """A package that is signed well, at the place of the one that the fleet offers."""
    order_second(site)
    evil = site.folder / "evil.edgepkg"
    data = site.maker.write(evil, version="2.0.0", labels=None)
    site.mirror.change = only(".edgepkg", data)
    check_attack(site, "expected")
    assert site.execution == ("downloading", "digest")


def test_wrong_software_of_another_class_is_refused(site):  # noqa: F811
    wanted = site.publish("2.0.0", device_class="jetson", target="jetson-orin")
    site.broker.deliver(site.order(wanted))
    site.run_until(lambda: site.execution == ("refused", "not-offered"))
    assert not [path for path in read_requests(site.mirror, "targets/") if "jetson" in str(path)]
    site.check_unharmed()


def test_wrong_software_under_the_path_of_this_class_is_refused(site):  # noqa: F811
    wanted = site.publish("2.0.0", target="jetson-orin")
    site.broker.deliver(site.order(wanted))
    site.run_until(lambda: site.execution is not None and site.execution[0] in ("failed", "refused"))
    site.check_unharmed()
    site.check_recovers()


def test_wrong_software_of_another_model_is_refused(site):  # noqa: F811
    wanted = site.publish("2.0.0", name="other")
    site.broker.deliver(site.order(wanted))
    site.run_until(lambda: site.execution == ("failed", "slots"))
    site.check_unharmed()
    assert set(site.slots().models()) == {"linear"}


@pytest.mark.parametrize("what", [".edgepkg", "timestamp.json"])
def test_slow_retrieval_ends_and_is_reported(site, what):  # noqa: F811
    order_second(site)

    def slow(path, data):
        site.mirror.bytes_per_s = 5.0 if path.endswith(what) else None
        return data

    site.mirror.change = slow
    site.run_until(lambda: site.attacks("slow-retrieval"), REPORTED_WITHIN_S)
    assert site.execution == ("downloading", "slow")
    site.check_unharmed()
    site.check_recovers()


def test_partial_package_is_never_installed(site):  # noqa: F811
    wanted = order_second(site)
    site.mirror.change = lambda path, data: data[: len(data) // 2] if path.endswith(".edgepkg") else data
    site.run_until(lambda: site.execution == ("downloading", "network"))
    site.check_unharmed()
    site.mirror.change = lambda path, data: (
        data[: len(data) // 2].ljust(len(data), b"\0") if path.endswith(".edgepkg") else data
    )
    site.run_until(lambda: site.execution == ("downloading", "digest"), 700.0)
    site.check_unharmed()
    assert wanted.size_bytes > 0
    site.check_recovers()


def test_dropped_requests_end_by_the_timeout_and_block_nothing(site):  # noqa: F811
    def drop(_path, _data):
        site.clock.passed_s += 30.0
        raise TimeoutError("timed out")

    site.mirror.change = drop
    wanted = site.publish("2.0.0")
    site.broker.deliver(site.order(wanted, replace(wanted, model="other")))
    site.run_until(lambda: site.execution == ("downloading", "network"))
    site.run_until(
        lambda: {one["state"] for one in site.reported["executions"]} == {"timed_out"}, 90_000.0, 300.0
    )
    site.check_unharmed()
    site.check_recovers()


def test_retries_burn_no_metered_link(site):  # noqa: F811
    """Wrong content for a day: at most three times the package, 1 MiB, and half of that for heads."""
    wanted = order_second(site)
    site.mirror.change = lambda path, data: b"?" * len(data) if path.endswith(".edgepkg") else data
    before = site.mirror.sent_bytes
    site.run_until(lambda: site.execution == ("failed", "wasted"), DAY_S, 60.0)
    assert site.mirror.sent_bytes - before <= 3 * wanted.size_bytes + (3 << 19)
    site.check_unharmed()


def test_endless_roots_burn_no_metered_link(site):  # noqa: F811
    """Metadata counts, too: a mirror could send half a megabyte of junk as the next root at every retry."""
    order_second(site)
    site.mirror.change = lambda path, data: b"?" * 500_000 if path.endswith("2.root.json") else data
    before = site.mirror.sent_bytes
    site.run_until(lambda: site.execution == ("failed", "wasted"), DAY_S, 20.0)
    assert site.mirror.sent_bytes - before < 2_500_000
    site.check_unharmed()


@with_any_clock
def test_root_rotation_reaches_a_device_three_versions_behind(site):  # noqa: F811
    every = ["root", "targets", "snapshot", "timestamp", "class-x86-64"]
    for _ in range(3):
        site.clock.passed_s += 10.0
        site.repository.rotate(site.clock.true_time(), roles=every, root_keys=3, threshold=2)
    site.check_recovers()
    assert site.attacks() == []


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "class-x86-64", "root"])
def test_metadata_by_a_key_that_was_exchanged_is_refused(site, role):  # noqa: F811
    keys = site.steal_keys()
    site.clock.passed_s += 10.0
    site.repository.rotate(site.clock.true_time(), roles=[role])
    thief = TufRepository(site.repository.folder, keys)
    path = site.folder / "evil.edgepkg"
    site.maker.write(path, version="2.0.0")
    new = NewTarget(device_class="x86-64", name="linear-2.0.0-x86-64.edgepkg", source=path)
    if role == "root":
        forged = site.forge_root(read_root_signers(keys))
        site.mirror.change = lambda path, data: forged if path.endswith("3.root.json") else data
        order_second(site)
    else:
        thief.publish([new], site.clock.true_time() + 10.0)
        site.broker.deliver(site.order(site.describe("2.0.0", path)))
    check_attack(site, "forged")
