"""Bundles: a release carried by hand to a device without a network, and its answer back."""

import base64
import io
import json
import time

import pytest
from sqlalchemy import select
from tests.agent.test_agent import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations import devices
from edgekit_fleet.operations.bundles import collect_results, write_bundle
from edgekit_fleet.operations.releases import rotate_keys
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import NewTarget
from edgekit_fleet.store.tables import DesiredRow, ReleaseRow
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.agent.manager_keys import ManagerKeys
from edgekit_runtime.agent.membership import read_membership
from edgekit_runtime.agent.signing import key_id
from edgekit_runtime.errors import FleetError
from edgekit_runtime.package.canonical_zip import read_members, write_archive

DIGEST, SIGNATURE = 7, 8


@pytest.fixture
def island(site):  # noqa: F811
    """A device that was enrolled and whose agent never runs."""
    site.enrol()
    with site.fleet.store.transaction() as session:
        session.add(ReleaseRow(name="r", created_at=time.time(), created_by="test", note=""))
    return site


def bundle(site, version, name, **changes):  # noqa: F811
    site.want(version, **changes)

    def is_signed():
        with site.fleet.store.transaction() as session:
            row = session.scalars(select(DesiredRow).where(DesiredRow.device == "d1")).first()
            return row is not None and row.version > 0 and not row.is_due

    wait_for(is_signed, "the signed document")
    path = site.path / name
    made = write_bundle(site.fleet.folder, site.fleet.store, "r", "name=d1", path, actor="test")
    assert made.devices == ("d1",)
    return path


def apply(site, path, results="results.json"):  # noqa: F811
    code, output, errors = site.call(
        *("fleet", "apply", str(path), "-o", str(site.path / results), "--timeout", "60")
    )
    return code, output + errors


def change(path, target, **changes):
    """Write the bundle at `path` with other members; its form stays right."""
    view = memoryview(path.read_bytes())
    members = read_members(view, "bundle", 1000)
    contents = {one.name: bytes(view[one.payload_offset : one.end_offset]) for one in members}
    contents.update(changes.pop("members", {}))
    for name, edit in changes.items():
        (found,) = [each for each in contents if name in each]
        contents[found] = edit(contents[found])
    buffer = io.BytesIO()
    write_archive(buffer, list(contents.items()))
    target.write_bytes(buffer.getvalue())
    return target


def installed(site):  # noqa: F811
    slots = site.slots()
    return slots.load("linear").state.current.version if "linear" in slots.models() else None


def test_bundle_serves_a_device_that_is_offered_a_delta_too(island):
    """A bundle holds whole packages; the signed document names the deltas of the release all the same."""
    code, text = apply(island, bundle(island, "1.0.0", "first.bundle"))
    assert code == 0, text
    source = island.path / "2.0.0.ekdelta"
    source.write_bytes(bytes(100))
    (delta,) = island.repository.publish(
        [NewTarget(device_class="x86-64", name=source.name, source=source)], time.time()
    )
    base = island.slots().load("linear").state.current.sha256
    offer = DeltaOffer(from_sha256=base, path=delta.path, size_bytes=delta.size_bytes, sha256=delta.sha256)
    code, text = apply(island, bundle(island, "2.0.0", "second.bundle", deltas=(offer,)))
    assert (code, installed(island)) == (0, "2.0.0"), text


def test_release_goes_there_and_its_results_come_back_once(island):
    first = bundle(island, "1.0.0", "first.bundle")
    code, text = apply(island, first)
    assert (code, installed(island)) == (0, "1.0.0"), text
    store, results = island.fleet.store, island.path / "results.json"
    (found,) = collect_results(store, [results], actor="test")
    assert (found.device, found.refused) == ("d1", {})
    assert devices.describe(store, "d1").summary.status == "converged"
    (again,) = collect_results(store, [results], actor="test")
    assert again.accepted == 0
    assert set(again.refused) == {"replayed"}

    second = bundle(island, "2.0.0", "second.bundle")
    assert apply(island, second)[0] == 0
    assert apply(island, second)[0] == 0  # once more does no harm
    assert installed(island) == "2.0.0"
    code, text = apply(island, first)
    assert (code, installed(island)) == (SIGNATURE, "2.0.0"), text
    assert "the bundle is old" in text


def test_bundle_leaves_out_what_its_device_keeps_of_a_withdrawn_release(island):
    bundle(island, "1.0.0", "first.bundle")
    (path,) = island.repository.list_targets()
    island.repository.withdraw([path], time.time())
    for file in (island.fleet.folder.repository / "targets").glob("*/*"):
        file.unlink()
    store, folder = island.fleet.store, island.fleet.folder
    made = write_bundle(folder, store, "r", "name=d1", island.path / "second.bundle", actor="test")
    assert (made.devices, made.packages) == (("d1",), ())


def test_old_metadata_under_a_new_document_installs_nothing(island):
    first = bundle(island, "1.0.0", "first.bundle")
    second = bundle(island, "2.0.0", "second.bundle")
    assert apply(island, second)[0] == 0
    third = bundle(island, "3.0.0", "third.bundle")
    view = memoryview(first.read_bytes())
    old = {
        one.name: bytes(view[one.payload_offset : one.end_offset])
        for one in read_members(view, "bundle", 1000)
        if one.name.startswith("metadata/")
    }
    code, text = apply(island, change(third, island.path / "mixed", members=old))
    assert code == 1
    assert "rollback" in text
    assert installed(island) == "2.0.0"


def test_damaged_foreign_and_truncated_bundles_are_refused(island):
    whole = bundle(island, "1.0.0", "whole.bundle")
    data = whole.read_bytes()
    for end in (0, 100, len(data) // 2, len(data) - 1):
        (island.path / "cut").write_bytes(data[:end])
        assert apply(island, island.path / "cut")[0] == DIGEST
    other = change(whole, island.path / "other", **{"desired/": lambda _: b"{}"})
    assert apply(island, other)[0] == SIGNATURE

    def sign_by_other(content):
        envelope = json.loads(content)
        envelope["signatures"][0]["keyid"] = "0" * 64
        return json.dumps(envelope).encode()

    foreign = change(whole, island.path / "foreign", **{"desired/": sign_by_other})
    code, text = apply(island, foreign)
    assert code == SIGNATURE
    assert "signed by key" in text
    torn = change(whole, island.path / "torn", **{"targets/": lambda content: content[:-1] + b"x"})
    code, text = apply(island, torn)
    assert code == 1
    assert "attack" in text
    assert installed(island) is None


def test_device_that_is_not_named_is_refused(island):
    path = bundle(island, "1.0.0", "whole.bundle")
    members = read_members(memoryview(path.read_bytes()), "bundle", 1000)
    assert [one.name for one in members if one.name.startswith("desired/")] == ["desired/d1.json"]
    view = memoryview(path.read_bytes())
    buffer = io.BytesIO()
    contents = [
        (one.name.replace("d1", "d2"), bytes(view[one.payload_offset : one.end_offset])) for one in members
    ]
    write_archive(buffer, contents)
    (island.path / "renamed").write_bytes(buffer.getvalue())
    code, text = apply(island, island.path / "renamed")
    assert code == SIGNATURE
    assert "is for d2, this is 'd1'" in text
    with pytest.raises(FleetError, match="no device"):
        write_bundle(
            *(island.fleet.folder, island.fleet.store, "r", "name=nobody", island.path / "x"), actor="test"
        )


def test_forged_results_change_nothing(island):
    apply(island, bundle(island, "1.0.0", "first.bundle"))
    store, path = island.fleet.store, island.path / "results.json"
    document = json.loads(path.read_bytes())
    envelope = json.loads(base64.b64decode(document["messages"][0]["payload"]))
    payload = json.loads(base64.b64decode(envelope["payload"]))
    payload["status"] = "diverged"
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    document["messages"][0]["payload"] = base64.b64encode(json.dumps(envelope).encode()).decode()
    path.write_text(json.dumps(document))
    (found,) = collect_results(store, [path], actor="test")
    assert found.refused == {"forged": 1}
    assert devices.describe(store, "d1").summary.status == "new"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(FleetError, match="no file of results"):
        collect_results(store, [path], actor="test")


def test_bundle_brings_the_managers_new_key_to_a_device_without_a_network(island):
    first = bundle(island, "1.0.0", "first.bundle")
    assert apply(island, first)[0] == 0
    folder, store = island.fleet.folder, island.fleet.store
    rotate_keys(folder, store, ("manager",), actor="test")
    new_id = key_id(ManagerKey(folder).read().public_key())

    def is_signed():
        with store.transaction() as session:
            return session.get(DesiredRow, "d1").key_id == new_id

    wait_for(is_signed, "the document by the new key")
    code, text = apply(island, bundle(island, "2.0.0", "second.bundle"))
    assert (code, installed(island)) == (0, "2.0.0"), text
    code, text = apply(island, first)
    assert code == SIGNATURE
    assert "signed by key" in text
    keys = ManagerKeys(island.home / "state" / "fleet", read_membership(island.home).enrolment.tuf_root)
    keys.follow(99, {})
    assert "no desired document yet" in island.run("fleet", "status")


def test_document_by_the_old_key_goes_into_no_bundle(island):
    bundle(island, "1.0.0", "first.bundle")
    with island.fleet.store.transaction() as session:
        session.get(DesiredRow, "d1").key_id = "an older one"
        session.flush()
    with pytest.raises(FleetError, match="has not signed its newest document"):
        write_bundle(
            *(island.fleet.folder, island.fleet.store, "r", "name=d1", island.path / "x"), actor="test"
        )
