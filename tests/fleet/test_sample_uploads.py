"""Samples from devices: taken whole, resumed, refused; floods and poison."""

import asyncio
import contextlib
import dataclasses
import http.client
import threading
import time

import pytest
from sqlalchemy import select, update
from tests.fleet.fleet_device import eventually
from tests.fleet.sample_site import SampleSite

from edgekit_fleet.operations import devices, samples
from edgekit_fleet.operations.samples import SampleChoice
from edgekit_fleet.samples.deletion import delete_unwanted
from edgekit_fleet.store.tables import AuditRow, SampleOrderRow, SampleRow
from edgekit_runtime.agent.artifacts.download import DownloadLimits
from edgekit_runtime.agent.artifacts.upload import SampleLink, send_samples
from edgekit_runtime.errors import FleetError, NotFoundError
from edgekit_runtime.protocol.samples import MAX_SEALED_BYTES
from edgekit_runtime.samples.folder import SampleFolder


@pytest.fixture
def site(tmp_path):
    with SampleSite(tmp_path / "fleet").serve() as site:
        yield site


def count_samples(site):
    with site.store.snapshot() as session:
        return len(session.scalars(select(SampleRow.id)).all())


def list_actions(site, beginning):
    with site.store.snapshot() as session:
        statement = select(AuditRow).where(AuditRow.action.startswith(beginning)).order_by(AuditRow.number)
        return [(row.actor, row.action, row.subject) for row in session.scalars(statement)]


def test_sample_that_was_acknowledged_is_in_the_vault_as_it_came(site):
    sender, order = site.sender("d1"), site.order()
    sample_id, sealed = sender.seal(order, content=b"\xff\xd8 picture", answer={"top": [{"label": "cat"}]})
    assert sender.head(sample_id) == (404, None)
    assert sender.put(sample_id, sealed).status == 201
    assert sender.head(sample_id) == (200, None)
    assert sender.put(sample_id, sealed).status == 201  # the answer was lost
    path = site.folder.path / "samples" / sample_id[:2] / sample_id
    assert path.read_bytes() == sealed
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(site.vault.incoming.glob("*/*"))
    summary, sample = samples.read(site.store, site.vault, sample_id, actor="ann")
    assert (summary.device, summary.triggers, summary.probability) == ("d1", ("uncertain",), 0.25)
    assert (sample.input, sample.answer) == (b"\xff\xd8 picture", {"top": [{"label": "cat"}]})
    assert ("ann", "sample.read", sample_id) in list_actions(site, "sample.")


def test_agent_sends_its_samples_in_parts_also_after_a_lost_answer(site, tmp_path):
    sender, order = site.sender("d1"), site.order()
    folder = SampleFolder(tmp_path / "samples")
    sealed = dict(sender.seal(order, number, content=bytes(size)) for number, size in ((1, 10), (2, 200_000)))
    for sample_id, content in sealed.items():
        folder.write("detector", (order.id, "random"), sample_id, content)
    first = min(sealed)
    assert sender.put(first, sealed[first]).status == 201  # and the agent was killed before it heard
    stop, counts = threading.Event(), []
    web = f"https://{site.settings.web_address}"
    link = SampleLink(web, sender.context, DownloadLimits(), count=counts.append, stop=stop)
    assert send_samples(folder.list_samples(), folder, link.ask, stop=stop) == 2
    link.close()
    assert folder.list_samples() == []
    assert [site.vault.read(sample_id).input for sample_id in sealed] == [bytes(10), bytes(200_000)]
    assert count_samples(site) == 2


def test_cut_upload_goes_on_where_it_ended(site):
    sender, order = site.sender("d1"), site.order()
    sample_id, sealed = sender.seal(order, content=bytes(100_000))
    first = sender.put(sample_id, sealed, 0, 40_000)
    assert (first.status, first.headers["upload-offset"]) == (202, "40000")
    assert sender.head(sample_id) == (204, "40000")
    elsewhere = sender.put(sample_id, sealed, 50_000)
    assert (elsewhere.status, elsewhere.headers["upload-offset"]) == (409, "40000")
    assert sender.put(sample_id, sealed, 40_000).status == 201
    assert site.vault.read(sample_id).input == bytes(100_000)


def test_resumed_upload_with_other_bytes_is_refused_and_forgotten(site):
    sender, order = site.sender("d1"), site.order()
    sample_id, sealed = sender.seal(order, content=bytes(50_000))
    _, other = sender.seal(order, content=b"\1" * 50_000)
    assert sender.put(sample_id, sealed, 0, 20_000).status == 202
    assert sender.put(sample_id, other, 20_000).status == 422
    assert sender.head(sample_id) == (404, None)
    assert count_samples(site) == 0
    assert list_actions(site, "alarm.sample") == [("web", "alarm.sample-refused", "d1")]
    assert sender.put(sample_id, sealed, 0, 20_000).status == 202
    larger = other + b"more"
    assert sender.put(sample_id, larger, 20_000).status == 409  # another size is another file
    assert sender.put(sample_id, sealed).status == 201


def test_only_devices_with_an_order_may_send(site):
    lyon = site.sender("d1", tags={"site": "lyon"})
    nice = site.sender("d2", tags={"site": "nice"})
    sample_id, sealed = lyon.seal(dataclasses.replace(site.order(), id="s-none"), number=9)
    assert lyon.put(sample_id, sealed).status == 422  # of no order
    order = site.order(selector="site=lyon")
    stopped = next(row for row in samples.read_status(site.store).orders if row.id != order.id)
    samples.stop(site.store, stopped.id, actor="ann")
    sample_id, sealed = lyon.seal(order)
    assert nice.put(sample_id, sealed).status == 403
    assert lyon.put(sample_id, sealed).status == 201
    assert nice.put(sample_id, sealed).status == 403
    devices.tag(site.store, "d2", {"site": "lyon"}, "ann")
    assert nice.put(sample_id, sealed).status == 403  # it is of another device
    assert nice.head(sample_id)[0] == 403
    assert nice.put(*nice.seal(order, 2)).status == 201
    samples.switch(site.store, site.vault, is_on=False, days=30, max_bytes=1 << 30, actor="ann")
    assert lyon.put(*lyon.seal(order, 3)).status == 403


def test_clients_without_a_valid_certificate_are_refused(site):
    sender, stranger, order = site.sender("d1"), site.sender("d2"), site.order()
    sample_id, sealed = sender.seal(order)
    assert sender.put(sample_id, sealed, certificate=False).status == 401
    devices.revoke(site.store, "d2", "ann", "stolen")
    assert stranger.put(sample_id, sealed).status == 403
    renewed = site.device("d2").enrol()
    assert renewed.name == "d2"
    assert stranger.put(sample_id, sealed).status == 403  # the name is of another key now
    assert count_samples(site) == 0
    assert site.get("/authority")[0] == 200  # others need no certificate


@pytest.mark.parametrize(
    ("sample_id", "status"),
    [
        ("..%2F..%2Ffleet.json", 404),
        ("%2e%2e", 404),
        ("A" * 32, 404),
        ("0" * 31, 404),
        ("0" * 32 + "%0a", 404),
    ],
)
def test_identifier_cannot_be_a_path(site, sample_id, status):
    sender, order = site.sender("d1"), site.order()
    before = sorted(site.folder.path.rglob("*"))
    _, sealed = sender.seal(order)
    assert sender.put(sample_id, sealed).status == status
    assert [path for path in sorted(site.folder.path.rglob("*")) if path not in before] == []


def test_poisoned_samples_are_refused(site):
    sender, order = site.sender("d1"), site.order()
    sample_id, sealed = sender.seal(order)
    stranger = dataclasses.replace(order, model="another")
    poisoned = {
        "not sealed": b"\x04" + bytes(200),
        "no sample": sender.seal_bytes(sample_id, b"no sample at all"),
        "cut": sealed[:-1],
        "other identifier": sender.seal(order, 2)[1],
        "other model": sender.seal(stranger)[1],
        "unknown trigger": sender.seal(order, triggers=("<script>",))[1],
    }
    for content in poisoned.values():
        assert sender.put(sample_id, content).status == 422
    huge = f"bytes 0-9/{MAX_SEALED_BYTES + 1}"
    assert sender.request("PUT", sample_id, b"0" * 10, **{"Content-Range": huge}).status == 413
    longer = sender.request("PUT", sample_id, b"0" * 5000, **{"Content-Range": "bytes 0-9/20"})
    assert longer.status == 413
    for text in ("", "bytes 5-4/10", "bytes 0-10/10", "bytes -5-4/10", "bytes 0-/10", "bytes 0-9/1e9"):
        assert sender.request("PUT", sample_id, b"0", **{"Content-Range": text}).status == 400
    assert count_samples(site) == 0


def test_what_waits_for_a_stopped_order_is_refused_without_an_alarm(site):
    sender, stopped, order = site.sender("d1"), site.order(), site.order()
    sample_id, sealed = sender.seal(stopped)
    assert sender.put(sample_id, sealed, 0, 100).status == 202
    samples.stop(site.store, stopped.id, actor="ann")
    assert sender.put(sample_id, sealed, 100).status == 410
    assert not list(site.vault.incoming.glob("*/*"))
    assert list_actions(site, "alarm.") == []
    assert sender.put(*sender.seal(order, 2)).status == 201


def test_sample_of_another_device_is_not_overwritten_by_an_upload_under_way(site):
    sender, thief, order = site.sender("d1"), site.sender("d2"), site.order()
    sample_id, sealed = sender.seal(order)
    _, other = thief.seal(order, content=b"of a thief")
    connection = http.client.HTTPSConnection("127.0.0.1", site.settings.web_port, context=thief.context)
    with contextlib.closing(connection):
        connection.putrequest("PUT", f"/samples/{sample_id}")
        connection.putheader("Content-Range", f"bytes 0-{len(other) - 1}/{len(other)}")
        connection.putheader("Content-Length", str(len(other)))
        connection.endheaders(other[:-1])
        asyncio.run(eventually(lambda: list(site.vault.incoming.glob("d2/*"))))
        assert sender.put(sample_id, sealed).status == 201
        connection.send(other[-1:])
        assert connection.getresponse().status == 403
    assert site.vault.read(sample_id).input == b"a picture"
    assert not list(site.vault.incoming.glob("*/*"))


def test_flood_of_requests_is_refused_and_alarmed_once(tmp_path):
    with SampleSite(tmp_path / "fleet").serve(requests=5) as site:
        sender, other, order = site.sender("d1"), site.sender("d2"), site.order()
        statuses = [sender.head(f"{number:032x}")[0] for number in range(9)]
        assert statuses.count(429) >= 1  # a minute may begin in between
        assert list_actions(site, "alarm.sample") == []  # an agent waits now
        for number in range(20):
            sender.head(f"{number:032x}")
        assert other.put(*other.seal(order)).status == 201
        assert list_actions(site, "alarm.sample") == [("web", "alarm.sample-flood", "d1")]


def test_device_sends_as_many_samples_as_its_order_allows(site):
    sender, order = site.sender("d1"), site.order(per_day=0.001)
    statuses = [sender.put(*sender.seal(order, number)).status for number in range(1, 13)]
    assert statuses == [201] * 11 + [429]  # ten more than the rate
    small = site.order(max_bytes=1000)
    with site.store.transaction() as session:
        session.execute(update(SampleOrderRow).where(SampleOrderRow.id == order.id).values(stopped_at=1.0))
    refused = sender.put(*sender.seal(small, 99, content=bytes(2000)))
    assert (refused.status, refused.headers["retry-after"]) == (429, "3600")
    assert sender.put(*sender.seal(small, 100)).status == 201


def test_full_fleet_takes_no_more(site):
    sender, order = site.sender("d1"), site.order()
    samples.switch(site.store, site.vault, is_on=True, days=30, max_bytes=100, actor="ann")
    assert sender.put(*sender.seal(order)).status == 503
    assert ("web", "alarm.samples-full", "samples") in list_actions(site, "alarm.")


def test_oldest_incomplete_upload_makes_room(tmp_path):
    with SampleSite(tmp_path / "fleet").serve(parts=2) as site:
        sender, order = site.sender("d1"), site.order()
        for number in (1, 2, 3):
            assert sender.put(*sender.seal(order, number), 0, 50).status == 202
        assert len(list(site.vault.incoming.glob("d1/*"))) == 2


def test_samples_go_by_request_with_their_days_and_with_their_device(site):
    first, second, order = site.sender("d1"), site.sender("d2"), site.order()
    for sender, number in ((first, 1), (first, 2), (second, 3), (second, 4)):
        assert sender.put(*sender.seal(order, number)).status == 201
    with pytest.raises(FleetError, match="which samples"):
        samples.delete(site.store, site.vault, SampleChoice(), actor="ann")
    assert samples.delete(site.store, site.vault, SampleChoice(ids=(f"{1:032x}",)), actor="ann") == 1
    with pytest.raises(NotFoundError):
        samples.read(site.store, site.vault, f"{1:032x}", actor="ann")
    with site.store.transaction() as session:
        session.execute(update(SampleRow).where(SampleRow.id == f"{2:032x}").values(received_at=1.0))
    assert delete_unwanted(site.store, site.vault, time.time()) == 1
    assert second.put(*second.seal(order, 5), 0, 100).status == 202
    devices.revoke(site.store, "d2", "ann", "sold")
    assert delete_unwanted(site.store, site.vault, time.time()) == 2
    assert count_samples(site) == 0
    files = [path for path in (site.folder.path / "samples").rglob("*") if path.is_file()]
    assert files == []
    assert [action for _, action, _ in list_actions(site, "sample.delete")] == ["sample.delete"] * 3


def test_sample_whose_row_an_interruption_cut_off_goes_with_its_upload(site):
    sender, order = site.sender("d1"), site.order()
    sample_id, sealed = sender.seal(order)
    assert sender.put(sample_id, sealed, 0, 100).status == 202
    site.vault.put(sample_id, sealed)  # and the manager was killed
    assert delete_unwanted(site.store, site.vault, time.time()) == 0
    assert site.vault.read(sample_id).input == b"a picture"
    assert delete_unwanted(site.store, site.vault, time.time() + 8 * 86_400) == 0
    assert [path for path in (site.folder.path / "samples").rglob("*") if path.is_file()] == []


def test_samples_are_off_until_an_administrator_turns_them_on(tmp_path):
    site = SampleSite.__base__(tmp_path / "fleet")
    triggers = samples.parse_triggers("random")
    with pytest.raises(FleetError, match="edgekit fleet samples on"):
        samples.start(
            site.store, samples.StartSamples(model="m", selector="all", triggers=triggers), actor="ann"
        )
    assert not samples.read_status(site.store).is_on
    assert not (site.folder.identity / "samples.pem").exists()
    site.store.close()
