"""Runs that meet: two at once on one bench, one after a run that was killed, one on a bench that breaks."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hil.hil_process import run_hil, start_hil
from tests.hil.ssh_board import SshBoard, run_ssh_board
from tests.waiting import wait_for

from edgekit_cli.cli import main
from edgekit_hil.benches.bench_file import find_bench, read_bench
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_host.evidence import read_evidence
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import child_environment

TEST = ("-k", "italy and ort and golden", "--evidence", "seen")


pytestmark = pytest.mark.usefixtures("folder", "copied_commands")


def wait_held(lock: BenchLock, run: "subprocess.Popen[str]") -> None:
    """Wait until a run holds a bench, and let it stand still there."""

    def is_held() -> bool:
        assert run.poll() is None, run.communicate()
        return f"in use by process {run.pid} since" in (lock.describe() or "")

    wait_for(is_held, "the run to hold the bench")
    run.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    "by_name", [True, pytest.param(False, marks=pytest.mark.long)], ids=["named", "of all benches"]
)
def test_second_run_at_once_fails_and_the_first_goes_on(folder: Path, *, by_name: bool) -> None:
    lock = BenchLock.of(find_bench("local"))
    with start_hil("run", "--bench", "local", *TEST) as first:
        wait_held(lock, first)
        options = ["--bench", "local"] if by_name else []
        expression = "golden and italy and ort and local"
        second = run_hil("run", *options, "-k", expression, "--evidence", "other")
        first.send_signal(signal.SIGCONT)
        output, errors = first.communicate()

    assert second.returncode == BenchError.exit_code, second.stdout + second.stderr
    assert f"1 skipped: bench 'local' is in use by process {first.pid} since" in second.stdout
    assert list((folder / "other").iterdir()) == []
    assert first.returncode == 0, output + errors
    (path,) = (folder / "seen").glob("*.json")
    assert [each.outcome for each in read_evidence(path).tests] == ["passed"]


def test_run_after_a_killed_one_fails_until_a_person_has_looked_at_the_board(
    board: SshBoard, folder: Path
) -> None:
    file = read_bench(board.write_bench(folder / "bench.yaml"))
    lock = BenchLock.of(file)
    with start_hil("run", *TEST) as killed:
        wait_for(lock.stem.with_name(f"{lock.stem.name}.begun").exists, "the run to use the bench")
        wait_held(lock, killed)
        killed.kill()

    after = run_hil("run", *TEST)
    assert after.returncode == BenchError.exit_code
    assert "1 skipped: bench 'stand-in' is broken since" in after.stdout
    assert "was cut short" in after.stdout
    assert list((folder / "seen").iterdir()) == []
    assert "broken since" in (BenchLock.of(file).describe() or "")  # nothing but a person repairs it
    assert main(["hil", "repaired", "bench.yaml"]) == 0
    repaired = run_hil("run", *TEST)
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr


def test_run_after_a_killed_one_begins_on_a_bench_that_it_creates(folder: Path) -> None:
    with start_hil("run", "--bench", "local", *TEST) as killed:
        wait_held(BenchLock.of(find_bench("local")), killed)
        killed.kill()

    after = run_hil("run", "--bench", "local", *TEST)

    assert after.returncode == 0, after.stdout + after.stderr


PLUGINS = ("edgekit_hil.tests.plugin", "edgekit_hil.tests.conftest")
TESTS = """
import os

def test_before(device):
    pass

def test_last_of_the_board(device):
    os.system("pkill -9 -P {server}; kill -9 {server}")  # also the connection that is open

def test_after(device):
    raise AssertionError("a test has begun on a broken bench")
"""


def test_bench_that_breaks_in_a_run_skips_the_rest_and_stays_broken(folder: Path) -> None:
    with run_ssh_board(folder / "own") as own:
        file = read_bench(own.write_bench(folder / "bench.yaml"))
        (folder / "test_own.py").write_text(TESTS.format(server=own.server_pid))
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", f"--rootdir={folder}", "test_own.py"]
        command.append("--disable-plugin-autoload")
        for plugin in ("no:cacheprovider", *PLUGINS):
            command += ["-p", plugin]
        done = subprocess.run(
            [*command, "--bench=bench.yaml", "--evidence=seen"],
            env=child_environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    (path,) = (folder / "seen").glob("*.json")
    outcomes = {each.test: (each.outcome, each.reason) for each in read_evidence(path).tests}
    names = [name.partition("::")[2].partition("[")[0] for name in outcomes]
    (passed, _), (failed, why), (skipped, reason) = outcomes.values()
    assert names == ["test_before", "test_last_of_the_board", "test_after"]
    assert (passed, failed, skipped) == ("passed", "failed", "skipped"), done.stdout + done.stderr
    assert "the device did not run" in why
    assert reason.startswith("bench 'stand-in' is broken since")
    assert "after test_last_of_the_board" in (BenchLock.of(file).read_reason() or "")
