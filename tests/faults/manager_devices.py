"""Devices of a manager that is killed: the agent's own decisions, and packages that are read and verified.

All that a device knows is in one file of its own, so the device outlives the manager's process. The broker is
played too: it keeps what is retained.
"""

import hashlib
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fleet.fleet_device import make_csr

from edgekit_runtime.agent.artifacts.download import HttpStatusError
from edgekit_runtime.agent.artifacts.repository import RepositoryClient
from edgekit_runtime.agent.conditions import DeviceConditions, ModelView
from edgekit_runtime.agent.documents import Desired, DesiredModel, EnrolmentRequest, Hello, Reported, topic
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.manager_keys import ManagerKeys, read_held
from edgekit_runtime.agent.reconcile import accept_desired, reconcile
from edgekit_runtime.agent.signing import UnknownKeyError, seal, unseal
from edgekit_runtime.errors import EdgekitError, SignatureError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.trust.dsse import Verifier

Result = TypeVar("Result")

BAD_VERSION = "3.0.0"
"""Its self-test fails on every device."""


@dataclass
class DeviceState:
    """What a device knows.

    Attributes:
        key: 32 bytes.
        code: secret of its one-time code.
        serials: of the certificates that it got.
        root: the TUF root that it trusts first.
        desired: envelope of the document that it holds.
        executions: as in the agent's journal.
        active: package that it runs: its file, version, and digest of the manifest.
        installs: executions that were carried out, in their order.
        wrongs: what must never happen.
        is_revoked: whether it was shut out.
        retained: what the broker keeps of it, by topic.
    """

    key: bytes
    code: str = ""
    serials: list[str] = field(default_factory=list)
    root: str = ""
    desired: bytes = b""
    executions: tuple[Progress, ...] = ()
    active: tuple[str, str, str] = ("", "", "")
    previous: str = ""
    sequence: int = 0
    installs: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)
    is_revoked: bool = False
    retained: dict[str, bytes] = field(default_factory=dict)


class FolderDownloader:
    """Reads from the repository's folder in place of a web server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, url: str, timeout_s: float, count: Callable[[int], None]) -> Iterator[bytes]:
        path = self._folder / url.removeprefix("https://fleet/")
        try:
            data = path.read_bytes()
        except FileNotFoundError as cause:
            raise HttpStatusError(404, f"{url}: is missing") from cause
        count(len(data))
        yield data


class FaultsDevice:
    """One device.

    Attributes:
        state: see there; kept in a file.
    """

    def __init__(self, folder: Path, repository: Path, name: str, target: str, trust: Verifier) -> None:
        self.name, self.target = name, target
        self._folder, self._repository, self._trust = folder, repository, trust
        self._path = folder / f"{name}.state"
        if self._path.exists():
            self.state: DeviceState = pickle.loads(self._path.read_bytes())  # noqa: S301  # our own
        else:
            self.state = DeviceState(Ed25519PrivateKey.generate().private_bytes_raw())
        self._key = Ed25519PrivateKey.from_private_bytes(self.state.key)

    def save(self) -> None:
        """Keep the state; a kill of the manager never falls into this."""
        self._path.write_bytes(pickle.dumps(self.state))

    @property
    def desired(self) -> Desired | None:
        """Return the document that is held."""
        return read_held(self.state.desired.decode(), self._keys.read())

    @property
    def is_enrolled(self) -> bool:
        """Return whether it has a certificate."""
        return bool(self.state.serials)

    def request(self) -> EnrolmentRequest:
        """Return its request of enrolment."""
        return EnrolmentRequest(
            secret=self.state.code, csr=make_csr(self._key), facts={"target": self.target}
        )

    def receive(self, envelope: bytes) -> None:
        """Take a desired document, as the agent does."""
        try:
            try:
                desired = self._unseal(envelope)
            except UnknownKeyError:
                self._call(lambda client: client.refresh(time.time()))
                desired = self._unseal(envelope)
            if accept_desired(desired, self.desired, self.name):
                self.state.desired = envelope
        except SignatureError as error:
            self.state.wrongs.append(f"refused a document of the manager: {error}")
        self.save()

    def act(self, now: float) -> list[tuple[str, bytes]]:
        """Do all that is wanted; returns what it publishes, by topic."""
        desired = self.desired
        if desired is not None:
            status, models, because = "working", (), ""
            downloaded: frozenset[str] = frozenset()
            for _ in range(8):
                conditions = DeviceConditions(now_s=now, downloaded=downloaded)
                plan = reconcile(desired, self.state.executions, self._view(), conditions)
                self.state.executions = plan.executions
                status, models, because = plan.status, plan.models, plan.because
                if not plan.steps:
                    break
                for step in plan.steps:
                    if step.desired_model is None:
                        self.state.wrongs.append(f"was told to remove {step.model}")
                    elif step.action == "download":
                        self._fetch(step.desired_model, now)
                        downloaded |= {step.desired_model.sha256}
                    else:
                        self._install(step.desired_model)
            self.state.sequence += 1
            report = Reported(
                device=self.name,
                sequence=self.state.sequence,
                desired_version=desired.version,
                status=status,
                because=because,
                models=models,
                executions=tuple(one.report for one in self.state.executions),
                facts={"target": self.target},
            )
            self.state.retained[topic(self.name, "reported")] = seal(report, "reported", self._key)
        self.save()
        return list(self.state.retained.items())

    def greet(self) -> None:
        """Connect to the broker, which keeps the hello."""
        self.state.sequence += 1
        desired = self.desired
        hello = Hello(
            device=self.name,
            sequence=self.state.sequence,
            desired_version=0 if desired is None else desired.version,
            runtime="0.1.0",
        )
        self.state.retained[topic(self.name, "hello")] = seal(hello, "hello", self._key)
        self.save()

    def find_problems(self, released: dict[str, str]) -> list[str]:
        """Return what is wrong: documents refused, work done twice, no whole model.

        Args:
            released: digest of the manifest -> digest of the file, of all packages that were ever released.
        """
        problems = [f"{self.name}: {text}" for text in self.state.wrongs]
        if len(set(self.state.installs)) != len(self.state.installs):
            problems.append(f"{self.name}: an execution was carried out twice: {self.state.installs}")
        return problems + self.check_model(released)

    def check_model(self, released: dict[str, str]) -> list[str]:
        """Return what is wrong with the model that it runs, see `find_problems`."""
        problems = []
        path, version, digest = self.state.active
        if not path:
            return []
        try:
            with read_package(Path(path), self._trust) as package:
                manifest = package.manifest
                whole = all(bytes(package.read(one.path)) for one in manifest.artifacts)
            if not whole or (manifest.version, manifest.sha256) != (version, digest):
                problems.append(f"{self.name}: runs a mixed package")
        except (EdgekitError, OSError) as error:
            problems.append(f"{self.name}: has no working model: {error}")
        if released.get(digest) != hashlib.sha256(Path(path).read_bytes()).hexdigest():
            problems.append(f"{self.name}: runs {version}, which no release holds")
        return problems

    def look_up(self, path: str, now: float) -> tuple[str, Path] | None:
        """Return digest and file of what the repository offers, after its metadata is verified."""
        offer = self._call(lambda client: client.find(path, self.target, now))
        return offer and (offer.sha256, self._repository / offer.url.removeprefix("https://fleet/"))

    @property
    def _keys(self) -> ManagerKeys:
        folder = self._folder / f"{self.name}-keys"
        folder.mkdir(exist_ok=True)
        return ManagerKeys(folder, self.state.root)

    def _call(self, ask: Callable[[RepositoryClient], Result]) -> Result:
        client = RepositoryClient(
            self._folder / f"{self.name}-tuf",
            "https://fleet",
            self.state.root,
            FolderDownloader(self._repository),
            lambda: 0.0,
            manager_keys=self._keys,
        )
        before, tempfile.tempdir = tempfile.tempdir, str(self._folder)  # not the manager's disk
        try:
            return ask(client)
        finally:
            tempfile.tempdir = before

    def _unseal(self, envelope: bytes) -> Desired:
        return unseal(envelope, "desired", Desired, self._keys.read(), "desired")

    def _view(self) -> dict[str, ModelView]:
        path, version, digest = self.state.active
        if not path:
            return {}
        view = ModelView(
            model="linear",
            version=version,
            manifest_sha256=digest,
            health="healthy",
            previous=self.state.previous,
        )
        return {"linear": view}

    def _fetch(self, wanted: DesiredModel, now: float) -> None:
        wanted_files = [(wanted.path, wanted.sha256), *((one.path, one.sha256) for one in wanted.deltas)]
        for path, sha256 in wanted_files:
            try:
                found = self.look_up(path, now)
            except EdgekitError as error:
                self.state.wrongs.append(f"the repository is refused: {error}")
                continue
            if found is None or found[0] != sha256:
                self.state.wrongs.append(f"{path} is wanted, and the repository offers {found}")
            elif hashlib.sha256(found[1].read_bytes()).hexdigest() != sha256:
                self.state.wrongs.append(f"{path}: the file of the repository is not what it states")
            elif path == wanted.path:
                (self._folder / f"{self.name}-{sha256}").write_bytes(found[1].read_bytes())

    def _install(self, wanted: DesiredModel) -> None:
        self.state.installs.append(wanted.execution)
        is_bad = wanted.version == BAD_VERSION
        if not is_bad:
            self.state.previous = self.state.active[1]
            path = self._folder / f"{self.name}-{wanted.sha256}"
            self.state.active = (str(path), wanted.version, wanted.manifest_sha256)
        self.state.executions = tuple(
            one
            if one.report.execution != wanted.execution
            else one.enter("failed", code="self-test", reason="its self-test failed")
            if is_bad
            else one.enter("trying", code="installed")
            for one in self.state.executions
        )
