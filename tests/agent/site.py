"""A fleet that runs, and devices of it whose agents and services are processes."""

import contextlib
import io
import itertools
import json
import os
import signal
import sqlite3
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.fork_server import runtime_server
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.service.serve_parts import environment
from tests.waiting import wait_for

from edgekit_fleet.operations import devices
from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import WantedModelRow
from edgekit_runtime.agent.documents import DesiredModel, Reported
from edgekit_runtime.cli import main
from edgekit_runtime.client.control import is_listening, read_index, read_metrics
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.slots import Slots
from edgekit_runtime.trust.trust_store import TrustStore

ENDS = ("failed", "refused", "timed_out", "superseded")  # of executions without their version
_numbers = itertools.count(1)


class Site:
    """A device of a fleet, and packages for it."""

    def __init__(self, fleet, maker, path, name="d1"):  # noqa: F811
        self.fleet, self.maker, self.path = fleet, maker, path
        self.name, self.home = name, path / "home"
        self.variables = {
            **environment(self.home),
            "EDGEKIT_TARGET": "x86-64",
            "XDG_RUNTIME_DIR": str(path / "run"),
        }
        (path / "run" / "edgekit").mkdir(parents=True)
        self.socket_path = path / "run" / "edgekit" / "edgekit.sock"
        self.processes = []
        self._store = sqlite3.connect(f"file:{fleet.folder.database}?mode=ro", uri=True)
        self._read = None, None
        self.repository = TufRepository(fleet.folder.repository, fleet.folder.repository_keys)

    def command(self, *words):
        return [sys.executable, "-m", "edgekit_runtime.cli", *words]

    def run(self, *words):
        """Run a command to its end and return its output."""
        code, output, errors = self.call(*words)
        assert code == 0, errors
        return output

    def call(self, *words):
        """Run a command in this process; returns its exit code, its output and its errors."""
        output, errors = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.variables),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            code = main(words)
        return code, output.getvalue(), errors.getvalue()

    def enrol(self):
        parts = (self.fleet.store, self.fleet.settings, self.fleet.authority, (self.name,))
        (invitation,) = devices.invite(*parts, actor="test", target="x86-64")
        self.run("enroll", "--code", invitation.code)
        public = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32).public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (self.home / "keys").mkdir(exist_ok=True)
        (self.home / "keys" / "vendor.pub.pem").write_bytes(pem)

    def start(self, *words):
        """Start a command as a copy of a process that has imported it."""
        with (self.path / f"{words[0]}.log").open("ab") as log:
            process = runtime_server().popen(self.command(*words), env=self.variables, stderr=log)
        self.processes.append(process)
        return process

    def serve(self):
        """Start the service and wait until it listens."""
        process = self.start("serve", "--port", "0")
        wait_for(lambda: is_listening(self.socket_path), f"the service; {self.log()}")
        return process

    def end(self):
        self._store.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait(20)

    def make(self, version, model="linear"):
        """Return the path of a package, and the digest of its manifest."""
        path = self.path / f"{model}-{version}-x86-64.edgepkg"
        self.maker.write(path, version=version, name=model)
        return path, self.maker.manifest(version=version, name=model).sha256

    def install(self, version, model="linear", **changes):
        """Install a version that has proved itself, without the fleet."""
        self.slots().install(self.make(version, model)[0], **changes)
        self.slots().begin_start(model).package.close()
        self.slots().confirm(model, version)

    def publish(self, version):
        """Return what the repository offers of a version, and the digest of its manifest."""
        path, sha256 = self.make(version)
        return self._publish(path), sha256

    def _publish(self, path, custom=None):
        target = NewTarget(device_class="x86-64", name=path.name, source=path, custom=custom or {})
        (found,) = self.repository.publish([target], time.time())
        return found

    def want(self, version, *, name="linear", custom=None, **changes):
        path, sha256 = self.make(version, name)
        found = self._publish(path, custom)
        model = DesiredModel(
            model=name,
            version=version,
            manifest_sha256=sha256,
            path=found.path,
            size_bytes=found.size_bytes,
            sha256=found.sha256,
            execution=f"e{next(_numbers)}",
            release="r",
            rollout="r1",
        )
        self._write(name, to_plain(replace(model, **changes)))

    def want_removed(self, name="linear"):
        self._write(name, {}, is_removed=True)

    def _write(self, name, document, is_removed=False):
        with self.fleet.store.transaction() as session:
            row = {"device": self.name, "model": name, "rollout": "r1", "document": document}
            session.merge(WantedModelRow(**row, is_removed=is_removed))
            mark_due(session, [self.name])

    def reported(self):
        """Return the device's last report; tests ask often, so the manager's own queries would cost more."""
        statement = "SELECT reported FROM devices WHERE name = ?"
        (text,) = self._store.execute(statement, (self.name,)).fetchone() or (None,)
        if text != self._read[0]:
            document = json.loads(text or "null")
            self._read = text, document and from_plain(Reported, document, "reported")
        return self._read[1]

    def status(self):
        found = self.reported()
        return None if found is None else (found.status, [one.state for one in found.executions])

    def wait_status(self, *expected):
        return self.wait(lambda: self.status() == expected, expected)

    def wait_version(self, version):
        """Wait until the device runs a version, and no longer than its installation may succeed."""

        def runs():
            report = self.reported()
            ended = [one for one in report.executions if one.version == version and one.state in ENDS]
            assert not ended, f"{ended}; {self.log()}"
            return [one.version for one in report.models] == [version]

        return self.wait(runs, version)

    def wait(self, condition, expected):
        """Wait as long as what the device reports of its executions goes on changing."""

        def progress():
            report = self.reported()
            return None if report is None else (report.status, report.executions, report.models)

        return wait_for(condition, lambda: f"{expected}, not {progress()}; {self.log()}", progress=progress)

    def served(self, model="linear"):
        """Return version and state of what the service serves."""
        found = (read_index(self.socket_path) or {}).get(model, [])
        return [(line["version"], line["state"], line["reason"]) for line in found if line["version"]]

    def metrics(self):
        return read_metrics(self.socket_path)

    def slots(self):
        return Slots(self.home / "state", TrustStore.from_folder(self.home / "keys"), "x86-64")

    def log(self):
        return "".join(path.read_text()[-3000:] for path in self.path.glob("*.log"))


@pytest.fixture
def site(fleet, maker, tmp_path):  # noqa: F811
    site = Site(fleet, maker, tmp_path)
    try:
        yield site
    finally:
        site.end()


def status(site):
    return site.status()
