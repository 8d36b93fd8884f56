"""Faults at every step of the manager's transitions: each in a process of its own, and what came of it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.disk_calls import KINDS, DiskCalls, Kind
from tests.faults.manager_transitions import TRANSITIONS, Transition
from tests.faults.manager_world import VERSIONS, World, prepare_process
from tests.faults.processes import Outcome, fork, try_all
from tests.memory_folder import memory_folder
from tests.runtime.conftest import PackageMaker

from edgekit_runtime.errors import EdgekitError

_TURNS = 3
_LEASE_S = 20.0  # after a kill the next manager waits for the end of the lease


@dataclass(frozen=True)
class Fault:
    """A fault at a step of a transition."""

    transition: int
    kind: Kind
    at: int


@dataclass
class Bench:
    """A folder with the state before each transition.

    Attributes:
        folder: of all.
        steps: of each transition, the names of its calls.
        released: digest of each package by that of its manifest.
    """

    folder: Path
    maker: PackageMaker
    packages: dict[tuple[str, str], Path] = field(default_factory=dict)
    steps: list[list[str]] = field(default_factory=list)
    released: dict[str, str] = field(default_factory=dict)

    def prepare(self, *, is_exact: bool = True) -> None:
        """Make packages, and carry out all transitions once without a fault.

        `is_exact`: count the steps as they are in a process of its own, which takes longer.

        Raises:
            AssertionError: one has an effect that it should not have.
        """
        for version in VERSIONS:
            for target in ("x86-64", "rpi5"):
                path = self.folder / f"linear-{version}-{target}.edgepkg"
                self.maker.write(path, version=version, target=target)
                self.packages[version, target] = path
        prepare_process()
        if is_exact:
            self._warm_up()
        # This process is quicker, and warm then; its steps are a few less: it has opened the store already.
        self.steps, self.released = self._do_all(fork if is_exact else _call)

    def _do_all(self, run: Callable[..., Any]) -> tuple[list[list[str]], dict[str, str]]:
        """Carry out all transitions and copy the state before each; returns `steps` and `released`."""
        root, steps = self.folder / "root", []
        (root / "disk").mkdir(parents=True)
        for number, transition in enumerate(TRANSITIONS):
            shutil.copytree(root, self.folder / f"before-{number}", symlinks=True)
            names, problems = run(partial(self._interrupt, root, transition, None)) or ([], ["killed"])
            steps.append(names)
            problems += run(partial(self._recover, root, transition, is_last=True))
            assert problems == [], f"{transition.name}: {problems}"
        return steps, run(lambda: self._open(root).list_released())

    def _warm_up(self) -> None:
        """Do all in this process, so that each process that it forks has its modules and statements."""
        root = self.folder / "warm"
        for transition in TRANSITIONS:
            world = self._open(root)
            transition.prepare(world)
            transition.act(world)
            world.stop()
            world.start()
            world.settle()
            transition.is_over(world)
            world.find_problems()
            if transition.after is not None:
                transition.after(world)
            world.close()

    def list_faults(self) -> list[Fault]:
        """Return all faults."""
        return [
            Fault(number, kind, at)
            for number, names in enumerate(self.steps)
            for at in range(len(names))
            for kind in KINDS
        ]

    def try_fault(self, root: Path, fault: Fault) -> list[str] | None:
        """Return what is wrong after a fault, None where it never came; `root` is replaced."""
        transition = TRANSITIONS[fault.transition]
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.folder / f"before-{fault.transition}", root, symlinks=True)
        was_hit, problems = fork(lambda: self._interrupt(root, transition, fault)) or (True, [])
        if not was_hit:
            return None
        _, recovered = fork(lambda: (True, self._recover(root, transition))) or (
            True,
            ["the check was killed"],
        )
        return list(problems + recovered)

    def try_torn(self, root: Path, number: int, path: Path, kind: str) -> list[str]:
        """Return what is wrong with a manager that finds a file cut; a sentence that names it is right."""
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.folder / f"before-{number}", root, symlinks=True)
        file = root / "disk" / "fleet" / path
        os.truncate(file, file.stat().st_size // 2 if kind == "half" else 0)

        def start() -> list[str]:
            world = self._open(root)
            try:
                world.start()
                for _ in range(_TURNS):
                    world.turn()
            except EdgekitError as error:
                return [] if file.name in str(error) else [f"says nothing of {path}: {error}"]
            return []

        _, problems = fork(lambda: (True, start())) or (True, ["the check was killed"])
        world = self._open(root)  # a store that has lost entries may give an order again: models count here
        return problems + [text for one in world.devices.values() for text in one.check_model(self.released)]

    def _open(self, root: Path, calls: DiskCalls | None = None) -> World:
        world = World(root, self.packages, self.maker.trust, calls)
        world.pass_time(_LEASE_S)
        return world

    def _interrupt(self, root: Path, transition: Transition, fault: Fault | None) -> tuple[object, list[str]]:
        """Carry a transition out, with a fault; returns whether that came, and what is wrong.

        Without a fault it returns the names of the steps.
        """
        (root / "disk" / "tmp").mkdir(exist_ok=True)
        tempfile.tempdir = str(root / "disk" / "tmp")
        calls = DiskCalls(root / "disk")
        world = self._open(root, calls)
        problems = []
        with calls.installed(sqlite=True):
            transition.prepare(world)
            calls.arm(*(() if fault is None else (fault.at, fault.kind)))
            try:
                transition.act(world)
            except EdgekitError as error:  # a sentence
                if fault is None:
                    problems.append(str(error))
            except OSError as error:
                problems.append(f"shows a traceback: {type(error).__name__}: {error}")
            calls.disarm()
            if world.manager is not None:  # it goes on, now that there is space
                world.settle()
                if not transition.is_over(world):
                    transition.act(world)
                    world.settle()
                if not transition.is_over(world):
                    problems.append("the manager that goes on does not do it")
                problems += world.find_problems()
        return (calls.names if fault is None else calls.was_hit), problems

    def _recover(self, root: Path, transition: Transition, *, is_last: bool = False) -> list[str]:
        """Start the manager again, let it do what is left, and return what is wrong."""
        world = self._open(root)
        world.start()
        world.settle()
        problems = []
        if not transition.is_over(world):
            if is_last:
                problems.append("the transition does not do what it should")
            transition.act(world)
            world.settle()
            if not transition.is_over(world):
                problems.append("the transition cannot be done again")
        problems += world.find_problems()
        if is_last and transition.after is not None:
            transition.after(world)
            world.settle()
            problems += world.find_problems()
        return problems


def _call(work: Callable[[], Any]) -> Any:
    return work()


@contextlib.contextmanager
def open_bench(maker: PackageMaker, most: int | None = None) -> Iterator[Bench]:
    """Yield a bench that is prepared; for `most` faults, a few, without warming all transitions up."""
    with memory_folder() as folder:
        bench = Bench(folder, maker)
        bench.prepare(is_exact=most is None)
        yield bench


def run(bench: Bench, limit_s: float, most: int | None = None) -> Outcome:
    """Return what came of the faults that could be tried in this time."""
    return try_all(
        bench.list_faults(),
        lambda number, fault: bench.try_fault(bench.folder / f"worker-{number}", fault),
        lambda fault: (TRANSITIONS[fault.transition].name, fault.kind),
        limit_s,
        most,
    )


def run_torn(bench: Bench, limit_s: float, most: int | None = None) -> Outcome:
    """Return what comes of files that are cut to half, or emptied."""
    cases = [
        (number, path.relative_to(before), kind)
        for number in range(1, len(TRANSITIONS))
        for before in [bench.folder / f"before-{number}" / "disk" / "fleet"]
        for path in sorted(before.rglob("*"))
        for kind in ("half", "empty")
        if path.is_file() and path.stat().st_size and path.suffix != ".db-shm"  # which is not read
    ]
    return try_all(
        cases,
        lambda number, case: bench.try_torn(bench.folder / f"worker-{number}", *case),
        lambda case: (_describe(case[1]), case[2]),
        limit_s,
        most,
    )


def _describe(path: Path) -> str:
    """Return the name of a file without its number or digest."""
    name = ".".join(part for part in path.name.split(".") if not part.isdigit() and len(part) < 40)
    return str(path.parent / name)
