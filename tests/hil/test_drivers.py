"""The same tests for each driver that runs commands and moves files, whatever it drives."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hil.ssh_board import SshBoard, run_ssh_board
from tests.waiting import is_running, wait_for

import edgekit_runtime
from edgekit_hil.benches.bench_file import find_bench, read_bench
from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench, open_bench
from edgekit_hil.drivers.own_folder import make_folder
from edgekit_runtime.errors import BenchError, BenchUnavailableError


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshBoard]:
    with run_ssh_board(tmp_path_factory.mktemp("board")) as board:
        yield board


# The tests of `.ci/run` on the booted machine use the same driver: only the long run boots another one.
BENCHES = [
    *("constrained", "local", "ssh", "arm64-userland"),
    pytest.param("arm64-booted", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=BENCHES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as environment, contextlib.ExitStack() as held:
        environment.setenv("EDGEKIT_HOME", str(folder))
        if request.param == "ssh":
            file = read_bench(request.getfixturevalue("board").write_bench(folder / "bench.yaml"))
        elif request.param == "constrained":
            file = read_bench(write_fast_bench(folder / "bench.yaml"))
        else:
            file = find_bench(request.param)
        try:
            bench = held.enter_context(open_bench(file))
        except BenchUnavailableError as error:
            pytest.skip(str(error))
        yield bench


def write_fast_bench(path: Path) -> Path:
    """Write the constrained bench with most of a processor: what it does not get, its emulation burns."""
    text = find_bench("constrained").path.read_text()
    assert "processor_share: 0.25" in text
    path.write_text(text.replace("processor_share: 0.25", "processor_share: 0.95"))
    return path


@pytest.fixture(scope="module")
def device(bench: Bench) -> Iterator[Device]:
    """Return the device with a folder for all tests; no snapshot is restored for each: that takes long."""
    drivers = (bench.target.get_active_driver(f"{name}Protocol") for name in ("Command", "FileTransfer"))
    device = Device(*drivers, f"{bench.home}/drivers", bench.file.settings.python)
    yield device
    device.close()


def test_command_returns_output_errors_and_exit_code(device: Device) -> None:
    result = device.try_run("echo 'two  blanks'; echo 'second $line'; echo wrong >&2; exit 3")

    assert (result.exit_code, result.output, result.errors) == (3, "two  blanks\nsecond $line", "wrong")


def test_command_begins_in_a_folder_of_its_own_without_our_environment(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_MACHINE", "1")

    assert device.run("pwd; echo $OF_THIS_MACHINE; echo $EDGEKIT_STATE").splitlines() == [
        device.folder,
        "",
        f"{device.folder}/state",
    ]


def test_failed_command_raises_with_what_it_said(device: Device) -> None:
    with pytest.raises(BenchError, match=r"`ls none` ended with 2 on the device: .*none"):
        device.run("ls none")


def test_command_over_its_time_raises_and_the_device_goes_on(device: Device) -> None:
    begun_s = time.monotonic()
    with pytest.raises(BenchError, match="within 1 s"):
        device.run("sleep 30", 1)

    assert time.monotonic() - begun_s < 20
    assert device.run("echo still") == "still"


def test_large_output_and_foreign_bytes_arrive(device: Device) -> None:
    text = device.run("seq 200000")

    assert text.endswith("\n199999\n200000")
    assert device.run("printf 'k\\303\\266ln'") == "k\u00f6ln"


def test_file_goes_there_and_back_unchanged(device: Device, tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    (tmp_path / "there").write_bytes(content)

    remote = device.put(tmp_path / "there", "with-a-name")
    device.get("with-a-name", tmp_path / "back")

    assert remote == f"{device.folder}/with-a-name"
    assert (tmp_path / "back").read_bytes() == content
    with pytest.raises(BenchError, match="none cannot be copied from the device"):
        device.get("none", tmp_path / "back")


def test_started_command_goes_on_until_it_is_stopped(device: Device) -> None:
    pid = device.start("sleep 300", "log")
    assert device.try_run(f"kill -0 {pid}").exit_code == 0

    device.stop(pid)

    assert device.try_run(f"kill -0 {pid}").exit_code == 1


def test_closed_device_leaves_no_process_and_no_folder(bench: Bench) -> None:
    with bench.open_folder("left", "a test") as device:
        pid = device.start("sleep 300", "log")

    with bench.open_folder("other", "a test") as other:
        assert other.try_run(f"kill -0 {pid}").exit_code == 1
        assert other.try_run(f"test -e {device.folder}").exit_code == 1


def test_program_finds_the_runtime(device: Device) -> None:
    assert device.run_python("import sys, edgekit_runtime; print(*sys.argv[1:])", "a b", "$c") == "a b $c"
    assert device.edgekit("status")["models"] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "aarch64"}, "the device is x86_64, and .* expects aarch64: check the address"),
        ({"python": "python9"}, "`python9` on the device does not start.*name another one as `python:`"),
        ({"python": "/usr/bin/env -i python3"}, "has no edgekit"),
        ({"address": "127.0.0.2"}, "127.0.0.2 does not answer on port .*refused. Is the device on"),
    ],
)
def test_unsuitable_device_is_refused_with_the_reason(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    file = read_bench(board.write_bench(tmp_path / "bench.yaml", **settings))

    with pytest.raises(BenchUnavailableError, match=message), open_bench(file):
        pass


def test_programs_that_a_killed_run_left_on_a_board_end_with_the_next_run(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    file = read_bench(board.write_bench(tmp_path / "bench.yaml"))
    with open_bench(file) as bench:
        drivers = (bench.target.get_active_driver(f"{name}Protocol") for name in ("Command", "FileTransfer"))
        device = Device(*drivers, f"{bench.home}/killed", bench.file.settings.python)
        left = device.start("sleep 600", "log")
        other = int(device.run("cd /tmp; nohup sleep 600 >/dev/null 2>&1 & echo $!"))  # not ours
    try:
        assert is_running(left)

        with open_bench(file):
            pass

        wait_for(lambda: not is_running(left), "the program that was left to end")
        assert is_running(other)
    finally:
        os.kill(other, signal.SIGKILL)


def test_device_with_another_runtime_than_this_one_is_refused(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    ours = Path(edgekit_runtime.__file__).parent
    shutil.copytree(ours, tmp_path / ours.name, ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    file = read_bench(board.write_bench(tmp_path / "bench.yaml", python=str(python)))
    with open_bench(file):
        pass  # an equal copy is the same

    module = tmp_path / ours.name / "slots" / "store.py"
    module.write_text(f"{module.read_text()}# changed\n")

    with pytest.raises(BenchUnavailableError, match="has another edgekit than this one"), open_bench(file):
        pass


def test_full_disk_is_refused_with_the_reason(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setattr("edgekit_hil.benches.opening.LEAST_FREE_BYTES", 1 << 60)
    file = read_bench(board.write_bench(tmp_path / "bench.yaml"))

    with pytest.raises(BenchUnavailableError, match=r"MiB are free in .* the tests need"), open_bench(file):
        pass


def test_wrong_key_is_refused_with_the_reason(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    path = board.write_bench(tmp_path / "bench.yaml")
    path.write_text(path.read_text().replace(str(board.key), str(tmp_path / "other")))

    with pytest.raises(BenchUnavailableError, match="Permission denied"), open_bench(read_bench(path)):
        pass


def test_folder_and_programs_of_a_killed_run_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    killed = (
        "import subprocess, time\n"
        "from edgekit_hil.drivers.own_folder import make_folder\n"
        "folder = make_folder('test')\n"
        "left = subprocess.Popen(['sleep', '600'], cwd=folder, start_new_session=True)\n"
        "print(folder, left.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", killed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        folder, pid = owner.stdout.readline().split()
        assert make_folder("test").exists()
        assert Path(folder).exists()  # its owner runs
        owner.send_signal(signal.SIGKILL)

    ours = make_folder("test")

    assert not Path(folder).exists()
    wait_for(lambda: not is_running(int(pid)), "the program that it left behind to end")
    assert ours.exists()


class LostLink:
    """A driver of a shell whose link breaks after the first command, as labgrid's SSHDriver reports it."""

    def __init__(self) -> None:
        self._replies = [([], [], 0)]

    def run(self, *_: object, **__: object) -> tuple[list[str], list[str], int]:
        return self._replies.pop() if self._replies else ([], ["Connection closed by remote host"], 255)


def test_device_whose_link_breaks_is_not_taken_for_a_command_that_failed() -> None:
    device = Device(LostLink(), None, "/tmp/folder", "python3")  # noqa: S108  # nothing is made there

    with pytest.raises(BenchError, match=r"(?s)the device did not run .*: Connection closed by remote host"):
        device.try_run("true")
    with pytest.raises(BenchError, match="the device did not run"):
        device.close()
