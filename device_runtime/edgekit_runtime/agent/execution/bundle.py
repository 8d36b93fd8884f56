"""A bundle: one file with an update for devices that have no network.

    desired/DEVICE.json     the signed document of each device
    metadata/*              metadata of the TUF repository
    targets/CLASS/*         the packages

A bundle replaces only the broker and the web server. The agent works as it does over a network. Its messages
are written into a results file.

Source: docs/guide/fleet.md.
"""

import base64
import hashlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edgekit_runtime.agent.agent import Agent
from edgekit_runtime.agent.artifacts.download import Downloader, DownloadLimits, HttpStatusError
from edgekit_runtime.agent.documents import Desired, Event, Kind, Reported, topic
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.local_steps import LocalSteps
from edgekit_runtime.agent.execution.step_result import StepOrder
from edgekit_runtime.agent.journal import read_journal
from edgekit_runtime.agent.manager_keys import ManagerKeys, read_held
from edgekit_runtime.agent.membership import Membership
from edgekit_runtime.agent.mqtt_link import LinkMessage
from edgekit_runtime.agent.reconcile import Step
from edgekit_runtime.agent.signing import key_id, unseal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import DigestError, PackageError, SignatureError
from edgekit_runtime.package.canonical_zip import MAX_ARCHIVE_MEMBERS, read_members
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically

RESULTS_FORMAT: Final = "edgekit-fleet-results-1"
_PIECE_BYTES: Final = 1 << 20


class Bundle:
    """An open bundle.

    Its structure has been checked, but its contents are not yet trusted.
    """

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            PackageError: the file is no bundle, or incomplete.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as cause:
            raise PackageError(f"cannot read bundle {path}: {cause}") from cause
        self._members = {
            member.name: member for member in read_members(self._view, str(path), MAX_ARCHIVE_MEMBERS)
        }

    def read(self, name: str) -> memoryview | None:
        member = self._members.get(name)
        return None if member is None else self._view[member.payload_offset : member.end_offset]

    def read_desired(self, device: str, keys: Mapping[str, Ed25519PublicKey]) -> Desired:
        """Return the verified document of a device.

        `keys` is a dict from key id to public key of the manager.

        Raises:
            SignatureError: the document is missing, names another device, or is not signed by a key in
                `keys`.
        """
        data = self.read(f"desired/{device}.json")
        if data is None:
            names = [name[8:-5] for name in self._members if name.startswith("desired/")]
            name_list = ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
            raise SignatureError(f"{self.path}: is for {name_list or 'nobody'}, this is '{device}'")
        desired = unseal(bytes(data), "desired", Desired, keys, str(self.path))
        if desired.device != device:
            raise SignatureError(f"{self.path}: the document is for '{desired.device}', this is '{device}'")
        return desired


class BundleDownloader(Downloader):
    """A downloader that reads files from a bundle and not from the web server."""

    def __init__(self, bundle: Bundle, member: Membership) -> None:
        super().__init__(member.make_context(), DownloadLimits())
        self._bundle, self._root = bundle, f"{urlsplit(member.enrolment.artifacts).path.rstrip('/')}/"

    def read(self, url: str, timeout_s: float, count: Callable[[int], None]) -> Iterator[bytes]:  # noqa: ARG002
        """Yield the content of a small file in one piece, see `Downloader.read`."""
        yield bytes(self._find(url))

    def fetch(
        self,
        url: str,
        path: Path,
        size_bytes: int,
        *,
        sha256: str,
        count: Callable[[int], None],  # noqa: ARG002  # nothing comes over a network
        stop: threading.Event,  # noqa: ARG002
        most_bytes: int | None = None,  # noqa: ARG002
    ) -> None:
        """Copy a file, see `Downloader.fetch`. `count`, `stop` and `most_bytes` are ignored."""
        content = self._find(url)
        if len(content) != size_bytes or hashlib.sha256(content).hexdigest() != sha256:
            raise DigestError(f"{self._bundle.path}: {url} is damaged; copy the bundle again")
        with write_atomically(path, mode=0o600) as file:
            for start in range(0, size_bytes, _PIECE_BYTES):
                file.write(content[start : start + _PIECE_BYTES])

    def _find(self, url: str) -> memoryview:
        name = urlsplit(url).path.removeprefix(self._root)
        content = self._bundle.read(name)
        if content is None:
            raise HttpStatusError(404, f"{self._bundle.path}: holds no {name}")
        return content


class BundleLink:
    """Replaces the broker: it passes the bundle's document to the agent and collects the agent's messages.

    Attributes:
        received, will, reconnect_s, problem: the same attributes as in `MqttLink`.
        report: the last report about the bundle's document or a newer document, or None.
    """

    def __init__(self, member: Membership, payload: bytes, version: int, stop: threading.Event) -> None:
        """Wait for reports on document `version`; set `stop` when nothing is under way any more."""
        self.received: queue.SimpleQueue[LinkMessage] = queue.SimpleQueue()
        self.will, self.reconnect_s, self.problem = b"", 0.0, None
        self.report: Reported | None = None
        self.events: list[Event] = []
        self._device, self._stop = member.enrolment.device, stop
        public = member.key.public_key()
        self._keys = {key_id(public): public}
        self._payload, self._version = payload, version
        self._messages: dict[str, tuple[Kind, bytes]] = {}

    @property
    def is_connected(self) -> bool:
        return True

    def start(self) -> None:
        self.received.put(LinkMessage("hello"))
        self.received.put(LinkMessage("desired", self._payload))

    def stop(self) -> None:
        """Do nothing, because there is no connection."""

    def put(self, kind: Kind, payload: bytes, *, key: str = "", is_retained: bool = False) -> None:  # noqa: ARG002
        """Collect a report or event for the results file. Ignore `key` and `is_retained`.

        Stop the agent after an event `attack`, or a report whose status is not `working`.
        """
        if kind == "event":
            event = unseal(payload, "event", Event, self._keys, "event")
            self.events.append(event)
            self._messages[f"event/{event.sequence}"] = kind, payload
            if event.kind == "attack":  # another try with the same bundle would not help
                self._stop.set()
        elif kind == "reported":
            report = unseal(payload, "reported", Reported, self._keys, "report")
            self._messages["reported"] = kind, payload
            if report.desired_version >= self._version:
                self.report = report
                if report.status != "working":
                    self._stop.set()

    def pack_results(self) -> bytes:
        """Return the content of the results file. Each message in it is signed by the device."""
        messages = [
            {"topic": topic(self._device, kind), "payload": base64.b64encode(payload).decode()}
            for kind, payload in self._messages.values()
        ]
        return encode_json({"format": RESULTS_FORMAT, "device": self._device, "messages": messages}) + b"\n"


@dataclass(frozen=True, slots=True)
class BundleResult:
    """Result of applying a bundle.

    Attributes:
        report: the last report, or None if the agent made no report before the timeout.
        events: each event as `KIND: TEXT`.
    """

    report: Reported | None
    events: tuple[str, ...]


def apply_bundle(
    path: Path,
    results: Path,
    member: Membership,
    folder: Path,
    installer: Installer,
    *,
    timeout_s: float,
) -> BundleResult:
    """Apply the bundle at `path` to this device, and write a results file. The agent must not be running.

    Args:
        path: path of the bundle.
        results: path of the results file, which `edgekit fleet collect` reads.
        member: this device in its fleet.
        folder: the agent's folder.
        installer: the models of the device.
        timeout_s: maximum duration. When the bundle is applied again, unfinished steps continue.

    Raises:
        PackageError: the bundle is malformed or cut off.
        SignatureError: the bundle is from another fleet, not for this device, or older than the device's
            document.
        OutputError: the results cannot be written.
    """
    bundle = Bundle(path)
    carrier = LocalSteps(member, folder, installer, BundleDownloader(bundle, member), clock=time.time)
    record = read_journal(folder / "journal.json")
    # The bundle may bring a new key of the manager; what is wrong with its metadata shows later.
    least_s = member.read_time(folder).least_s
    order = StepOrder(step=Step("refresh", ""), known_time_s=least_s)
    carrier.carry_out(order, threading.Event(), lambda _kind, _text: None, lambda _bytes: None)
    keys = ManagerKeys(folder, member.enrolment.tuf_root).read()
    desired = bundle.read_desired(member.enrolment.device, keys)
    held_document = read_held(record.desired, keys)
    if held_document is not None and (desired.version, desired.epoch) < (
        held_document.version,
        held_document.epoch,
    ):
        raise SignatureError(
            f"{path}: holds document {desired.version}, this device has {held_document.version}:"
            " the bundle is old"
        )
    payload = bytes(bundle.read(f"desired/{desired.device}.json") or b"")
    stop = threading.Event()
    link = BundleLink(member, payload, desired.version, stop)
    agent = Agent(member, folder, installer, carrier=carrier, link=link)
    timer = threading.Timer(timeout_s, stop.set)
    timer.start()
    try:
        agent.run(stop)
    finally:
        timer.cancel()
    with write_atomically(results, mode=0o644) as file:
        file.write(link.pack_results())
    return BundleResult(link.report, tuple(f"{event.kind}: {event.text}" for event in link.events))
