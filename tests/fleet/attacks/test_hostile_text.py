"""Text of devices and strangers in what commands print: it stays in its place and acts on no terminal."""

import time

import pytest

from edgekit_cli.cli import main
from edgekit_fleet.store import audit
from edgekit_fleet.store.attributes import replace_attributes
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import DesiredRow, DeviceRow, ExecutionRow

HOSTILE = "\x1b]0;t\x07\x1b[2J\x9b31m\r\nroot: ok\u202e\u2066\u2028\x7f"
ACTS = set(HOSTILE) - set("root: ok[]0;t2J31m\n")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKIT_FLEET", str(tmp_path / "fleet"))
    folder = FleetFolder(tmp_path / "fleet")
    folder.write_settings(FleetSettings())
    store = folder.open_store()
    with store.transaction() as session:
        session.add(
            DeviceRow(
                name="d1",
                target=HOSTILE,
                tags={},
                public_key=b"",
                certificate_serial="1",
                certificate_expires_at=4e9,
                enrolled_at=0.0,
                status=HOSTILE[:16],
                because=HOSTILE,
                facts={HOSTILE: HOSTILE},
                reported={"models": [{"model": HOSTILE, "version": HOSTILE}]},
                pinned={HOSTILE: HOSTILE},
            )
        )
        session.flush()
        session.add(DesiredRow(device="d1"))
        session.add(
            ExecutionRow(
                execution="e1",
                device="d1",
                model=HOSTILE,
                version=HOSTILE,
                state=HOSTILE[:16],
                reason=HOSTILE,
                code=HOSTILE,
                created_at=1.0,
                changed_at=time.time(),
            )
        )
        replace_attributes(session, {"d1": {HOSTILE: HOSTILE}})
        for action in ("device.event", "alarm.forged", HOSTILE):
            audit.record(session, HOSTILE, action, "d1", kind=HOSTILE, text=HOSTILE)
    store.close()
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["devices"],
        ["device", "d1"],
        ["why", "d1"],
        ["audit"],
        ["tag", "d1", "site=lyon"],
        ["rollout", "list"],
    ],
)
def test_text_of_a_device_acts_on_no_terminal(folder, capfd, words):
    main(["fleet", *words])
    output = capfd.readouterr()
    assert "d1" in output.out or words[0] == "rollout"
    assert not ACTS & set(output.out + output.err)
    assert not any(line.strip() == "root: ok" for line in output.out.splitlines())
