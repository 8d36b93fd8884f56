"""Faults at every step of the agent's journal and slots, in this process.

A kill, a full disk, a failed call, and every state that a power cut may leave (unsynced writes dropped, torn
or kept), at every step that changes the disk. Afterwards the journal holds the last record that was written
or the one that was being written, a whole signed model starts, and some devices are led to what is wanted.
"""

import contextlib
import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tests.agent.parts import HERE, make_desired, want
from tests.faults.disk_calls import KINDS, AtStep, DiskCalls, Killed, Kind, end_here
from tests.faults.posix_disk import State, write_state
from tests.faults.processes import Outcome
from tests.memory_folder import memory_folder
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import copy_folder

from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.journal import Journal, JournalRecord, read_journal
from edgekit_runtime.agent.reconcile import reconcile
from edgekit_runtime.encryption.container import encrypt_file, make_content_key
from edgekit_runtime.encryption.device_key import DeviceKey
from edgekit_runtime.encryption.key_wrapping import wrap_key
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Slots
from edgekit_runtime.trust.dsse import Verifier

VERSIONS = ("1.0.0", "2.0.0", "3.0.0")
TRANSITIONS = {"first update": 1, "second update": 2, "two updates": 0}
POWER_CUT = "power cut"
PIECE_BYTES = 16
WINDOW_BYTES = 32
"""Of plaintext that no file of a device with an encrypted package may hold."""
SAMPLE = 50  # of so many faults one device is led to its end


@dataclass
class History:
    """The records that a device wrote to its journal.

    Attributes:
        records: in their order; the last one may not have been written to its end.
        written: how many were.
    """

    records: list[JournalRecord] = field(default_factory=list)
    written: int = 0

    def write(self, journal: Journal, record: JournalRecord) -> None:
        self.records.append(record)
        journal.write(record)
        self.written = len(self.records)

    def list_allowed(self) -> list[JournalRecord]:
        """Return what the journal may hold now: what was written last, or is being written."""
        return self.records[max(0, self.written - 1) :]


@dataclass(frozen=True)
class Package:
    """A package as if downloaded, perhaps encrypted.

    Attributes:
        path: where it lies; beside it the agent writes its key.
        key_id, wrapped_key: as in `DesiredModel`.
    """

    path: Path
    manifest_sha256: str
    key_id: str = ""
    wrapped_key: str = ""


class Device:
    """The agent's journal and slots in a folder; packages are there as if downloaded."""

    def __init__(self, folder: Path, packages: dict[str, Package], trust: Verifier) -> None:
        self.folder, self.packages, self.trust = folder, packages, trust
        self.journal_path = folder / "journal.json"
        folder.mkdir(exist_ok=True)

    def run(self, version: str, history: History | None = None, turns: int = 12) -> str:
        """Do what a desired document with `version` asks for; returns the state of its execution."""
        history = history or History()
        journal = Journal(self.journal_path)
        slots = Slots(self.folder, self.trust)
        installer = Installer(slots, self.folder / "no-socket", self_test=lambda _: None)
        package = self.packages[version]
        path = package.path
        if package.key_id:  # each device has its own, beside which the key is written
            path = self.folder / path.name
        wanted = want(
            model="linear",
            version=version,
            manifest_sha256=package.manifest_sha256,
            execution=f"e-{version}",
            size_bytes=path.stat().st_size,
            key_id=package.key_id,
            wrapped_key=package.wrapped_key,
        )
        desired, state = make_desired(wanted), ""
        for _ in range(turns):
            views = {model: installer.view(model) for model in installer.fingerprint()}
            plan = reconcile(desired, journal.record.executions, views, HERE)
            has_settled = not plan.steps and plan.executions == journal.record.executions
            history.write(journal, dataclasses.replace(journal.record, executions=plan.executions))
            (state,) = {progress.report.state for progress in plan.executions}
            for step in plan.steps:
                assert step.action == "install"
                installer.install(path, wanted)
                done = [progress.enter("trying", code="installed") for progress in plan.executions]
                history.write(journal, dataclasses.replace(journal.record, executions=tuple(done)))
            if has_settled:  # all further turns would be the same
                break
        return state

    def start(self) -> str:
        """Return the version that a fresh process starts, after it has read all of it."""
        choice = Slots(self.folder, self.trust).begin_start("linear")
        with choice.package as package:
            assert all(bytes(package.read(artifact.path)) for artifact in package.manifest.artifacts)
            assert package.manifest.version == choice.version
        return choice.version

    def read_journal(self) -> JournalRecord:
        return read_journal(self.journal_path)


Case: TypeAlias = "tuple[str, Callable[[], list[JournalRecord]]]"
"""Kind of a fault, and what tries it: returns what the journal may hold afterwards."""


class JournalBench:
    """A device before a transition, on which faults are tried.

    Attributes:
        outcome: what came of them.
    """

    def __init__(
        self,
        folder: Path,
        maker: PackageMaker,
        *,
        piece_bytes: int | None = None,
        device_key: DeviceKey | None = None,
    ) -> None:
        """Make packages in `folder`, encrypted for a device that has a key.

        See `DiskCalls` for `piece_bytes`.
        """
        self.outcome = Outcome()
        self._trust, self._piece_bytes = maker.trust, piece_bytes
        self._packages: dict[str, Package] = {}
        self._plaintext: list[bytes] = []
        for version in VERSIONS:
            path = folder / f"{version}.edgepkg"
            maker.write(path, version=version)
            package = Package(path, maker.manifest(version=version).sha256)
            if device_key is not None:
                package = self._encrypt(package, device_key)
            self._packages[version] = package
        self._before, self._root = folder / "before", folder / "disk"
        self._installed = 0

    def _encrypt(self, package: Package, device_key: DeviceKey) -> Package:
        content, key = package.path.read_bytes(), make_content_key()
        windows = (
            content[at : at + WINDOW_BYTES] for at in range(0, len(content) - WINDOW_BYTES, WINDOW_BYTES)
        )
        self._plaintext += [window for window in windows if window.strip(b"\0")]  # torn files are zeros
        path = package.path.with_suffix(".encrypted")
        encrypt_file(package.path, path, key)
        wrapped_key = wrap_key(key, device_key.public_key)
        return Package(path, package.manifest_sha256, key.key_id, wrapped_key)

    def _open(self, folder: Path) -> Device:
        return Device(folder, self._packages, self._trust)

    def list_cases(self, transition: str, kinds: Sequence[str] = KINDS) -> list[Case]:
        """Carry a transition out undisturbed; return faults at each of its steps, and each power cut."""
        self._installed = TRANSITIONS[transition]
        copy_folder(self._root / "missing", self._before)
        device = self._open(self._before)
        for package in self._packages.values():
            if package.key_id:
                shutil.copyfile(package.path, self._before / package.path.name)
        for version in VERSIONS[: max(1, self._installed)]:
            device.run(version)
            device.start()
            Slots(device.folder, self._trust).confirm("linear", version)
        cuts: list[Case] = []
        history = History()

        def note(_: int, __: str) -> None:
            allowed = history.list_allowed()
            cuts.extend((POWER_CUT, partial(self._lay_out, state, allowed)) for state in calls.disk.states())

        calls = self._make_calls(note if POWER_CUT in kinds else None)
        self._act(calls, history)
        assert device.start() != self._open(self._root / "device").start(), "the transition changes nothing"
        faults: list[Case] = [
            (kind, partial(self._interrupt, at, kind))
            for at in range(calls.count)
            for kind in KINDS
            if kind in kinds
        ]
        return faults + cuts

    def _make_calls(self, at_step: AtStep | None = None) -> DiskCalls:
        copy_folder(self._before, self._root / "device")
        return DiskCalls(self._root, at_step, end=end_here, piece_bytes=self._piece_bytes)

    def _act(self, calls: DiskCalls, history: History, at: int | None = None, kind: Kind = "kill") -> None:
        device = self._open(self._root / "device")
        history.records, history.written = [device.read_journal()], 1
        with calls.installed(), contextlib.suppress(Killed, EdgekitError, OSError):
            calls.arm(at, kind)
            for version in VERSIONS[self._installed :][:1] if self._installed else VERSIONS[1:]:
                device.run(version, history)

    def _interrupt(self, at: int, kind: Kind) -> list[JournalRecord]:
        history = History()
        self._act(self._make_calls(), history, at, kind)
        return history.list_allowed()

    def _lay_out(self, state: State, allowed: list[JournalRecord]) -> list[JournalRecord]:
        write_state(state, self._root, self._root)
        return allowed

    def try_case(self, transition: str, case: Case, *, to_the_end: bool) -> None:
        """Try a fault; check journal and model afterwards, and perhaps that it reaches the newest version."""
        kind, act = case
        allowed = act()
        self.outcome.counts[transition, kind] += 1
        device = self._open(self._root / "device")
        try:
            assert device.read_journal() in allowed, "the journal holds an older record"
            assert device.start() in VERSIONS
            if to_the_end:
                assert device.run("3.0.0") == "succeeded"
                assert device.start() == "3.0.0"
            self._check_plaintext()
        except (AssertionError, EdgekitError, OSError) as error:
            self.outcome.wrong.append((transition, kind, str(error)))

    def _check_plaintext(self) -> None:
        for path in self._root.rglob("*") if self._plaintext else ():
            content = path.read_bytes() if path.is_file() else b""
            assert not any(window in content for window in self._plaintext), f"{path} holds plaintext"


def run(maker: PackageMaker, limit_s: float, most: int | None = None) -> Outcome:
    """Return what came of the faults that could be tried in this time, in a random order, always the same."""
    end_s = time.monotonic() + limit_s
    with memory_folder() as folder:
        bench = JournalBench(folder, maker, piece_bytes=PIECE_BYTES)
        for number, transition in enumerate(TRANSITIONS, 1):
            cases = bench.list_cases(transition, (*KINDS, POWER_CUT))
            bench.outcome.all += len(cases)
            random.Random(0).shuffle(cases)  # no secret
            share = None if most is None else most // len(TRANSITIONS)
            for at, case in enumerate(cases[:share]):
                if time.monotonic() > end_s - limit_s * (1 - number / len(TRANSITIONS)):
                    break
                bench.try_case(transition, case, to_the_end=at % SAMPLE == 0)
    return bench.outcome
