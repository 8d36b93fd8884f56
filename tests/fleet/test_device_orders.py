"""Settings and logs of a device, from the command to the device and back."""

import asyncio
import base64
import threading
import zlib

import pytest
from sqlalchemy import select
from tests.fleet.fleet_device import eventually
from tests.fleet.test_fleet_commands import run, run_json

from edgekit_fleet.operations.device_orders import ask_for_logs, change_settings, find_log
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.agent.documents import Logs
from edgekit_runtime.agent.fleet_orders import pack_lines
from edgekit_runtime.errors import FleetError, RequestError


def test_settings_reach_the_device_and_their_effect_comes_back(fleet, capsys):
    folder = ("--folder", fleet.folder.path)

    async def connect():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        changes = ("--config", "month-mb=50", "--config", "power-w=12")
        run(capsys, "device", "d1", *changes, *folder)
        await eventually(lambda: device.desired[-1].settings == {"month-mb": "50", "power-w": "12"})
        device.report(settings={"month-mb": "", "power-w": "this device's owner has fixed it"})
        await eventually(lambda: (fleet.detail("d1").reported or {}).get("settings"))
        shown = " ".join(run(capsys, "device", "d1", *folder).out.split())
        assert "month-mb 50 in effect" in shown and "power-w=12 has no effect: this device's owner" in shown
        assert "has fixed it" in run(capsys, "why", "d1", *folder).out
        assert run_json(capsys, "device", "d1", "--config", "power-w=", *folder)["settings"] == {
            "month-mb": "50"
        }
        await eventually(lambda: device.desired[-1].settings == {"month-mb": "50"})
        await device.disconnect()

    asyncio.run(connect())
    assert "--config 'x'" in run(capsys, "device", "d1", "--config", "x", *folder, code=2).err
    refused = run(capsys, "device", "d1", "--config", "month-mb=all", *folder, code=19).err
    assert "month-mb is 'all', expected 0 to 1000000" in refused
    with fleet.store.snapshot() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.action == "device.settings")).all()
    assert [row.detail["settings"].get("power-w") for row in rows] == ["12", ""]


@pytest.mark.parametrize(
    "changes", [{"shell": ""}, {"month-mb": "nan"}, {"window": "all"}, {"power-w": "12;ls"}]
)
def test_wrong_setting_changes_nothing(fleet, changes):
    fleet.device("d1").enrol()
    with pytest.raises(FleetError, match=next(iter(changes))):
        change_settings(fleet.store, "d1", {"log-level": "debug", **changes}, actor="test")
    assert fleet.detail("d1").settings == {}


def test_lines_come_once_for_a_request_and_are_shown_as_text(fleet, capsys):
    folder = ("--folder", fleet.folder.path)

    async def connect():
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        shown = []
        command = threading.Thread(
            target=lambda: shown.append(run(capsys, "device", "d1", "--logs", 3, *folder).out)
        )
        command.start()
        await eventually(lambda: device.desired[-1].logs.request)
        request = device.desired[-1].logs
        assert request.lines == 3

        numbers = iter(range(10**6, 10**7))

        def send(text, request, source="memory"):
            logs = Logs(device="d1", sequence=next(numbers), request=request, text=text, source=source)
            device.send("logs", logs)

        send(pack_lines(["of another request"], 1), "0" * 16)
        send(pack_lines(["one", "\x1b[2J<script>two"], 3), request.request)
        await asyncio.to_thread(command.join)
        assert shown == ["one\n\ufffd[2J<script>two\n"]
        send(pack_lines(["a second answer"], 1), request.request)
        bomb = base64.b64encode(zlib.compress(bytes(10 << 20), 9)).decode()
        for text, refusal in ((bomb, ""), ("no base64", "the device sent lines that cannot be unpacked")):
            await eventually(lambda: ask(fleet))
            await eventually(lambda held=request: device.desired[-1].logs != held)
            assert find_log(fleet.store, "d1").text == ""
            request = device.desired[-1].logs
            send(text, request.request)
            await eventually(lambda: find_log(fleet.store, "d1").answered_at)
            log = find_log(fleet.store, "d1")
            assert log.refusal == refusal and len(log.text) == ((512 << 10) if text == bomb else 0)
        await device.disconnect()

    asyncio.run(connect())
    with fleet.store.snapshot() as session:
        rows = session.scalars(select(AuditRow).where(AuditRow.action == "device.logs")).all()
    assert [row.detail for row in rows] == [{"lines": 3}, {"lines": 10}, {"lines": 10}]
    with pytest.raises(FleetError, match="d2"):
        find_log(fleet.store, "d2")


def ask(fleet):
    try:
        return ask_for_logs(fleet.store, "d1", 10, actor="test")
    except RequestError:  # it was asked just now
        return None
