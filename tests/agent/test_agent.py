"""The agent against a real fleet: its broker, its web server, its repository and its manager."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.service.serve_parts import environment
from tests.waiting import wait_for

from edgekit_fleet.manager.publisher import mark_due
from edgekit_fleet.operations import devices
from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.store.tables import WantedModelRow
from edgekit_runtime.agent.documents import DesiredModel, Reported
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.slots import Slots
from edgekit_runtime.trust.trust_store import TrustStore

pytest.importorskip("onnxruntime")


class Site:
    """A fleet, a device of it whose agent is a process, and packages."""

    def __init__(self, fleet, maker, path):  # noqa: F811
        self.fleet, self.maker, self.path = fleet, maker, path
        self.home = path / "home"
        self.variables = {
            **environment(self.home),
            "EDGEKIT_TARGET": "x86-64",
            "XDG_RUNTIME_DIR": str(path / "run"),
        }
        (path / "run" / "edgekit").mkdir(parents=True)
        self.processes = []
        self.repository = TufRepository(fleet.folder.repository, fleet.folder.repository_keys)
        self.number = 0

    def command(self, *words):
        return [sys.executable, "-m", "edgekit_runtime.cli", *words]

    def enrol(self):
        parts = (self.fleet.store, self.fleet.settings, self.fleet.authority, ("d1",))
        (invitation,) = devices.invite(*parts, actor="test", target="x86-64")
        done = subprocess.run(
            self.command("enroll", "--code", invitation.code),
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        public = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32).public_key()
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (self.home / "keys").mkdir(exist_ok=True)
        (self.home / "keys" / "vendor.pub.pem").write_bytes(pem)

    def start(self, *words):
        with (self.path / f"{words[0]}.log").open("ab") as log:
            process = subprocess.Popen(self.command(*words), env=self.variables, stderr=log)
        self.processes.append(process)
        return process

    def publish(self, version, **changes):
        path = self.path / f"linear-{version}-x86-64.edgepkg"
        self.maker.write(path, version=version, **changes)
        (found,) = self.repository.publish(
            [NewTarget(device_class="x86-64", name=path.name, source=path)], time.time()
        )
        manifest = self.maker.manifest(version=version, **changes)
        return found, manifest.sha256

    def want(self, version, **changes):
        found, sha256 = self.publish(version)
        self.number += 1
        model = DesiredModel(
            model="linear",
            version=version,
            manifest_sha256=sha256,
            path=found.path,
            size_bytes=found.size_bytes,
            sha256=found.sha256,
            execution=f"e{self.number}",
            release="r",
            rollout="r1",
        )
        self.want_model(replace(model, **changes))

    def want_model(self, model):
        with self.fleet.store.transaction() as session:
            session.merge(
                WantedModelRow(
                    device="d1", model="linear", rollout="r1", document=to_plain(model), is_removed=False
                )
            )
            mark_due(session, ["d1"])

    def reported(self):
        found = self.fleet.detail("d1").reported
        return None if found is None else from_plain(Reported, to_plain(found), "reported")

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
        for process in site.processes:
            process.send_signal(signal.SIGTERM)
        for process in site.processes:
            process.wait(20)


def status(site):
    found = site.reported()
    return None if found is None else (found.status, [one.state for one in found.executions])


def test_device_installs_what_the_fleet_wants_and_shows_what_is_done_by_hand(site):
    site.enrol()
    agent = site.start("agent")
    wait_for(lambda: status(site), f"a report; {site.log()}", 30)
    site.want("1.0.0")
    wait_for(lambda: status(site) == ("converged", ["succeeded"]), f"1.0.0; {site.log()}", 40)
    site.want("2.0.0")
    wait_for(lambda: [one.version for one in site.reported().models] == ["2.0.0"], "2.0.0", 40)
    site.slots().rollback("linear")
    wait_for(lambda: site.reported().status == "diverged", "the rollback to show", 10)
    assert "rolled back by hand" in site.reported().because
    text = Path(f"/proc/{agent.pid}/smaps_rollup").read_text()
    (pss,) = re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    print(f"agent: {int(pss) / 1024:.1f} MB PSS")


def test_device_follows_the_trial_of_the_service(site):
    site.enrol()
    site.start("serve", "--port", "0")
    site.start("agent")
    site.want("1.0.0")
    wait_for(lambda: status(site) == ("converged", ["succeeded"]), "1.0.0 to be confirmed", 60)
    site.want("2.0.0", trial="shadow")
    wait_for(lambda: status(site) == ("working", ["trying"]), f"a trial; {site.log()}", 30)
    (execution,) = site.reported().executions
    wait_for(lambda: "shadow with" in site.reported().executions[0].reason, f"the trial {execution}", 20)
    site.slots().reject("linear", "2.0.0", "latency: twice").package.close()
    wait_for(lambda: site.reported().status == "diverged", "the verdict", 20)
    assert site.reported().executions[0].state == "failed"


def test_file_that_the_repository_does_not_offer_is_refused(site):
    site.enrol()
    site.start("agent")
    site.want("1.0.0", sha256=hashlib.sha256(b"").hexdigest())
    wait_for(lambda: status(site) == ("diverged", ["refused"]), "the refusal", 30)
    assert site.reported().executions[0].code == "not-offered"


def test_agent_that_is_killed_goes_on_where_it_was(site):
    site.enrol()
    agent = site.start("agent")
    wait_for(lambda: status(site), "a report", 30)
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    site.want("1.0.0")
    site.start("agent")
    wait_for(lambda: status(site) == ("converged", ["succeeded"]), f"1.0.0; {site.log()}", 40)
