"""Runs of a device's own code for power cuts: its slots, and its agent with all that it stores."""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.hil.power_cuts.recording import NOTHING, Step
from tests.runtime import slot_cases
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as make_maker
from tests.runtime.slot_cases import MODEL, VERSIONS

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.slots import MAX_BEGUN, Permissions
from edgekit_runtime.system.atomic_files import Disk

if TYPE_CHECKING:
    from tests.faults.step_faults import StepBench

LABELS_BYTES = 1 << 18
_NEXT = "4.0.0"
LEFT_OUT = ("file-syncs", "folder-syncs", "syncs")
"""What can be left out of a run, so that there is a fault to find."""


@dataclass(frozen=True)
class Run:
    """A run that is recorded, and what must hold after each cut.

    Attributes:
        prepare: takes the root of the file system; returns the steps.
        start: takes that root; returns the version that a fresh process starts, after it has read all of it.
        finish: takes that root; does what is left, and returns what is wrong.
    """

    prepare: Callable[[Path], Sequence[Step]]
    start: Callable[[Path], str]
    finish: Callable[[Path], list[str]]


class LargePackageMaker(PackageMaker):
    """Makes packages of several hundred writes, of which no two versions have the same content."""

    def manifest(self, artifacts: Mapping[str, bytes] | None = None, **changes: Any) -> Manifest:
        return super().manifest(self._list_contents(changes) if artifacts is None else artifacts, **changes)

    def write(self, path: Path, **changes: Any) -> bytes:
        write_package(path, self.manifest(**changes), self._list_contents(changes), self.signer)
        return path.read_bytes()

    def _list_contents(self, changes: dict[str, Any]) -> dict[str, bytes]:
        labels = random.Random(changes["version"]).randbytes(LABELS_BYTES // 2).hex()
        return {**self.artifacts, "labels.txt": labels.encode()}


@contextlib.contextmanager
def make_runs(folder: Path, *, with_agent: bool) -> Iterator[dict[str, Run]]:
    """Yield runs by name: that of the slots, and those of an agent, with a server of its fleet."""
    small = make_maker.__wrapped__()
    maker = LargePackageMaker(small.signer, small.trust, small.artifacts, small.roles)
    packages = folder / "packages"
    packages.mkdir()
    for version in (*VERSIONS, _NEXT):
        maker.write(packages / f"{version}.edgepkg", version=version)
    slots_run = {"slots": _make_slots_run(packages, maker)}
    if not with_agent:
        yield slots_run
        return
    from tests.faults.step_faults import StepBench  # it imports a whole fleet

    (folder / "fleet").mkdir()
    bench = StepBench(folder / "fleet", maker)
    bench.prepare()
    with bench.serve():
        yield slots_run | {name: _make_agent_run(bench, name) for name in bench.desired}


@contextlib.contextmanager
def leave_out(what: str | None) -> Iterator[None]:
    """Make the device's code forget some of its syncs."""
    with contextlib.ExitStack() as patches:
        if what in ("file-syncs", "syncs"):
            patches.enter_context(mock.patch.object(Disk, "sync", lambda _, file: file.flush()))
        if what in ("folder-syncs", "syncs"):
            patches.enter_context(mock.patch.object(Disk, "sync_folder", lambda _, path: None))
        yield


def _step(name: str, act: Callable[[], object], during: str, after: str | None = None) -> Step:
    """Return a step; versions are stated by their first digit, `-` stands for none."""
    names = {"-": NOTHING, **{version[0]: version for version in VERSIONS}}
    expand = [tuple(names[digit] for digit in digits) for digits in (during, after or during)]
    return Step(name, act, *expand)


def _make_slots_run(packages: Path, maker: PackageMaker) -> Run:
    def prepare(root: Path) -> list[Step]:
        bench = slot_cases.make_bench(root / "state", packages, maker.trust)
        confirm, pin = partial(bench.slots.confirm, MODEL), partial(bench.slots.pin, MODEL)
        steps = [
            _step("install the factory version", partial(bench.install, "0.9.0", factory=True), "-0", "0"),
            _step("install 1", partial(bench.install, "1.0.0"), "01", "1"),
            _step("begin 1", bench.begin, "1"),
            _step("confirm 1", partial(confirm, "1.0.0"), "1"),
            _step("roll back to the factory", partial(bench.slots.rollback, MODEL), "01", "0"),
            _step("install 1 again", partial(bench.install, "1.0.0", retry=True), "01", "1"),
            _step("begin 1 again", bench.begin, "1"),
            _step("confirm 1 again", partial(confirm, "1.0.0"), "1"),
            _step("install 2", partial(bench.install, "2.0.0"), "12", "2"),
            _step("begin 2", bench.begin, "2"),
            _step("reject 2", partial(bench.reject, "2.0.0"), "12", "1"),
            _step("install 2 again", partial(bench.install, "2.0.0", retry=True), "12", "2"),
            _step("begin 2 again", bench.begin, "2"),
            _step("confirm 2", partial(confirm, "2.0.0"), "2"),
            _step("pin 2", partial(pin, True), "2"),
            _step("unpin 2", partial(pin, False), "2"),
            _step("install 3", partial(bench.install, "3.0.0"), "23", "3"),
            *(_step(f"begin 3, start {n}", bench.begin, "3") for n in range(1, MAX_BEGUN)),
            _step("begin 3 for the last time", bench.begin, "23", "2"),
            _step("begin 3 too often", bench.begin, "2"),
            _step("install 3 again", partial(bench.install, "3.0.0", retry=True), "23", "3"),
            _step("begin 3 again", bench.begin, "3"),
            _step("confirm 3", partial(confirm, "3.0.0"), "3"),
            _step("roll back", partial(bench.slots.rollback, MODEL), "23", "2"),
            _step("install 3 once more", partial(bench.install, "3.0.0", retry=True), "23", "3"),
        ]
        _sync_all()
        return steps

    def start(root: Path) -> str:
        return slot_cases.start_fresh(root / "state", maker.trust) or NOTHING

    def finish(root: Path) -> list[str]:
        """Install, prove and start a version that was never there."""
        bench = slot_cases.make_bench(root / "state", packages, maker.trust)
        bench.slots.install(packages / f"{_NEXT}.edgepkg", Permissions(pin=True))
        bench.begin()
        bench.slots.confirm(MODEL, _NEXT)
        last = start(root)
        return [] if last == _NEXT else [f"starts {last} at the end"]

    return Run(prepare, start, finish)


def _make_agent_run(bench: "StepBench", update: str) -> Run:
    """Return a run in which an agent and its processes update from version 1 to version 2."""

    def prepare(root: Path) -> list[Step]:
        shutil.copytree(bench.folder / "before", root / "device", symlinks=True)
        _sync_all()
        return [_step(update, partial(_check, partial(update_device, root)), "12", "2")]

    def update_device(root: Path) -> list[str]:
        return bench.update_undisturbed(root / "device", update)

    def start(root: Path) -> str:
        return bench.start(root / "device")

    def finish(root: Path) -> list[str]:
        problems = update_device(root)
        last = start(root)
        return problems + ([] if last == "2.0.0" else [f"starts {last} at the end"])

    return Run(prepare, start, finish)


def _check(act: Callable[[], list[str]]) -> None:
    problems = act()
    assert problems == [], problems


def _sync_all() -> None:
    """Make all that was prepared durable, so that only what the device does can be lost."""
    os.sync()
