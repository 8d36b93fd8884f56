"""What `edgekit-device offload status` shows, to whom, and what it leaves behind."""

import json
import os
import stat
from pathlib import Path

import pytest

from edgekit_runtime.cli import main
from edgekit_runtime.offload import offload_status
from edgekit_runtime.offload.offload_options import OffloadOptions, find_options_file, write_offload_options
from edgekit_runtime.offload.offload_status import OffloadStatus, StatusFile, read_statuses


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(offload_status, "SYSTEM_CACHE", tmp_path / "none")


def write_status(model: str) -> StatusFile:
    file = StatusFile(1)
    file.write(
        OffloadStatus(
            model=model, process=os.getpid(), server="https://edge:8443", plan="raw", reason="it is faster"
        )
    )
    return file


def test_files_of_processes_that_ended_are_neither_shown_nor_kept(tmp_path: Path) -> None:
    write_status("alive")
    (path,) = (tmp_path / "cache" / "offload").iterdir()
    process, start, key = path.name.split("-")
    restarted = path.with_name(f"{process}-{int(start) - 1}-{key}")  # by a process of the same number
    ended = [path.with_name(f"0-{number}-1.json") for number in range(300)]
    for dead in (restarted, *ended):
        dead.write_bytes(path.read_bytes().replace(b"alive", b"dead"))
    assert [one["model"] for one in read_statuses()] == ["alive"]
    StatusFile(2)
    assert list(path.parent.iterdir()) == [path]


def test_sessions_of_the_service_are_shown_beside_those_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "system"))
    write_status("of the service")
    (path,) = (tmp_path / "system" / "offload").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) & 0o040  # its group may read it
    monkeypatch.setattr(offload_status, "SYSTEM_CACHE", tmp_path / "system")
    assert [one["model"] for one in read_statuses()] == ["of the service"]  # once, if both are one folder
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    write_status("of the user")
    assert [one["model"] for one in read_statuses()] == ["of the user", "of the service"]


def test_server_that_root_sets_can_be_read_by_the_service(tmp_path: Path) -> None:
    path = write_offload_options(OffloadOptions("https://edge:8443"))
    assert stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o055 == 0o055


@pytest.mark.parametrize("fault", ["malformed", "no token"])
def test_status_says_what_is_wrong_with_the_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    write_offload_options(OffloadOptions("https://edge:8443", token_file=str(tmp_path / "none")))
    if fault == "malformed":
        find_options_file().write_text("{")
    assert main(["offload", "status"]) == 0
    shown = capsys.readouterr().out
    assert "it cannot be used, so they run on this device" in shown
    assert ("offload.json" if fault == "malformed" else "none: the token") in shown
    assert main(["offload", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fault"] in shown
