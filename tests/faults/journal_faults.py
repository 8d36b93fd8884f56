"""Faults at every step of the agent's journal and slots, in this process.

A kill, a full disk, a failed call, and every state that a power cut may leave (unsynced writes dropped, torn
or kept), at every step that changes the disk.
"""

import contextlib
import errno
import io
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tests.agent.test_agent_faults import Device, Killed
from tests.faults.processes import Outcome, memory_folder
from tests.runtime import slot_disks
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import copy_folder
from tests.runtime.slot_disks import AtStep, SteppedDisk
from tests.runtime.slot_power import RecordingDisk

from edgekit_runtime.agent.execution import install
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Slots

VERSIONS = ("1.0.0", "2.0.0", "3.0.0")
TRANSITIONS = {"first update": 1, "second update": 2, "two updates": 0}
PIECE_BYTES = 16
SAMPLE = 50  # of so many faults one device is led to its end


class FineFile(slot_disks.SteppedFile):
    """A file of which every `PIECE_BYTES` are a step."""

    def write(self, data: object) -> int:
        content = bytes(data)
        for at in range(0, len(content), PIECE_BYTES):
            self._disk.step("write")
            io.FileIO.write(self, content[at : at + PIECE_BYTES])
            self._disk.written(self.path, content[at : at + PIECE_BYTES])
        return len(content)


class JournalBench:
    """Counts faults, and what came of them."""

    def __init__(self, folder: Path, maker: PackageMaker, limit_s: float, most: int) -> None:
        self.folder, self.maker = folder, maker
        self.end_s, self.most = time.monotonic() + limit_s, most
        self.outcome = Outcome()
        self.packages = {}
        for version in VERSIONS:
            path = folder / f"{version}.edgepkg"
            self.maker.write(path, version=version)
            self.packages[version] = path, self.maker.manifest(version=version).sha256

    def is_over(self) -> bool:
        return time.monotonic() > self.end_s or sum(self.outcome.counts.values()) >= self.most

    def device(self, name: str) -> Device:
        return Device(self.folder / name, self.packages, self.maker.trust)

    def prepare(self, installed: int) -> Path:
        """Make a device on which that many versions were installed and proven, at least one."""
        device = self.device("before")
        for version in VERSIONS[: max(1, installed)]:
            device.run(version)
            device.start()
            Slots(device.folder, self.maker.trust).confirm("linear", version)
        return device.folder

    def act(self, installed: int, disk: SteppedDisk) -> None:
        device = self.device("state")
        for version in VERSIONS[installed : installed + 1] if installed else VERSIONS[1:]:
            device.run(version, disk)

    def check(self, transition: str, kind: str) -> None:
        """Check that what lies in the folder starts, and now and then that it reaches the newest version."""
        self.outcome.counts[transition, kind] += 1
        device = self.device("state")
        try:
            assert device.start() in VERSIONS
            if sum(self.outcome.counts.values()) % SAMPLE == 0:
                assert device.run("3.0.0") == "succeeded"
                assert device.start() == "3.0.0"
        except (AssertionError, EdgekitError, OSError) as error:
            self.outcome.wrong.append((transition, kind, str(error)))

    def run(self, transition: str, installed: int) -> None:
        shutil.rmtree(self.folder / "before", ignore_errors=True)
        before, state = self.prepare(installed), self.folder / "state"
        copy_folder(before, state)
        recording = RecordingDisk(state)
        self.act(installed, recording)
        recording.note()
        for at in range(recording.count):
            for kind in ("kill", "full disk", "error"):
                copy_folder(before, state)
                with contextlib.suppress(Killed, EdgekitError, OSError):
                    self.act(installed, SteppedDisk(_fail_at(at, kind)))
                self.check(transition, kind)
                if self.is_over():
                    return
        for states in recording.points:
            for content in states:
                _write(state, content)
                self.check(transition, "power cut")
                if self.is_over():
                    return


def _fail_at(at: int, kind: str) -> AtStep:
    def act(number: int, name: str) -> None:
        if kind == "kill" and number >= at:  # nor does it tidy up
            raise Killed
        if kind == "full disk" and number >= at and name in ("open", "write", "mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if kind == "error" and number == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return act


def _write(folder: Path, content: dict[Path, bytes | None]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(content):
        data = content[path]
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


@contextlib.contextmanager
def _fine_files() -> Iterator[None]:
    before, tests_child = slot_disks.SteppedFile, install._test_in_child
    slot_disks.SteppedFile = FineFile
    install._test_in_child = lambda _path: None
    try:
        yield
    finally:
        slot_disks.SteppedFile, install._test_in_child = before, tests_child


def run(maker: PackageMaker, limit_s: float, most: int | None = None) -> Outcome:
    """Return what came of the faults that could be tried in this time."""
    with memory_folder() as folder, _fine_files():
        bench = JournalBench(folder, maker, limit_s, 1 << 40 if most is None else most)
        for transition, installed in TRANSITIONS.items():
            bench.run(transition, installed)
    return bench.outcome
