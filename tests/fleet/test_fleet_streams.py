"""The streams that the fleet wants of a device, from the command to the device and back."""

import asyncio
import json

import pytest
from sqlalchemy import select
from tests.fleet.fleet_device import eventually
from tests.fleet.test_fleet_commands import run, run_json

from edgekit_fleet.operations.streams import set_stream
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.agent.documents import ReportedStream
from edgekit_runtime.errors import FleetError
from edgekit_runtime.protocol.streams import StreamOptions

CAMERA = "rtsp://me:secret@camera/1"
YARD = ("--model", "detector", "--source", CAMERA, "--sink", "mqtt://u:hidden@broker/yard", "--every", 2)


def test_stream_reaches_the_device_with_its_password_which_nobody_else_sees(fleet, capsys):
    folder = ("--folder", fleet.folder.path)

    async def connect():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        assert device.desired[-1].streams == {}
        output = [run(capsys, "stream", "set", "d1", "yard", *YARD, *folder).out]
        await eventually(lambda: device.desired[-1].streams)
        assert device.desired[-1].streams["yard"] == StreamOptions(
            model="detector", source=CAMERA, sinks=("mqtt://u:hidden@broker/yard",), every=2
        )
        stated = ReportedStream(model="detector", state="running", fps=9.5)
        device.report(streams={"yard": stated})
        await eventually(lambda: (fleet.detail("d1").reported or {}).get("streams"))
        output += [run(capsys, "stream", "list", "d1", *folder).out, run(capsys, "device", "d1", *folder).out]
        assert "yard  detector on rtsp://camera/1  running, 9.5 a second" in output[1]
        assert "detector on rtsp://camera/1" in " ".join(output[2].split())
        output += [json.dumps(run_json(capsys, "stream", "list", "d1", *folder))]
        output += [json.dumps(run_json(capsys, "device", "d1", *folder))]
        output += [json.dumps(run_json(capsys, "audit", "d1", *folder))]
        assert "secret" not in str(output)
        assert "hidden" not in str(output)
        held = device.desired[-1].version
        assert "wants no stream" in run(capsys, "stream", "remove", "d1", "yard", *folder).out
        await eventually(lambda: device.desired[-1].version > held)
        assert device.desired[-1].streams == {}
        await device.disconnect()

    asyncio.run(connect())
    with fleet.store.snapshot() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.action.startswith("device.stream"))).all()
        details = [(row.action, row.detail.get("source")) for row in rows]
    assert details == [("device.stream", "rtsp://camera/1"), ("device.stream-removed", None)]
    assert "wants no stream 'yard'" in run(capsys, "stream", "remove", "d1", "yard", *folder, code=19).err


def test_stream_beyond_a_limit_is_refused_and_nothing_is_changed(fleet):
    fleet.device("d1").enrol()
    with pytest.raises(FleetError, match="at most 8192"):
        set_stream(fleet.store, "d1", "yard", StreamOptions(model="m", source="x" * 9000), actor="test")
    with pytest.raises(FleetError, match="is no name"):
        set_stream(fleet.store, "d1", "a/b", StreamOptions(model="m", source="0"), actor="test")
    assert fleet.detail("d1").streams == {}
