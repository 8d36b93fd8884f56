"""`edgekit fleet demo`, as a user types it: whole in the long run, and ended in the middle."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.waiting import allow, wait_for

from edgekit_fleet.demo.director import wait_while_moving
from edgekit_fleet.demo.temporary_folder import remove

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("mosquitto")


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="ekd") as path:  # short: a Unix socket's path has 107 bytes
        yield Path(path)


def test_wait_goes_on_as_long_as_new_states_come_and_ends_a_minute_after_the_last_one():
    now_s = itertools.count(0.0, 20.0)
    states = iter(["one of 3", "two of 3", "two of 3", "three of 3"])
    assert wait_while_moving(lambda: next(states, "over") == "over", lambda: "same", lambda: 0.0) is None
    looked = itertools.count()
    moving = wait_while_moving(lambda: next(looked) == 20, lambda: f"{looked}", lambda: next(now_s))
    assert moving is None
    assert next(now_s) > 300
    flapping = itertools.cycle(["online", "offline"])
    assert wait_while_moving(lambda: False, lambda: next(flapping), lambda: next(now_s)) in {
        "online",
        "offline",
    }


def start(folder, *options):
    path = os.pathsep.join(
        str(ROOT / name) for name in ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
    )
    return subprocess.Popen(
        [sys.executable, "-m", "edgekit_cli", "fleet", "demo", *options],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def list_processes(folder):
    """Return the processes that know the demo's folder, by their command or their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            known = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if f"{folder}/".encode() in known:
            found.append(path.name)
    return found


def wait_gone(folder):
    wait_for(lambda: not list_processes(folder), "its processes to end")
    wait_for(lambda: not list(folder.iterdir()), "its folder to go")


def test_folder_is_removed_though_others_write_into_it_for_long(folder, monkeypatch):
    attempts, rmtree = itertools.count(), shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: next(attempts) < 100 or rmtree(folder / "demo"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (folder / "demo").mkdir()
    remove(folder / "demo")
    assert not (folder / "demo").exists()


@pytest.mark.long
def test_good_bad_and_cut_releases_end_with_all_devices_on_the_last_version(folder):
    allow(1200.0)
    with start(folder, "--json") as process:
        printed, errors = process.communicate(timeout=1100)
    assert process.returncode == 0, errors
    steps = [one["what"] for one in json.loads(printed)["steps"]]
    assert any("1.2.0: stopped by itself" in what for what in steps), steps
    assert "all are back on 1.1.0" in steps
    assert "network back: all 21 devices run 1.3.0" in steps
    assert steps[-1].endswith("calls, 0 failed")
    wait_gone(folder)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_demo_that_is_ended_in_the_middle_leaves_nothing(folder, number):
    with start(folder) as process:
        assert any("devices are online" in line for line in process.stdout)
        assert len(list_processes(folder)) > 2
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode
    wait_gone(folder)
