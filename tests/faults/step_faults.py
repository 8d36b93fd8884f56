"""An agent and the processes of its steps, killed or failed at each step that changes the disk.

The package comes over HTTPS from a repository of the fleet. Processes are forked, so that they start within
milliseconds, with all modules that they import; `tests/agent` starts whole ones.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tests.agent.parts import make_desired, want
from tests.faults.disk_calls import KINDS, DiskCalls, Kind
from tests.faults.processes import Outcome, end_with, fork, try_all
from tests.fleet.fleet_device import make_csr
from tests.free_port import free_port
from tests.memory_folder import memory_folder
from tests.runtime.conftest import PackageMaker
from tuf import ngclient  # noqa: F401  # a step imports it

from edgekit_fleet.identity.authority import open_authority
from edgekit_fleet.releases.deltas import make_delta
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import NewTarget, TufRepository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.server import serve_devices
from edgekit_runtime.agent.agent import Agent
from edgekit_runtime.agent.documents import DeltaOffer, Enrolment
from edgekit_runtime.agent.execution import install, local_steps, step_child  # noqa: F401  # of a step
from edgekit_runtime.agent.execution.step_child import ChildSteps, StepPlaces
from edgekit_runtime.agent.journal import hold_journal
from edgekit_runtime.agent.membership import read_membership
from edgekit_runtime.agent.mqtt_link import LinkMessage
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots import Slots
from edgekit_runtime.system import child_process

_AGENT = 0
"""Number of the agent among the processes; those of its steps count from 1."""
_PUBLIC_PEM = (
    Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
    .public_key()
    .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
)
_LIMIT_S = 30.0
_FULL_TURNS = 20
_ORPHAN_S = 2.0
_NEVER = 1 << 40
_PR_SET_CHILD_SUBREAPER = 36
_TURN_S = 5.0  # that pass for the agent in a turn, so that it need not wait before it tries again


@dataclass(frozen=True)
class Fault:
    """A fault at a step of a process of one update."""

    update: str
    kind: Kind
    process: int
    at: int


class _Link:
    """A link to a broker that brings one document."""

    def __init__(self, desired: bytes) -> None:
        self.received: queue.SimpleQueue[LinkMessage] = queue.SimpleQueue()
        self._desired = desired
        self.will, self.reconnect_s, self.is_connected = b"", 1.0, True

    def bring(self) -> None:
        """Bring the document, as the manager does until the device has it."""
        self.received.put(LinkMessage("desired", self._desired))

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def put(self, kind: str, payload: bytes, *, key: str = "", is_retained: bool = False) -> None: ...


class _Forked:
    """A forked process, as `subprocess.Popen` has it; it may count its steps before it is killed."""

    def __init__(self, pid: int, patience_s: float) -> None:
        self.pid, self._patience_s = pid, patience_s
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, limit_s: float) -> int | None:
        end_s = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < end_s:
            time.sleep(0.002)
        return self._code

    def kill(self) -> None:
        if self.wait(self._patience_s) is None:
            os.kill(self.pid, signal.SIGKILL)


class _Calls(DiskCalls):
    """The calls of an agent, and of the processes of its steps, which are copies of it.

    Attributes:
        children: of the agent.
        is_agent: whether this is the agent.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.children: list[int] = []
        self.is_agent = True

    def strike(self, at: int, kind: Kind, half: Callable[[], object]) -> None:
        if kind == "agent killed":
            os.kill(os.getppid(), signal.SIGKILL)  # and this process goes on
            return
        if kind in ("dropped", "torn"):  # the power goes for all
            for pid in self.children if self.is_agent else [os.getppid()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().strike(at, kind, half)


@dataclass
class StepBench:
    """A fleet that offers packages, and a device before each update.

    Attributes:
        folder: of all.
        desired: update -> the document that orders it.
        steps: update -> number of the process -> how many steps it takes.
    """

    folder: Path
    maker: PackageMaker
    desired: dict[str, bytes] = field(default_factory=dict)
    steps: dict[str, dict[int, int]] = field(default_factory=dict)
    settings: FleetSettings = field(default_factory=lambda: FleetSettings(web_port=free_port()))

    def prepare(self) -> None:
        """Make packages, repository and device, and carry out each update once without a fault."""
        install.Installer = partial(install.Installer, self_test=lambda _: None)
        fleet, key = FleetFolder(self.folder / "fleet"), Ed25519PrivateKey.generate()
        settings = self.settings
        fleet.write_settings(settings)
        authority = open_authority(fleet, settings)
        repository = TufRepository(fleet.repository, fleet.repository_keys)
        repository.create(time.time())
        certificate = authority.sign_device(make_csr(key), "d1", 86_400.0)
        config, keys = self.folder / "config" / "fleet", self.folder / "keys"
        config.mkdir(parents=True)
        keys.mkdir()
        (keys / "vendor.pub.pem").write_bytes(_PUBLIC_PEM)
        web = f"https://{settings.web_address}"
        enrolment = Enrolment(
            device="d1",
            certificate=certificate.pem,
            authority=authority.certificate_path.read_text(),
            brokers=("127.0.0.1:1",),
            web=web,
            artifacts=f"{web}/artifacts",
            tuf_root=repository.read_root().decode(),
            package_keys=(),
            target="x86-64",
        )
        (config / "enrolment.json").write_bytes(encode_json(to_plain(enrolment)))
        (config / "device.crt").write_text(certificate.pem)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (config / "device.key").write_bytes(private)
        self._publish(repository, ManagerKey(fleet).read())

    def _publish(self, repository: TufRepository, manager: Ed25519PrivateKey) -> None:
        """Offer two versions and the delta between them, and install the first one."""
        paths = {}
        for version in ("1.0.0", "2.0.0"):
            paths[version] = self.folder / f"linear-{version}-x86-64.edgepkg"
            self.maker.write(paths[version], version=version)
        suffix, content = make_delta(paths["1.0.0"].read_bytes(), paths["2.0.0"].read_bytes()) or ("", b"")
        delta = self.folder / f"delta{suffix}"
        delta.write_bytes(content)
        files = [
            NewTarget(device_class="x86-64", name=path.name, source=path) for path in (paths["2.0.0"], delta)
        ]
        package, of_delta = repository.publish(files, time.time())
        before = self.folder / "before"
        (before / "disk").mkdir(parents=True)
        slots = Slots(before / "disk" / "state", self.maker.trust, "x86-64")
        slots.install(paths["1.0.0"])
        slots.begin_start("linear").package.close()
        slots.confirm("linear", "1.0.0")
        offer = DeltaOffer(
            from_sha256=self.maker.manifest(version="1.0.0").sha256,
            path=of_delta.path,
            size_bytes=of_delta.size_bytes,
            sha256=of_delta.sha256,
        )
        for update, deltas in {"download and install": (), "delta and install": (offer,)}.items():
            model = want(
                model="linear",
                version="2.0.0",
                manifest_sha256=self.maker.manifest(version="2.0.0").sha256,
                path=package.path,
                size_bytes=package.size_bytes,
                sha256=package.sha256,
                deltas=deltas,
            )
            now = time.time()
            document = dataclasses.replace(make_desired(model), issued_at=now, expires_at=now + 86_400.0)
            self.desired[update] = seal(document, "desired", manager)

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Run the web server in a process of its own."""
        fleet = FleetFolder(self.folder / "fleet")
        ready, done, parent = multiprocessing.Event(), multiprocessing.Event(), os.getpid()

        def work() -> None:
            end_with(parent)
            logging.disable(logging.CRITICAL)
            with (
                contextlib.closing(fleet.open_store()) as store,
                serve_devices(store, fleet, self.settings, open_authority(fleet, self.settings)),
            ):
                ready.set()
                done.wait()

        server = multiprocessing.get_context("fork").Process(target=work)
        server.start()
        try:
            assert ready.wait(20), "the web server does not start"
            yield
        finally:
            done.set()
            server.join(10)
            server.kill()

    def count_steps(self) -> None:
        """Carry out each update once without a fault, and count the steps of each process."""
        for update in self.desired:
            root, never = self.folder / "count", Fault(update, "kill", _AGENT, _NEVER)
            problems = fork(partial(self.try_fault, root, never))
            assert problems == [], problems
            counts = {int(path.suffix[1:]): int(path.read_text()) for path in root.glob("steps.*")}
            self.steps[update] = counts

    def list_faults(self) -> list[Fault]:
        """Return all faults."""
        return [
            Fault(update, kind, process, at)
            for update, counts in self.steps.items()
            for process, count in counts.items()
            for at in range(count)
            for kind in (KINDS if process == _AGENT else (*KINDS, "agent killed"))
        ]

    def try_fault(self, root: Path, fault: Fault) -> list[str] | None:
        """Return what is wrong after a fault, None where it never came; `root` is replaced."""
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.folder / "before", root, symlinks=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
        was_hit, problems = fork(lambda: self.run_agent(root, fault)) or (True, [])
        problems += _end_orphans()
        was_hit = was_hit or (root / "hit").exists()
        if (root / "overlap").exists():
            problems.append("two processes of steps of one agent ran at once")
        if fault.at != _NEVER and not was_hit:
            return None
        first = fork(lambda: (self.start(root), []))
        if not first or first[0] not in ("1.0.0", "2.0.0"):
            problems.append(f"starts {first}")
        _, later = fork(lambda: self.run_agent(root, None)) or (True, ["the agent cannot be started again"])
        problems += later
        last = fork(lambda: (self.start(root), []))
        return problems + ([] if last and last[0] == "2.0.0" else [f"starts {last} at the end"])

    def update_undisturbed(self, root: Path, update: str) -> list[str]:
        """Let an agent carry out an update on the real disk; returns what is wrong."""
        fault = Fault(update, "kill", _AGENT, _NEVER)

        def work() -> list[str]:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
            _, problems = fork(lambda: self.run_agent(root, fault, real_disk=True)) or (True, ["it ended"])
            return problems + _end_orphans()

        found: list[str] = fork(work)
        return found

    def start(self, root: Path) -> str:
        """Return the version that a service starts now, after it has read all of it."""
        with (
            Slots(root / "disk" / "state", self.maker.trust, "x86-64")
            .begin_start("linear")
            .package as package
        ):
            assert all(bytes(package.read(artifact.path)) for artifact in package.manifest.artifacts)
            return str(package.manifest.version)

    def run_agent(
        self, root: Path, fault: Fault | None, *, real_disk: bool = False
    ) -> tuple[bool, list[str]]:
        """Be an agent until the update is over; returns whether the fault came, and what is wrong.

        Args:
            root: of the device.
            fault: what fails; None for nothing.
            real_disk: whether calls reach the disk untouched.
        """
        state, config = root / "disk" / "state", self.folder / "config"
        calls = _Calls(root / "disk")
        update = next(iter(self.desired)) if fault is None else fault.update
        places = StepPlaces(
            config=str(config),
            state=str(state),
            keys=str(self.folder / "keys"),
            socket_path=str(root / "none"),
        )
        step_child.JsonChild = _make_child_class(calls, root, fault)
        with contextlib.nullcontext() if real_disk else calls.installed(), hold_journal(state / "fleet", 5.0):
            installer = install.Installer(Slots(state, self.maker.trust, "x86-64"), root / "none")
            if fault is not None and fault.process == _AGENT:
                calls.arm(fault.at, fault.kind)
            try:
                agent = Agent(
                    *(read_membership(config), state / "fleet", installer),
                    link=_Link(self.desired[update]),
                    carrier=ChildSteps(places),
                )
                agent.connect()
            except EdgekitError as error:  # a sentence; it is started again
                return calls.was_hit, [] if calls.was_hit else [str(error)]
            problem = _lead(agent, calls)
            if fault is not None and fault.process == _AGENT:
                (root / "steps.0").write_text(str(calls.count))
            return calls.was_hit, problem


def _lead(agent: Agent, calls: DiskCalls) -> list[str]:
    """Turn until the update is over; returns what is wrong."""
    end_s, turns = time.monotonic() + _LIMIT_S, 0
    while time.monotonic() < end_s:
        if agent._desired is None:
            agent._link.bring()
        agent.turn(0.01 if agent._steps.is_busy else _TURN_S)
        turns += calls.was_hit
        if turns == _FULL_TURNS:
            calls.disarm()  # there is space again
        if agent._executions and all(one.has_ended for one in agent._executions):
            (report,) = (one.report for one in agent._executions)
            return [] if report.state == "succeeded" else [f"{report.state}: {report.code}: {report.reason}"]
        time.sleep(0.01)
    return [f"does not end: {agent._executions}"]


def _make_child_class(calls: _Calls, root: Path, fault: Fault | None) -> type[child_process.JsonChild]:
    class ForkedChild(child_process.JsonChild):
        """A process of a step, forked instead of started."""

        def __init__(self, module: str, *arguments: str, own_session: bool = False) -> None:
            del module, arguments, own_session
            number, parent = len(calls.children) + 1, os.getpid()
            self._near, far = socket.socketpair()
            self._errors, self._output = child_process._open_unnamed(), None
            self.pid = os.fork()
            if not self.pid:
                try:
                    os.environ[child_process._PARENT] = str(parent)
                    os.dup2(self._errors.fileno(), 2)
                    os.setsid()
                    calls.is_agent = False
                    _be_child(calls, root, far.fileno(), number, fault)
                finally:
                    os._exit(1)
            far.close()
            calls.children.append(self.pid)
            self._process = _Forked(self.pid, 1.0 if fault is not None and fault.at == _NEVER else 0.0)
            self._files, self._received, self.descriptors = contextlib.ExitStack(), bytearray(), []
            self._files.callback(self._errors.close)
            self._pidfd = os.pidfd_open(self.pid)

    return ForkedChild


def _be_child(calls: _Calls, root: Path, channel: int, number: int, fault: Fault | None) -> None:
    """Be the process of a step, with the steps of the disk counted."""
    os.closerange(3, channel)
    os.closerange(channel + 1, 1024)
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (root / "overlap").touch()
    is_its = fault is not None and fault.process == number
    calls.arm(*((fault.at, fault.kind) if fault is not None and is_its else ()))
    calls.on_hit = (root / "hit").touch
    real_exit = os._exit

    def end(code: int) -> None:
        calls.disarm()
        (root / f"steps.{number}").write_text(str(calls.count))
        real_exit(code)

    os._exit = end
    sys.argv = ["step_child", str(channel)]
    step_child._main()


def _end_orphans() -> list[str]:
    """Wait for processes that an agent left behind; returns what is wrong."""
    end_s = time.monotonic() + _ORPHAN_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        return ["a process of a step goes on without its agent"]
    return []


def run(maker: PackageMaker, limit_s: float, most: int | None = None) -> Outcome:
    """Return what came of the faults that could be tried in this time."""
    with memory_folder() as folder:
        bench = StepBench(folder, maker)
        bench.prepare()
        with bench.serve():
            bench.count_steps()
            return try_all(
                bench.list_faults(),
                lambda number, fault: bench.try_fault(folder / f"worker-{number}", fault),
                lambda fault: (f"{fault.update}, {'step' if fault.process else 'agent'}", fault.kind),
                limit_s,
                most,
            )
