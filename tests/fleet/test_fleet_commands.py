"""`edgekit fleet`, as a user types it."""

import asyncio
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fleet.conftest import Fleet
from tests.fleet.fleet_device import eventually
from tests.fleet.new_fleet import copy_new_fleet
from tests.free_port import free_port

from edgekit_cli.cli import main
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

ROOT = Path(__file__).resolve().parents[2]


def run(capsys, *arguments, code=0):
    assert main(["fleet", *map(str, arguments)]) == code
    return capsys.readouterr()


def run_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json").out)


def list_libraries():
    """Return the import name of each requirement of the extra `fleet`."""
    extra = (ROOT / "host" / "pyproject.toml").read_text().partition("\nfleet = [\n")[2].partition("\n]")[0]
    names = set(re.findall(r'^ *"([\w-]+)', extra, re.MULTILINE))
    modules = importlib.metadata.packages_distributions().items()
    return {name: module for module, owners in modules for name in map(str.lower, owners) if name in names}


def test_each_missing_library_is_named_with_the_command_that_installs_it(tmp_path, capsys, monkeypatch):
    find_spec, libraries = importlib.util.find_spec, list_libraries()
    assert {"paho-mqtt": "paho", "tuf": "tuf"}.items() <= libraries.items()
    for missing in libraries.values():
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest, missing=missing: None if name == missing else find_spec(name, *rest),
        )
        error = run(capsys, "devices", "--folder", tmp_path, code=17).err
        assert f"{missing} is missing; install what a fleet needs: pip install edgekit[fleet]" in error


def test_up_starts_all_once_and_ctrl_c_ends_all(tmp_path, mosquitto, capsys):
    ports = ("--broker-port", str(free_port()), "--web-port", str(free_port()))
    ports += ("--console-port", str(free_port()))
    command = [
        sys.executable,
        "-m",
        "edgekit_cli",
        "fleet",
        "up",
        "--folder",
        str(tmp_path / "f"),
        *ports,
    ]
    path = os.pathsep.join(
        str(ROOT / name) for name in ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
    )
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
    )
    try:
        facts = json.loads(process.stdout.readline())
        assert facts["broker"] == f"mqtts://127.0.0.1:{ports[1]}"
        assert facts["console"] == f"http://127.0.0.1:{ports[5]}"
        second = run(capsys, "up", "--folder", tmp_path / "f", code=12).err
        assert second.startswith("edgekit: another manager (") and "stop it, or wait 3 s" in second
        elsewhere = ("--folder", tmp_path / "g", "--broker-port", free_port(), "--web-port", ports[3])
        taken = run(capsys, "up", *elsewhere, code=16).err
        assert taken == (
            f"edgekit: the web server cannot listen on 127.0.0.1:{ports[3]}: Address already in use;"
            " choose another port with --web-port\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_device_is_invited_listed_tagged_and_explained(fleet, capsys):
    folder = ("--folder", fleet.folder.path)
    assert "has a code" not in run(capsys, "why", "d1", *folder, code=19).err
    run(capsys, "enroll", "--name", "d2", *folder)
    assert "has not used it yet" in run(capsys, "why", "d2", *folder, code=19).err

    async def connect():
        device = fleet.device("d1", tags={"site": "lyon"}).enrol()
        assert "never connected" in run_json(capsys, "why", "d1", *folder)["why"]
        await device.connect()
        await eventually(lambda: device.desired)
        device.report(status="converged")
        device.report(status="converged")
        await eventually(lambda: fleet.detail("d1").summary.status == "converged")
        await device.disconnect()

    asyncio.run(connect())
    names = [each["name"] for each in run_json(capsys, "devices", "site=lyon", *folder)]
    assert names == ["d1"]
    assert run_json(capsys, "devices", "site=paris", *folder) == []
    run(capsys, "device", "d1", "--tag", "site=paris", *folder)
    assert len(run_json(capsys, "devices", "site=paris", *folder)) == 1
    assert run_json(capsys, "why", "d1", *folder)["why"].startswith("d1 runs no model")
    written = [each["action"] for each in run_json(capsys, "audit", "d1", *folder)]
    assert written == ["device.invite", "device.enrol", "device.tag"]


def test_command_without_a_fleet_names_the_next_step(tmp_path, capsys):
    assert "edgekit fleet up" in run(capsys, "devices", "--folder", tmp_path, code=17).err


@pytest.mark.parametrize("name", ["up", "enroll", "devices", "device", "why", "audit", "doctor", "backup"])
def test_help_explains_each_command(capsys, name):
    assert "Usage: edgekit fleet" in run(capsys, name, "--help").out


def test_old_backup_takes_the_numbers_of_devices_over(fleet_settings, tmp_path, capsys):
    folder, settings = fleet_settings
    saved = tmp_path / "fleet.backup"

    async def first(fleet):
        device = fleet.device("d1").enrol()
        await device.connect()
        await eventually(lambda: device.desired)
        run(capsys, "backup", saved, "--folder", folder.path)
        await device.disconnect()
        return device

    with Fleet(folder, settings).up() as fleet:
        device = asyncio.run(first(fleet))
    again = tmp_path / "again"
    run(capsys, "restore", saved, "--folder", again)
    assert "not empty" in run(capsys, "restore", saved, "--folder", again, code=17).err

    async def second():
        device.desired.clear()
        await device.connect(held=9)  # the lost store had come so far
        await eventually(lambda: [each.version for each in device.desired][-1:] == [10])
        await device.disconnect()

    with Fleet(FleetFolder(again), settings).up() as fleet:
        asyncio.run(second())
        assert "alarm.restored" in run(capsys, "audit", "d1", "--folder", again).out


def test_file_that_is_no_backup_is_refused(tmp_path, capsys):
    path = tmp_path / "x"
    path.write_bytes(b"nothing")
    assert "no backup" in run(capsys, "restore", path, "--folder", tmp_path / "f", code=17).err


def test_user_gets_a_second_factor_and_loses_it(tmp_path, capsys, monkeypatch):
    made = copy_new_fleet(tmp_path / "f")
    made.write_settings(FleetSettings())
    folder = ("--folder", made.path)
    monkeypatch.setattr("sys.stdin", io.StringIO("correct horse battery\n"))
    run(capsys, "user", "add", "ann", "--role", "admin", *folder)
    output = run(capsys, "user", "second-factor", "ann", *folder).out
    assert "otpauth://totp/edgekit:ann?secret=" in output
    assert output.count("-") >= 8 * 3
    assert "remove it first" in run(capsys, "user", "second-factor", "ann", *folder, code=19).err
    run(capsys, "user", "second-factor", "ann", "--remove", *folder)
    assert len(run_json(capsys, "user", "second-factor", "ann", *folder)["recovery_codes"]) == 8
