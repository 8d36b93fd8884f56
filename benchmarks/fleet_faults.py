"""Kills, lost writes, full disks and torn files over transitions of the agent's journal and slots.

    PYTHONPATH=device_runtime:toolkit:fleet:. .venv/bin/python -m benchmarks.fleet_faults [--limit-s 270]

A kill, a full disk, and every state that a power cut may leave (unsynced writes dropped, torn or kept), at
every step that changes the disk. After each, a fresh process must start a whole signed model, and a sample of
devices must then reach what is wanted. It stops at the limit.
"""

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.agent.test_agent_faults import Device, Killed
from tests.runtime import slot_disks
from tests.runtime.conftest import maker as make_maker
from tests.runtime.slot_cases import copy_folder
from tests.runtime.slot_disks import AtStep, SteppedDisk
from tests.runtime.slot_power import RecordingDisk

from edgekit_runtime.agent.execution import install
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Slots

VERSIONS = ("1.0.0", "2.0.0", "3.0.0")
TRANSITIONS = {"first update": 1, "second update": 2, "two updates": 0}
LIMIT_S = 270.0
PIECE_BYTES = 16
SAMPLE = 50  # of so many faults one device is led to its end


class FineFile(slot_disks.SteppedFile):
    """A file of which every `PIECE_BYTES` are a step."""

    def write(self, data: object) -> int:
        content = bytes(data)  # type: ignore[call-overload]
        for at in range(0, len(content), PIECE_BYTES):
            self._disk.step("write")
            io.FileIO.write(self, content[at : at + PIECE_BYTES])
            self._disk.written(self.path, content[at : at + PIECE_BYTES])
        return len(content)


class Faults:
    """Counts faults, and what came of them."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.end_s = folder, time.monotonic() + limit_s
        self.maker = make_maker.__wrapped__()
        self.packages = {}
        for version in VERSIONS:
            path = folder / f"{version}.edgepkg"
            self.maker.write(path, version=version)
            self.packages[version] = path, self.maker.manifest(version=version).sha256
        self.counts: Counter[tuple[str, str]] = Counter()
        self.broken: list[str] = []

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
        self.counts[transition, kind] += 1
        device = self.device("state")
        try:
            assert device.start() in VERSIONS
            if sum(self.counts.values()) % SAMPLE == 0:
                assert device.run("3.0.0") == "succeeded"
                assert device.start() == "3.0.0"
        except (AssertionError, EdgekitError, OSError) as error:
            self.broken.append(f"{transition}, {kind}: {error}")

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
                if time.monotonic() > self.end_s:
                    return
        for states in recording.points:
            for content in states:
                _write(state, content)
                self.check(transition, "power cut")
                if time.monotonic() > self.end_s:
                    return


def _fail_at(at: int, kind: str) -> AtStep:
    def act(number: int, name: str) -> None:
        if kind == "kill" and number == at:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    install._test_in_child = lambda _path: None
    slot_disks.SteppedFile = FineFile  # type: ignore[misc]
    logging.disable(logging.WARNING)
    memory = Path("/dev/shm")  # noqa: S108  # the folder in it is a new one of a random name
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        faults = Faults(Path(folder), arguments.limit_s)
        for transition, installed in TRANSITIONS.items():
            faults.run(transition, installed)
    for (transition, kind), count in sorted(faults.counts.items()):
        print(f"{transition:16} {kind:10} {count:6}")
    total = sum(faults.counts.values())
    print(f"{total} faults, {len(faults.broken)} devices without a whole model")
    for text in faults.broken[:10]:
        print(text)
    if arguments.json:
        rows = [[*key, count] for key, count in sorted(faults.counts.items())]
        arguments.json.write_text(json.dumps({"faults": rows, "broken": faults.broken}, indent=1))
    return bool(faults.broken)


if __name__ == "__main__":
    sys.exit(main())
