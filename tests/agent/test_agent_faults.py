"""Kills, lost writes, full disks and torn files over every transition of journal and slots."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest
from tests.agent.parts import HERE, make_desired, want
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.runtime.slot_disks import SteppedDisk

from edgekit_runtime.agent.execution import install
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.journal import Journal
from edgekit_runtime.agent.reconcile import reconcile
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Slots
from edgekit_runtime.system.atomic_files import DISK

VERSIONS = ("1.0.0", "2.0.0", "3.0.0")


class Killed(BaseException):
    """The process ends here."""


class Device:
    """The agent's journal and slots in a folder; packages are there as if downloaded."""

    def __init__(self, folder, packages, trust):
        self.folder, self.packages, self.trust = folder, packages, trust
        folder.mkdir(exist_ok=True)

    def run(self, version, disk=DISK, turns=12):
        """Do what a desired document with `version` asks for; returns the state of its execution."""
        journal = Journal(self.folder / "journal.json", disk)
        installer = Installer(Slots(self.folder, self.trust, disk=disk), self.folder / "no-socket")
        path, manifest_sha256 = self.packages[version]
        wanted = want(
            model="linear",
            version=version,
            manifest_sha256=manifest_sha256,
            execution=f"e-{version}",
            size_bytes=path.stat().st_size,
        )
        desired, state = make_desired(wanted), ""
        for _ in range(turns):
            views = {model: installer.view(model) for model in installer.fingerprint()}
            plan = reconcile(desired, journal.record.executions, views, HERE)
            journal.write(dataclasses.replace(journal.record, executions=plan.executions))
            (state,) = {one.report.state for one in plan.executions}
            for step in plan.steps:
                assert step.action == "install"
                installer.install(path, wanted)
                done = [one.enter("trying", code="installed") for one in plan.executions]
                journal.write(dataclasses.replace(journal.record, executions=tuple(done)))
        return state

    def start(self):
        """Return the version that a fresh process starts, after it has read all of it."""
        choice = Slots(self.folder, self.trust).begin_start("linear")
        with choice.package as package:
            assert all(bytes(package.read(artifact.path)) for artifact in package.manifest.artifacts)
            assert package.manifest.version == choice.version
        return choice.version


@pytest.fixture(autouse=True)
def no_self_test(monkeypatch):
    monkeypatch.setattr(install, "_test_in_child", lambda path: None)


@pytest.fixture
def packages(maker, tmp_path):  # noqa: F811
    found = {}
    for version in VERSIONS:
        path = tmp_path / f"{version}.edgepkg"
        maker.write(path, version=version)
        found[version] = path, maker.manifest(version=version).sha256
    return found


class FaultyDisk(SteppedDisk):
    """Does one thing wrong at one step: ends the process, or has no space from then on."""

    def __init__(self, at, kind):
        def act(number, name):
            if number == at and kind in ("kill", "torn", "dropped"):
                if kind == "torn" and self.last is not None and self.last.exists():
                    size = self.last.stat().st_size
                    os.truncate(self.last, size // 2)
                if kind == "dropped" and self.last is not None and self.last.exists():
                    os.truncate(self.last, 0)
                raise Killed
            if number >= at and kind == "full" and name in ("open", "write", "mkdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        super().__init__(act)
        self.last: Path | None = None  # written and not synced yet

    def written(self, path, data):
        self.last = path

    def sync(self, file):
        super().sync(file)
        self.last = None


@pytest.mark.parametrize("kind", ["kill", "torn", "dropped", "full"])
def test_update_interrupted_at_any_step_leaves_a_whole_model_and_is_finished_later(
    kind,
    packages,
    maker,  # noqa: F811
    tmp_path,
    is_long,
):
    at, cases = 0, 0
    while True:
        device = Device(tmp_path / f"d{at}", packages, maker.trust)
        assert device.run("1.0.0") == "succeeded"
        device.start()
        Slots(device.folder, maker.trust).confirm("linear", "1.0.0")
        disk = FaultyDisk(at, kind)
        was_hit = False
        try:
            for version in VERSIONS[1:]:
                device.run(version, disk)
        except (Killed, EdgekitError, OSError):
            was_hit = True
        assert device.start() in VERSIONS
        assert device.run("3.0.0") == "succeeded"
        assert device.start() == "3.0.0"
        cases += 1
        if not was_hit:
            break
        at += 1 if is_long else 3
    print(f"{kind}: {cases} cases")
    assert cases > (30 if is_long else 10)
