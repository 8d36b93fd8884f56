"""Bundles for devices without a network: writing bundles, and importing the results of devices."""

import base64
import json
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import select

from edgekit_fleet.manager.inbox import DeviceIndex, Inbox
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import name_target_file, open_repository
from edgekit_fleet.rollouts.selector import parse_selector
from edgekit_fleet.rollouts.views import read_devices, read_packages
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.shards import Shards
from edgekit_fleet.store.tables import DesiredRow
from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Desired
from edgekit_runtime.agent.execution.bundle import RESULTS_FORMAT
from edgekit_runtime.agent.signing import key_id
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import FleetError, PackageError
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_runtime.system.atomic_files import write_atomically

_MAX_MESSAGES: Final = 1000
_MAX_RESULTS_BYTES: Final = _MAX_MESSAGES * 2 * MAX_DOCUMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBundle:
    """The contents of a bundle.

    Attributes:
        refused: The devices that match the selector but are not in the bundle, each with the reason.
        expires_at: The time after which devices refuse the bundle, in seconds since 1970.
    """

    devices: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]
    size_bytes: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionResult:
    """The outcome of importing a file of results.

    Attributes:
        accepted: The number of accepted messages.
        refused: The number of refused messages for each reason.
    """

    path: Path
    device: str
    accepted: int
    refused: dict[str, int]


def write_bundle(
    folder: FleetFolder, store: Store, release: str, selector: str, path: Path, *, actor: str
) -> WrittenBundle:
    """Write a file with everything that devices without a network need to install a release.

    The devices must already be in a rollout of the release, and the manager must have signed their documents.

    Raises:
        FleetError: There is no such release, the selector is malformed, or the bundle is for no device.
        OutputError: The bundle cannot be written.
        PackageError: The repository is incomplete, or the bundle would be larger than 4 GiB.
    """
    now, chosen, refused = time.time(), {}, []
    signing_key_id = key_id(ManagerKey(folder).read().public_key())
    with store.snapshot() as session:
        views = read_devices(session, parse_selector(selector), read_packages(session, release))
        rows = {row.device: row for row in session.scalars(select(DesiredRow))}
        for view in views:
            row = rows.get(view.name)
            desired = None if row is None or not row.envelope else _read_payload(row.envelope)
            releases = {model.release for model in desired.models} if desired is not None else set()
            if row is None or desired is None or release not in releases:
                refused.append((view.name, f"no open rollout wants {release} of it; start one"))
            elif row.is_due or row.key_id != signing_key_id:
                refused.append((view.name, "the manager has not signed its newest document; is it running?"))
            else:
                chosen[view.name] = (row.envelope, desired)
    if not chosen:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused[:3]) or "the selector matches none"
        raise FleetError(f"the bundle would be for no device: {why}")
    expires_at = min(desired.expires_at for _, desired in chosen.values())
    repository = open_repository(folder)
    offered = repository.list_targets()  # not what a device keeps of a release that was withdrawn
    paths = {
        model.path: model.sha256
        for _, desired in chosen.values()
        for model in desired.models
        if model.path in offered
    }
    members: list[tuple[str, bytes | memoryview]] = [
        (f"desired/{name}.json", envelope) for name, (envelope, _) in sorted(chosen.items())
    ]
    members += sorted(repository.pack_metadata(now, expires_at).items())
    members += [
        _map_target(folder.repository, target_path, sha256) for target_path, sha256 in sorted(paths.items())
    ]
    with write_atomically(path) as file:
        size_bytes = write_archive(file, members)
    with store.transaction() as session:
        detail = {"selector": selector, "devices": sorted(chosen), "file": path.name}
        audit.record(session, actor, "bundle.write", release, **detail)
    return WrittenBundle(
        devices=tuple(sorted(chosen)),
        refused=tuple(refused),
        packages=tuple(sorted(paths)),
        size_bytes=size_bytes,
        expires_at=expires_at,
    )


def _read_payload(envelope: bytes) -> Desired:
    payload = base64.b64decode(json.loads(envelope)["payload"])
    return from_plain(Desired, json.loads(payload), "the store")


def _map_target(repository: Path, path: str, sha256: str) -> tuple[str, memoryview]:
    target_file = name_target_file(path, sha256)
    try:
        with (repository / target_file).open("rb") as file:
            return target_file, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as cause:
        raise PackageError(
            f"cannot read {repository / target_file}: {cause}; is the repository whole?"
        ) from cause


def collect_results(store: Store, paths: Sequence[Path], *, actor: str) -> list[CollectionResult]:
    """Import files of results as if their messages came from the broker. Return the outcome of each file.

    Each message is numbered and signed by its device. So anybody may copy a file, and importing it twice has
    no effect.

    Raises:
        FleetError: A file does not contain results. The results of earlier files stay imported.
    """
    documents = []
    for path in paths:
        device, messages = _read_results(path)
        now = time.time()
        with store.transaction() as session:
            shards = Shards.of_all()
            index = DeviceIndex(shards)
            inbox = Inbox(index, shards)
            for topic, payload in messages:
                inbox.put(topic, payload)
            index.load(session, inbox.list_unknown(_MAX_MESSAGES))
            inbox.take(now, _MAX_MESSAGES)
            inbox.write(session, now)
            refused = {str(reason): count for reason, count in inbox.refused.items()}
            detail = {"file": path.name, "accepted": inbox.accepted, "refused": refused}
            audit.record(session, actor, "bundle.collect", device[:128], **detail)
        documents.append(CollectionResult(path=path, device=device, accepted=inbox.accepted, refused=refused))
    return documents


def _read_results(path: Path) -> tuple[str, list[tuple[str, bytes]]]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RESULTS_BYTES + 1)
        if len(data) > _MAX_RESULTS_BYTES:
            raise FleetError(f"{path}: is over {_MAX_RESULTS_BYTES} bytes")
        document = json.loads(data)
        if document["format"] != RESULTS_FORMAT:
            raise FleetError(
                f"{path}: has format {str(document['format'])[:80]!r}, expected {RESULTS_FORMAT!r}"
            )
        messages = [
            (str(message["topic"]), base64.b64decode(message["payload"], validate=True))
            for message in document["messages"][:_MAX_MESSAGES]
        ]
        return str(document["device"]), messages
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise FleetError(f"{path}: no file of results, or damaged ({cause}); copy it again") from cause
