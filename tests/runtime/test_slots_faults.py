"""Whatever interrupts an installation, a switch or a rollback, a valid signed version starts afterwards.

Three ways to be interrupted, at every step that changes the disk: the call fails, the process is killed, the
power fails. `pytest -s` prints how many points each has.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.slot_cases import (
    CASES,
    VERSIONS,
    Case,
    copy_folder,
    find_leftovers,
    find_proven,
    make_bench,
    start_fresh,
    write_keys,
)
from tests.runtime.slot_disks import SteppedDisk
from tests.runtime.slot_power import RecordingDisk

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.system.child_process import child_environment

ROOT = Path(__file__).parents[2]
MIN_POINTS = {"fault": 200, "kill": 200, "power": 500}  # of each test below


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of real syncs would take minutes and show no more."""
    memory = Path("/dev/shm")  # noqa: S108  # the folder in it is a new one of a random name
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def packages(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for version in VERSIONS:
        maker.write(folder / f"{version}.edgepkg", version=version)
    return folder


@pytest.fixture(scope="module")
def befores(maker: Any, packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a case -> the state folder before it."""
    root = tmp_path_factory.mktemp("befores")
    for name, case in CASES.items():
        case.prepare(make_bench(root / name, packages, maker.trust))
    return {name: root / name for name in CASES}


@pytest.fixture(scope="module")
def points() -> Iterator[dict[str, int]]:
    """Counts the points of this run by the kind of interruption."""
    counts: dict[str, int] = {}
    yield counts
    print(f"\ninterruptions of slots: {counts}, {sum(counts.values())} in all")


def fail_at(step: int, number: int, lasting: bool) -> SteppedDisk:
    """Return a disk whose call `step` fails, and with `lasting` every later one that needs space or works."""

    def fail(at: int, name: str) -> None:
        if at == step or (lasting and at > step and name != "unlink"):
            raise OSError(number, os.strerror(number))

    return SteppedDisk(fail)


def check_fault(
    case: Case, before: Path, folder: Path, packages: Path, maker: Any, disk: SteppedDisk
) -> bool:
    """Do `case` on a failing disk and start again, there and on a sound disk; False where it did not fail."""
    copy_folder(before, folder)
    failed = False
    try:
        case.act(make_bench(folder, packages, maker.trust, disk))
    except EdgekitError as error:
        failed = True
        assert "cannot" in str(error) or "no version" in str(error)
    allowed = case.during if failed else case.during | case.after
    # On the failing disk a start may not be countable.
    assert start_fresh(folder, maker.trust, disk) in allowed | find_proven(before, maker.trust)
    assert start_fresh(folder, maker.trust) in allowed
    return failed


@pytest.mark.parametrize(("number", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True)])
def test_a_failing_call_leaves_a_version_that_starts(
    number: int,
    lasting: bool,
    befores: dict[str, Path],
    packages: Path,
    maker: Any,
    work: Path,
    points: dict[str, int],
) -> None:
    before = points.get("fault", 0)
    for name, case in CASES.items():
        counting = SteppedDisk(lambda *_: None)
        copy_folder(befores[name], work / "state")
        case.act(make_bench(work / "state", packages, maker.trust, counting))
        assert start_fresh(work / "state", maker.trust) in case.after
        for step in range(counting.count):
            disk = fail_at(step, number, lasting)
            check_fault(case, befores[name], work / "state", packages, maker, disk)
        points["fault"] = points.get("fault", 0) + counting.count
    assert points["fault"] - before >= MIN_POINTS["fault"]


def test_an_installation_that_failed_succeeds_later_and_leaves_nothing_behind(
    befores: dict[str, Path], packages: Path, maker: Any, work: Path
) -> None:
    for name, case in CASES.items():
        if not name.startswith("install"):
            continue
        for step in range(100):
            disk = fail_at(step, errno.ENOSPC, True)
            if not check_fault(case, befores[name], work / "state", packages, maker, disk):
                break
            bench = make_bench(work / "state", packages, maker.trust)
            case.act(bench)
            assert start_fresh(work / "state", maker.trust) in case.after
            assert find_leftovers(work / "state", maker.trust) == set(), (name, step)


def test_a_killed_process_leaves_a_version_that_starts(
    packages: Path, maker: Any, work: Path, points: dict[str, int]
) -> None:
    keys = write_keys(work / "keys")
    command = [sys.executable, "-m", "tests.runtime.slot_kills", packages, keys, work]
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    killed: dict[str, tuple[int, list[str]]] = json.loads(result.stdout)
    assert {name: wrong for name, (_, wrong) in killed.items() if wrong} == {}
    points["kill"] = sum(count for count, _ in killed.values())
    assert points["kill"] >= MIN_POINTS["kill"]


def restore(state: dict[Path, bytes | None], root: Path, folder: Path) -> None:
    """Make `folder` what was recorded of `root`."""
    copy_folder(Path("missing"), folder)
    for path, content in sorted(state.items()):
        place = folder / path.relative_to(root)
        if content is None:
            place.mkdir(mode=0o700, parents=True)
        else:
            place.write_bytes(content)


def cut_power(
    case: Case, before: Path, packages: Path, maker: Any, work: Path, syncs: bool
) -> tuple[int, list[Any]]:
    """Return in how many ways the power can fail during and after `case`, and which of them end wrong."""
    root, folder = work / "recorded", work / "state"
    copy_folder(before, root)
    disk = RecordingDisk(root, records_syncs=syncs)
    case.act(make_bench(root, packages, maker.trust, disk))
    disk.note()
    seen: dict[tuple[Any, ...], bool] = {}
    wrong: list[Any] = []
    count = 0
    for number, states in enumerate(disk.points):
        is_last = number == len(disk.points) - 1
        for state in states:
            count += 1
            key = (is_last, *sorted(state.items()))
            if key in seen:
                continue
            restore(state, root, folder)
            try:
                started: Any = start_fresh(folder, maker.trust)
            except EdgekitError as error:
                started = str(error)
            seen[key] = started in (case.after if is_last else case.during)
            if not seen[key]:
                wrong.append((number, started))
    return count, wrong


def test_a_power_cut_leaves_a_version_that_starts(
    befores: dict[str, Path], packages: Path, maker: Any, work: Path, points: dict[str, int]
) -> None:
    for name, case in CASES.items():
        count, wrong = cut_power(case, befores[name], packages, maker, work, True)
        points["power"] = points.get("power", 0) + count
        assert (name, wrong) == (name, [])
    assert points["power"] >= MIN_POINTS["power"]


@pytest.mark.parametrize("name", ["first install", "install over active", "rollback"])
def test_the_simulated_power_cut_finds_what_is_not_synced(
    name: str, befores: dict[str, Path], packages: Path, maker: Any, work: Path
) -> None:
    _, wrong = cut_power(CASES[name], befores[name], packages, maker, work, False)
    assert wrong != []
