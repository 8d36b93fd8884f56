"""Power cuts of a device's real code on a real file system, by the command of the benchmark."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("onnx")

from tests.hil.power_cuts.mounts import find_obstacle

ROOT = Path(__file__).parents[2]
FOLDERS = ("device_runtime", "host", "toolkit", "fleet", "hil", ".")
LIMIT_S = 30.0

pytestmark = pytest.mark.skipif(find_obstacle() is not None, reason=find_obstacle() or "")


def start(*words, **options):
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in FOLDERS)}
    argv = [sys.executable, "-m", "benchmarks.power_cuts", *words]
    return subprocess.Popen(argv, cwd=ROOT, env=variables, text=True, **options)


def run(tmp_path, *words, one_in=13):
    """Return the exit code of the command, and what it wrote."""
    out = tmp_path / "out.json"
    options = ["--json", str(out), "--recordings", "1", "--cuts", "1"]  # those at flushes, all the same
    options += ["--one-in", str(one_in)]
    process = start(*options, *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = process.communicate()
    assert out.exists(), printed
    return process.returncode, json.loads(out.read_text())


@pytest.fixture(scope="module")
def one_in(pytestconfig):
    """Try each cut in the long run; else each 13th: a flush has five, so all kinds have their turn."""
    return 1 if pytestconfig.getoption("--long") else 13


@pytest.fixture(scope="module")
def whole(tmp_path_factory, one_in):
    """The folder of a run with all that it keeps, and what `run` returned."""
    folder = tmp_path_factory.mktemp("whole")
    words = ("--finish-every", "100" if one_in == 1 else "10", "--folder", str(folder / "kept"))
    return folder, *run(folder, *words, one_in=one_in)


def test_power_cut_at_any_instant_leaves_a_version_that_was_allowed(whole, one_in):
    _, code, found = whole
    assert (code, found["bad"]) == (0, [])
    assert found["cuts"] >= 1000 // one_in
    assert set(found["runs"]) == {"slots", "download and install", "delta and install"}
    for one in found["runs"].values():
        assert one["flushes"] >= 40
        for count in one["counts"].values():  # each, in each way
            assert count >= one["flushes"] // one_in - 1
        assert one["finished"] >= 2


@pytest.mark.parametrize(
    "left_out", ["file-syncs", "folder-syncs", pytest.param("syncs", marks=pytest.mark.long)]
)
def test_power_cut_of_code_that_forgets_syncs_is_found(left_out, tmp_path):
    code, found = run(tmp_path, "--run", "slots", "--leave-out", left_out)
    assert code == 1
    assert any("starts" in line or "no version" in line for line in found["bad"])


def test_interrupted_command_goes_on_with_what_is_left(whole, tmp_path, one_in):
    folder, _, found = whole
    (results,) = (folder / "kept").glob("slots-*/*.jsonl")
    lines = results.read_text().splitlines(keepends=True)
    results.write_text("".join(lines[:-1]) + lines[-1][:20])  # interrupted in mid-write
    words = ("--finish-every", "100" if one_in == 1 else "10", "--folder", str(folder / "kept"))
    _, again = run(tmp_path, "--run", "slots", *words, one_in=one_in)
    assert again["runs"]["slots"] == found["runs"]["slots"]
    assert sorted(results.read_text().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize("stage", ["recording", "replay"])
def test_killed_command_leaves_no_mount_loop_device_or_daemon(stage, tmp_path):
    process = start("--run", "slots", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        family, loops = wait_for(lambda: find_stage(process.pid, stage), process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in family))
    wait_for(lambda: not any(is_ours(loop) for loop in loops))


def wait_for(condition, process=None):
    end_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert process is None or process.poll() is None, "the command has ended"
        assert process is not None or time.monotonic() < end_s, "it takes too long"
        time.sleep(0.005)
    return found


def find_stage(pid, stage):
    """Return the processes of a command and its loop devices, once it has both and is at that stage."""
    family = [pid, *list_children(pid)]
    has_daemon = any(read(f"/proc/{one}/comm").startswith("qemu-storage") for one in family)
    loops = {loop for one in family for loop in list_loops(one) if is_ours(loop)}
    return (family, loops) if loops and has_daemon == (stage == "recording") else None


def list_children(pid):
    """Return the children of a process, and theirs."""
    children = [int(each) for each in read(f"/proc/{pid}/task/{pid}/children").split()]
    return [one for child in children for one in (child, *list_children(child))]


def list_loops(pid):
    try:
        targets = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # it has just ended
        return set()
    return {Path(target).name for target in targets if re.fullmatch(r"/dev/loop\d+", target)}


def is_ours(loop):
    """Return whether a loop device has one of the files of the command."""
    return re.search(r"/(export|disk)$", read(f"/sys/block/{loop}/loop/backing_file").strip()) is not None


def is_running(pid):
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""
