"""Environment files, the lock of a bench, and what opens of it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from yaml import safe_dump

from edgekit_hil.benches.bench_file import BenchFile, find_bench, list_shipped, read_bench
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_runtime.errors import BenchError, BenchUnavailableError, CutError

SETTINGS = {"name": "desk", "kind": "real", "target": "jetson-orin-nano", "architecture": "aarch64"}
SERVICE = {"NetworkService": {"address": "jetson.lan", "username": "user"}}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write_bench(
    path: Path, *, settings: object = SETTINGS, resources: object = SERVICE, **more: object
) -> Path:
    main = {"resources": resources, "drivers": {"SSHDriver": {}}}
    path.write_text(safe_dump({"edgekit": settings, "targets": {"main": main}, **more}))
    return path


def hold(bench: BenchFile) -> None:
    with BenchLock.of(bench).hold(keeps_state=True):
        pass


def test_shipped_benches_are_real_for_this_machine_alone() -> None:
    benches = {each.settings.name: each for each in list_shipped()}

    assert {"constrained", "local"} <= benches.keys()
    assert [name for name, each in benches.items() if each.settings.kind == "real"] == ["local"]
    assert benches["local"].settings.target == "x86-64"
    assert not any(each.keeps_state for each in benches.values())
    assert find_bench("constrained") == benches["constrained"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("targets: {}", "section 'edgekit:'"),
        ("- 1", "section 'edgekit:'"),
        ("edgekit: 3", "expected a table, got a number"),
        ("edgekit: {name: a, kind: real, target: b}", "'architecture' is missing"),
        ("edgekit: {name: a, kind: seen, target: b, architecture: c}", "one of real, emulated, simulated"),
        ("edgekit: {name: ../a, kind: real, target: b, architecture: c}", "expected letters, digits"),
        ("edgekit: {name: a, kind: real, target: b, architecture: c, colour: d}", "unknown setting 'colour'"),
        ("edgekit: {name: a, kind: real, target: b, architecture: c}\ntargets: {main: }", "a target 'main'"),
        ("edgekit: {name: a, kind: real, target: b, architecture: c}\ntargets: [1]", "a target 'main'"),
    ],
)
def test_malformed_environment_file_is_refused_with_its_fault(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text(text)

    with pytest.raises(BenchError, match=message) as refusal:
        read_bench(path)

    assert str(path) in str(refusal.value)


def test_missing_environment_file_names_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="hil init"):
        find_bench(str(tmp_path / "none.yaml"))


def test_two_files_of_one_device_share_a_lock(tmp_path: Path) -> None:
    first = read_bench(write_bench(tmp_path / "a.yaml"))
    second = read_bench(write_bench(tmp_path / "b.yaml", settings={**SETTINGS, "name": "shelf"}))

    with (
        BenchLock.of(first).hold(keeps_state=True),
        pytest.raises(BenchError, match=f"'shelf' is in use by process {os.getpid()} since"),
    ):
        hold(second)


@pytest.mark.parametrize("kind", ["real", "emulated", "simulated"])
@pytest.mark.parametrize("as_list", [False, True])
def test_device_over_the_network_keeps_its_state_whatever_it_shows(
    tmp_path: Path, kind: str, *, as_list: bool
) -> None:
    resources = [SERVICE] if as_list else SERVICE
    bench = read_bench(
        write_bench(tmp_path / "a.yaml", settings={**SETTINGS, "kind": kind}, resources=resources)
    )

    assert (bench.keeps_state, bench.identity) == (True, "jetson.lan_22")


def test_machine_that_each_run_boots_has_no_lock_of_its_address() -> None:
    booted = find_bench("arm64-booted")

    assert (booted.keeps_state, booted.identity) == (False, "arm64-booted")


def test_bench_that_was_left_broken_stays_so_until_a_person_says_otherwise(tmp_path: Path) -> None:
    bench = read_bench(write_bench(tmp_path / "a.yaml"))
    lock = BenchLock.of(bench)
    with lock.hold(keeps_state=True):
        lock.mark_broken("no answer\nafter the power came back")
        lock.mark_broken("a later reason")

    for _ in range(2):
        with pytest.raises(BenchError, match=r"broken since .*: no answer after the power .*hil repaired"):
            hold(bench)
    assert "no answer" in (lock.mark_repaired() or "")
    hold(bench)


def test_bench_in_use_is_not_repaired(tmp_path: Path) -> None:
    lock = BenchLock.of(read_bench(write_bench(tmp_path / "a.yaml")))
    with lock.hold(keeps_state=True):
        lock.mark_broken("no answer")
        with pytest.raises(BenchError, match="is in use by process"):
            lock.mark_repaired()

    assert "no answer" in (lock.read_reason() or "")


@pytest.mark.parametrize("error", [BenchUnavailableError, BenchError, CutError, KeyboardInterrupt])
def test_error_in_a_run_does_not_break_a_real_bench(tmp_path: Path, error: type[BaseException]) -> None:
    lock = BenchLock("board", tmp_path / "board")
    for _ in range(2):
        with pytest.raises(error, match="it"), lock.hold(keeps_state=True):
            raise error("it")
    assert lock.describe() is None


def test_bench_that_each_run_creates_does_not_stay_broken(tmp_path: Path) -> None:
    lock = BenchLock.of(read_bench(write_bench(tmp_path / "a.yaml", resources={})))
    with lock.hold(keeps_state=False):
        lock.mark_broken("no answer")

    with lock.hold(keeps_state=False):
        assert lock.read_reason() is None


def test_run_that_was_killed_leaves_a_real_bench_broken(tmp_path: Path) -> None:
    path = write_bench(tmp_path / "a.yaml")
    code = """
        import os, signal, sys
        from pathlib import Path
        from edgekit_hil.benches.bench_file import read_bench
        from edgekit_hil.benches.bench_lock import BenchLock
        with BenchLock.of(read_bench(Path(sys.argv[1]))).hold(keeps_state=sys.argv[2] == "real"):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for kind in ("emulated", "real"):
        hold(read_bench(path))  # which the run before has not broken
        command = [sys.executable, "-c", textwrap.dedent(code), str(path), kind]
        done = subprocess.run(command, env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
    with pytest.raises(BenchError, match="was cut short"):
        hold(read_bench(path))
