"""Whatever interrupts an installation, a switch or a rollback, a valid signed version starts afterwards.

Three ways to be interrupted, at every step that changes the disk: the call fails, the process is killed, the
power fails. `pytest -s` prints how many points each has.
"""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.disk_calls import AtStep, DiskCalls, Killed, end_here
from tests.faults.posix_disk import State, write_state
from tests.memory_folder import memory_folder
from tests.runtime.encryption_parts import encrypt_package, find_plaintext, make_device, make_heavy
from tests.runtime.slot_cases import (
    CASES,
    VERSIONS,
    Case,
    copy_folder,
    find_leftovers,
    find_proven,
    make_bench,
    start_fresh,
)

from edgekit_runtime.errors import EdgekitError

ROOT = Path(__file__).parents[2]
MIN_POINTS = {"fault": 200, "kill": 200, "power": 500}  # of each test below


@pytest.fixture
def work() -> Iterator[Path]:
    """The folder whose calls are counted; in memory, since files are written thousands of times."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def packing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def heavy(maker: Any) -> tuple[Any, bytes]:
    """Makes packages with weights that can be searched for."""
    return make_heavy(maker)


@pytest.fixture(scope="module")
def packages(
    heavy: tuple[Any, bytes], packing: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder, home = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(home))
        device = make_device(home)
        for index, version in enumerate(VERSIONS):
            path = folder / f"{version}.edgepkg"
            heavy[0].write(path, version=version)
            if packing == "encrypted":  # with the keys in the packages, and beside them
                plain = path.rename(home / "plain")
                encrypt_package(plain, path, device, beside=index % 2 == 1)
                plain.unlink()
        yield folder


@pytest.fixture(scope="module")
def befores(
    maker: Any, packages: Path, packing: str, is_long: bool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Name of a case -> the state folder before it; of few cases where packages are encrypted."""
    root = tmp_path_factory.mktemp("befores")
    names = list(CASES) if is_long or packing == "plain" else ["first install", "install over active"]
    for name in names:
        CASES[name].prepare(make_bench(root / name, packages, maker.trust))
    return {name: root / name for name in names}


@pytest.fixture
def check_disk(heavy: tuple[Any, bytes], packing: str, work: Path) -> Callable[[], None]:
    """Fails where weights of encrypted packages lie on the disk in the clear."""
    checked: set[bytes] = set()

    def check() -> None:
        if packing == "encrypted":
            assert find_plaintext(work, heavy[1], checked) == []

    return check


@pytest.fixture(scope="module")
def points() -> Iterator[dict[str, int]]:
    """Counts the points of this run by the kind of interruption."""
    counts: dict[str, int] = {}
    yield counts
    print(f"\ninterruptions of slots: {counts}, {sum(counts.values())} in all")


def fail_at(step: int, number: int, lasting: bool) -> AtStep:
    """Let call `step` fail, and with `lasting` every later one that needs space or works."""

    def fail(at: int, name: str) -> None:
        if at == step or (lasting and at > step and name != "unlink"):
            raise OSError(number, os.strerror(number))

    return fail


def act(
    case: Case, before: Path, work: Path, packages: Path, maker: Any, calls: DiskCalls | None = None
) -> DiskCalls:
    """Do `case` in a new folder `state`; returns the calls, which are counted."""
    copy_folder(before, work / "state")
    calls = calls or DiskCalls(work)
    with calls.installed():
        calls.arm()
        case.act(make_bench(work / "state", packages, maker.trust))
    return calls


def check_fault(case: Case, before: Path, work: Path, packages: Path, maker: Any, at_step: AtStep) -> bool:
    """Do `case` on a failing disk and start again, there and on a sound disk; False where it did not fail."""
    failed, folder = False, work / "state"
    calls = DiskCalls(work, at_step)
    try:
        act(case, before, work, packages, maker, calls)
    except EdgekitError as error:
        failed = True
        assert "cannot" in str(error) or "no version" in str(error)
    allowed = case.during if failed else case.during | case.after
    with calls.installed():  # a start may not be countable
        assert start_fresh(folder, maker.trust) in allowed | find_proven(before, maker.trust)
    assert start_fresh(folder, maker.trust) in allowed
    return failed


@pytest.mark.parametrize(("first", "number", "lasting"), [(0, errno.EIO, False), (1, errno.ENOSPC, True)])
def test_a_failing_call_leaves_a_version_that_starts(
    first: int,
    number: int,
    lasting: bool,
    befores: dict[str, Path],
    packages: Path,
    maker: Any,
    work: Path,
    points: dict[str, int],
    check_disk: Callable[[], None],
    *,
    is_long: bool,
) -> None:
    """Each call fails in a way of both, and in both in the long run."""
    before = points.get("fault", 0)
    for name, folder in befores.items():
        case = CASES[name]
        calls = act(case, folder, work, packages, maker)
        assert start_fresh(work / "state", maker.trust) in case.after
        steps = range(calls.count) if is_long else range(first, calls.count, 2)
        for step in steps:
            check_fault(case, folder, work, packages, maker, fail_at(step, number, lasting))
            check_disk()
        points["fault"] = points.get("fault", 0) + len(steps)
    if len(befores) == len(CASES):
        assert points["fault"] - before >= MIN_POINTS["fault"] // (1 if is_long else 2)


def test_an_installation_that_failed_succeeds_later_and_leaves_nothing_behind(
    befores: dict[str, Path], packages: Path, maker: Any, work: Path
) -> None:
    for name, before in befores.items():
        case = CASES[name]
        if not name.startswith("install"):
            continue
        for step in range(100):
            if not check_fault(case, before, work, packages, maker, fail_at(step, errno.ENOSPC, True)):
                break
            bench = make_bench(work / "state", packages, maker.trust)
            case.act(bench)
            assert start_fresh(work / "state", maker.trust) in case.after
            assert find_leftovers(work / "state", maker.trust) == set(), (name, step)


def test_a_killed_process_leaves_a_version_that_starts(
    befores: dict[str, Path],
    packages: Path,
    maker: Any,
    work: Path,
    points: dict[str, int],
    check_disk: Callable[[], None],
) -> None:
    for name, before in befores.items():
        case, step = CASES[name], 0
        while True:
            calls = DiskCalls(work, end=end_here)
            copy_folder(before, work / "state")
            try:
                with calls.installed():
                    calls.arm(step)
                    case.act(make_bench(work / "state", packages, maker.trust))
            except Killed:
                check_disk()
                assert start_fresh(work / "state", maker.trust) in case.during, (name, step)
                step += 1
            else:
                break
        assert start_fresh(work / "state", maker.trust) in case.after
        points["kill"] = points.get("kill", 0) + step
    assert points["kill"] >= MIN_POINTS["kill"] or len(befores) < len(CASES)


def cut_power(
    case: Case,
    before: Path,
    packages: Path,
    maker: Any,
    work: Path,
    syncs: bool,
    check_disk: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Any] | None]:
    """Yield for each way in which the power can fail during and after `case` how it ends wrong, or None."""
    points: list[list[State]] = []
    calls = DiskCalls(work, lambda _, __: points.append(list(calls.disk.states())), forgets_syncs=not syncs)
    act(case, before, work, packages, maker, calls)
    points.append(list(calls.disk.states()))
    seen: set[tuple[Any, ...]] = set()
    for number, states in enumerate(points):
        is_last = number == len(points) - 1
        for state in states:
            key = (is_last, *sorted(state.items()))
            if key in seen:
                yield None
                continue
            seen.add(key)
            write_state(state, work, work)
            check_disk()
            try:
                started: Any = start_fresh(work / "state", maker.trust)
            except EdgekitError as error:
                started = str(error)
            yield None if started in (case.after if is_last else case.during) else (number, started)


def test_a_power_cut_leaves_a_version_that_starts(
    befores: dict[str, Path],
    packages: Path,
    maker: Any,
    work: Path,
    points: dict[str, int],
    check_disk: Callable[[], None],
) -> None:
    for name, before in befores.items():
        ends = list(cut_power(CASES[name], before, packages, maker, work, True, check_disk))
        points["power"] = points.get("power", 0) + len(ends)
        assert (name, [wrong for wrong in ends if wrong is not None]) == (name, [])
    assert points["power"] >= MIN_POINTS["power"] or len(befores) < len(CASES)


@pytest.mark.parametrize("name", ["first install", "install over active", "rollback"])
def test_the_simulated_power_cut_finds_what_is_not_synced(
    name: str, befores: dict[str, Path], packages: Path, packing: str, maker: Any, work: Path
) -> None:
    if packing != "plain":
        pytest.skip("nothing but the content differs")
    assert any(cut_power(CASES[name], befores[name], packages, maker, work, False))
