"""A real broker, a real web server and a real manager; devices that behave, and devices that do not."""

import asyncio

from fleet_device import eventually
from sqlalchemy import select

from edgekit_fleet.manager.publisher import mark_due
from edgekit_fleet.store.tables import AuditRow, WantedModelRow
from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.dataclass_json import to_plain


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


def versions(device):
    return [[model.version for model in document.models] for document in device.desired]


def test_enrolled_device_gets_its_document_and_its_report_is_kept(fleet):
    async def run():
        device = fleet.device("d1", tags={"site": "lyon"}).enrol()
        await device.connect()
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
