"""The real agent against a real TUF repository, with its clock, network and broker in an attacker's hands.

Everything is in memory but the disk, and time is simulated: a device that waits for an hour takes none.
"""

import contextlib
import json
import queue
import random
import shutil
import threading
import time
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.agent.parts import make_enrolment
from tuf.api.metadata import Metadata

from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.releases.repository_keys import MANAGER_ROLE, RepositoryKeys
from edgekit_runtime.agent import agent as agent_module
from edgekit_runtime.agent.agent import Agent, AgentOptions
from edgekit_runtime.agent.artifacts import download
from edgekit_runtime.agent.artifacts.download import Downloader, DownloadLimits
from edgekit_runtime.agent.documents import Desired, DesiredModel
from edgekit_runtime.agent.execution import step_runner
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.local_steps import LocalSteps
from edgekit_runtime.agent.membership import Membership
from edgekit_runtime.agent.mqtt_link import LinkMessage
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots import Slots
from edgekit_runtime.system.atomic_files import hash_file

NOW_S = 1_800_000_000.0
TARGET = "x86-64"
CLOCKS = {"1970": 0.0, "2015": 1.42e9, "of-a-shutdown": NOW_S - 90 * 86_400.0}
"""Seconds since 1970 that a clock without a battery shows after a start."""
REPORTED_WITHIN_S = 90.0
"""Deadline by which an attack on a download must be reported: 60 s of too little data, and a retry."""


class SimulatedTime:
    """Stands for the module `time`.

    Attributes:
        passed_s: since the start of the test.
        lie_s: by which the clock of the device is ahead of the truth.
    """

    gmtime, localtime, strftime = time.gmtime, time.localtime, time.strftime

    def __init__(self):
        self.passed_s, self.lie_s = 0.0, 0.0

    def monotonic(self):
        return self.passed_s

    def time(self):
        return self.true_time() + self.lie_s

    def true_time(self):
        return NOW_S + self.passed_s


class InlineThread:
    """A thread that is over when it has been started."""

    def __init__(self, target, **_):
        self.start = target

    def join(self, _timeout_s=None):
        pass


class Mirror:
    """Serves a repository as its `change` has it.

    Attributes:
        change: takes the path of a request and the content; returns what is sent, None for 404, or raises.
        bytes_per_s: pace, or None for no time at all.
        is_endless: whether it goes on sending.
        cut_bytes: connections end after so many bytes, or None.
        requests: paths asked for.
        sent_bytes: in all.
    """

    def __init__(self, folder, clock):
        self.folder, self.clock = folder, clock
        self.change = lambda _path, data: data
        self.bytes_per_s = self.cut_bytes = None
        self.is_endless, self.requests, self.sent_bytes = False, [], 0

    @contextlib.contextmanager
    def open(self, url, headers):
        path = urlsplit(url).path.removeprefix("/artifacts/")
        self.requests.append(path)
        file = self.folder / path
        data = self.change(path, file.read_bytes() if file.exists() else None)
        self.sent_bytes += 300
        if data is None:
            yield SimpleNamespace(status=404, headers={})
            return
        begin = int(headers["Range"].removeprefix("bytes=").split("-")[0]) if "Range" in headers else 0
        fields = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        rest, sent = memoryview(data)[begin:], 0

        def read1(limit):
            nonlocal rest, sent
            limit = min(limit, int(self.bytes_per_s or limit))
            if self.cut_bytes is not None:
                limit = min(limit, self.cut_bytes - sent)
            piece, rest = bytes(rest[:limit]), rest[limit:]
            if not piece and self.is_endless:
                piece = b"x" * limit
                assert self.sent_bytes < 256 << 20, "endless data is read"
            sent += len(piece)
            self.sent_bytes += len(piece)
            self.clock.passed_s += len(piece) / self.bytes_per_s if self.bytes_per_s else 0.0
            return piece

        yield SimpleNamespace(status=206 if begin else 200, headers=fields, read1=read1)


class Broker:
    """Stands for the agent's link: what a broker could do to it, it does.

    Attributes:
        sent: kind and content of what the device sent.
    """

    def __init__(self, *_):
        self.received = queue.SimpleQueue()
        self.will, self.reconnect_s, self.sent, self.problem = b"", 30.0, [], None
        self.is_connected = True

    def start(self):
        self.received.put(LinkMessage("hello"))

    def stop(self):
        pass

    def put(self, kind, payload, **_):
        plain = json.loads(b64decode(json.loads(payload)["payload"]))
        self.sent.append((kind, plain))

    def deliver(self, payload, kind="desired"):
        self.received.put(LinkMessage(kind, payload))


@dataclass(frozen=True)
class SiteMembership(Membership):
    def make_context(self, trusted_time=None):
        return None


class AttackSite:
    """A fleet of one device, on which 1.0.0 of the model `linear` runs, and an attacker."""

    def __init__(self, folder, maker, monkeypatch):
        self.folder, self.maker, self.clock = folder, maker, SimulatedTime()
        self.repository = TufRepository(folder / "repository", folder / "keys")
        self.repository.create(self.clock.true_time())
        self.mirror = Mirror(folder / "repository", self.clock)
        self.key = Ed25519PrivateKey.generate()
        self.root = self.repository.read_root(1).decode()
        self.version = self.count = 0
        self.options = AgentOptions()
        self.turned_s = 0.0
        self._patch(monkeypatch)
        self.restart()

    def _patch(self, monkeypatch):
        site = self

        class SimulatedEvent(threading.Event):
            def wait(self, timeout=None):
                site.clock.passed_s += timeout or 0.0
                return self.is_set()

        names = SimpleNamespace(Event=SimulatedEvent, Lock=threading.Lock, Thread=InlineThread)
        monkeypatch.setattr(step_runner, "threading", names)
        monkeypatch.setattr(agent_module, "time", self.clock)
        monkeypatch.setattr(download, "time", self.clock)
        monkeypatch.setattr(agent_module, "MqttLink", Broker)
        engines = agent_module.list_engines()  # looked for in each report, in all folders of the path
        monkeypatch.setattr(agent_module, "list_engines", lambda: engines)
        monkeypatch.setattr(Downloader, "open", lambda _, url, headers: site.mirror.open(url, headers))
        random.seed(1)

    def restart(self):
        """Start the agent as after a power cut; it connects."""
        enrolment = make_enrolment(tuf_root=self.root, target=TARGET)
        member = SiteMembership(enrolment=enrolment, key=self.key, folder=self.folder)
        slots = Slots(self.folder / "slots", self.maker.trust, TARGET)
        installer = Installer(slots, self.folder / "none", self_test=lambda _: None)
        (self.folder / "slots").mkdir(exist_ok=True)
        folder, clock = self.folder / "agent", self.clock.time
        steps = LocalSteps(member, folder, installer, Downloader(None, DownloadLimits()), clock=clock)
        self.agent = Agent(member, folder, installer, self.options, carrier=steps, clock=clock)
        self.broker = self.agent._link
        self.agent.connect()

    # The fleet's side

    @property
    def manager(self):
        """The manager's key, as the newest root names it."""
        (key,) = RepositoryKeys(self.folder / "keys").list_private(MANAGER_ROLE)
        return key

    def exchange_key(self):
        """Give the manager a new key; returns the old one."""
        old = self.manager
        self.repository.rotate(self.clock.true_time(), roles=[MANAGER_ROLE])
        return old

    def publish(self, version, *, device_class=TARGET, data=None, now=None, **changes):
        """Offer a package; returns what a document asks for."""
        path = self.folder / f"linear-{version}-{device_class}.edgepkg"
        self.maker.write(path, version=version, **changes)
        manifest_sha256 = self.maker.manifest(version=version, **changes).sha256
        if data is not None:
            path.write_bytes(data)
        new = NewTarget(device_class=device_class, name=path.name, source=path)
        (found,) = self.repository.publish([new], self.clock.true_time() if now is None else now)
        wanted = self.describe(version, path)
        return replace(wanted, manifest_sha256=manifest_sha256, path=found.path)

    def order(self, *models, **changes):
        """Return a signed document that asks for models, each with an execution of its own."""
        self.version += 1
        named = []
        for model in models:
            self.count += 1
            named.append(replace(model, execution=f"e{self.count}"))
        stated = {
            "device": "d1",
            "version": self.version,
            "issued_at": self.clock.true_time(),
            "expires_at": self.clock.true_time() + 7 * 86_400.0,
            "epoch": 5,
            "models": tuple(named),
            "reconnect_s": 1.0,
        }
        key = changes.pop("key", self.manager)
        return seal(Desired(**{**stated, **changes}), "desired", key)

    def forge(self, name, change, *, role=None, keys=None):
        """Return metadata of the repository after `change`, signed by whoever holds the keys in a folder."""
        metadata = Metadata.from_bytes((self.repository.folder / "metadata" / name).read_bytes())
        change(metadata.signed)
        metadata.signatures.clear()
        thief = TufRepository(self.repository.folder, keys or self.folder / "keys")
        role = role or name.removesuffix(".json").rpartition(".")[2]
        for signer in thief._keys.signers(role):
            metadata.sign(signer, append=True)
        return metadata.to_bytes()

    def forge_root(self, signers):
        """Return a next root, by others than those whom the newest one names."""
        metadata = Metadata.from_bytes(
            (self.repository.folder / "metadata" / self.newest("root")).read_bytes()
        )
        metadata.signed.version += 1
        metadata.signatures.clear()
        for signer in signers:
            metadata.sign(signer, append=True)
        return metadata.to_bytes()

    def describe(self, version, path):
        """Return what a document asks for that wants the package at `path`."""
        return DesiredModel(
            model="linear",
            version=version,
            manifest_sha256=self.maker.manifest(version=version).sha256,
            path=f"{TARGET}/linear-{version}-{TARGET}.edgepkg",
            size_bytes=path.stat().st_size,
            sha256=hash_file(path),
            execution="",
            release="r",
            rollout="r1",
        )

    def steal_keys(self):
        """Return a copy of the folder of keys, as a thief holds it."""
        return shutil.copytree(self.folder / "keys", self.folder / "stolen")

    def newest(self, role):
        """Return the name of the newest metadata of a role."""
        folder = self.repository.folder / "metadata"
        return max(path.name for path in folder.glob(f"*.{role}.json"))

    # The device's side

    def run(self, seconds, step_s=1.0):
        """Let the device work for simulated `seconds`."""
        end_s = self.clock.passed_s + seconds
        while self.clock.passed_s < end_s:
            self._turn(step_s)

    def _turn(self, step_s):
        self.clock.passed_s += step_s
        elapsed_s, self.turned_s = self.clock.passed_s - self.turned_s, self.clock.passed_s
        self.agent.turn(elapsed_s)

    def run_until(self, check, limit_s=REPORTED_WITHIN_S, step_s=1.0):
        """Let the device work until `check` returns something; fails after simulated `limit_s`."""
        begin_s = self.clock.passed_s
        while not (found := check()):
            assert self.clock.passed_s - begin_s <= limit_s, f"not within {limit_s} s: {self.execution}"
            self._turn(step_s)
        return found

    def attacks(self, kind="attack"):
        """Return the texts of the events of a kind that the device sent."""
        return [
            plain["text"] for sent, plain in self.broker.sent if sent == "event" and plain["kind"] == kind
        ]

    @property
    def reported(self):
        return next((plain for kind, plain in reversed(self.broker.sent) if kind == "reported"), None)

    @property
    def execution(self):
        """Return state and code of the newest execution, None before it was reported."""
        executions = (self.reported or {}).get("executions", [])
        found = [one for one in executions if one["execution"] == f"e{self.count}"]
        return (found[0]["state"], found[0].get("code", "")) if found else None

    def set_clock(self, clock_s):
        """Start the agent with another time on the device's clock."""
        self.clock.lie_s = clock_s - self.clock.true_time()
        self.restart()

    def install_old(self):
        """Bring 1.0.0 to the device, over the fleet, and prove it."""
        self.broker.deliver(self.order(self.publish("1.0.0")))
        self.run_until(lambda: self.execution == ("succeeded", ""))
        self.slots().confirm("linear", self.running())

    def slots(self):
        return Slots(self.folder / "slots", self.maker.trust, TARGET)

    def active(self):
        """Return the version that would start; unlike `running` this counts no start."""
        return self.slots().load("linear").state.current.version

    def running(self):
        """Return the version that starts now, after all of it was read and verified."""
        choice = self.slots().begin_start("linear")
        with choice.package as package:
            assert all(bytes(package.read(artifact.path)) for artifact in package.manifest.artifacts)
            return package.manifest.version

    def check_unharmed(self):
        """Check that only 1.0.0 is on the device, and runs."""
        state = self.slots().load("linear").state
        assert [one.version for one in state.installed] == ["1.0.0"]
        assert self.running() == "1.0.0"

    def check_recovers(self, version="3.0.0"):
        """Check that the device takes the next good release, once the attack is over."""
        self.mirror = Mirror(self.repository.folder, self.clock)
        self.broker.deliver(self.order(self.publish(version)))
        self.run_until(lambda: self.execution == ("succeeded", ""), 700.0)
        assert self.running() == version


@pytest.fixture
def site(maker, tmp_path, monkeypatch, request):
    made = AttackSite(tmp_path, maker, monkeypatch)
    made.install_old()
    if clock := getattr(request, "param", ""):  # see `with_any_clock`
        made.set_clock(CLOCKS[clock])
        made.run_until(lambda: made.reported)
    return made


with_any_clock = pytest.mark.parametrize("site", ["", *CLOCKS], indirect=True)
"""Runs a test with a right clock, and with each of `CLOCKS`."""


def only(suffix, data):
    """Return a change that replaces what a path with this end has."""
    return lambda path, found: data if path.endswith(suffix) else found


def read_requests(mirror: Mirror, folder: str) -> list[Path]:
    return [Path(path) for path in mirror.requests if path.startswith(folder)]
