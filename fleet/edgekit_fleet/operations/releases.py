"""Releases: make, list, withdraw."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from edgekit_fleet.releases.delta_offers import find_bases, publish_deltas
from edgekit_fleet.releases.repository import NewTarget, PublishedTarget, TufRepository
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.tables import ReleasePackageRow, ReleaseRow
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import FleetError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.sessions.session import list_backends
from edgekit_runtime.trust.dsse import Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSummary:
    """A release.

    Attributes:
        name, note, created_at, created_by: of the release.
        is_withdrawn: whether no rollout may use it.
        packages: (model, version, target, size in bytes) of each.
        deltas: (model, target, version to start from, size in bytes) of each.
    """

    name: str
    note: str
    created_at: float
    created_by: str
    is_withdrawn: bool
    packages: tuple[tuple[str, str, str, int], ...]
    deltas: tuple[tuple[str, str, str, int], ...] = ()


def make_release(
    folder: FleetFolder,
    store: Store,
    trust: Verifier,
    paths: Sequence[Path],
    *,
    actor: str,
    name: str = "",
    note: str = "",
) -> ReleaseSummary:
    """Return a new release of packages, which devices can fetch from now on, but none is told to.

    Args:
        folder: of the fleet.
        store: of the fleet.
        trust: keys whose packages may be released.
        paths: of the packages; one a model and target.
        actor: who releases.
        name: of the release; today's date and a number by default.
        note: for people.

    Raises:
        FleetError: two packages of one model for one target, or the name is taken.
        PackageError: a package is malformed, or its name is released with other content.
        SignatureError: a package is not signed by a trusted key.
        OutputError: the repository or the store cannot be written.
    """
    now = time.time()
    manifests: list[tuple[Path, Manifest]] = []
    for path in paths:
        with read_package(path, trust) as package:
            manifests.append((path, package.manifest))
    _check(manifests)
    with store.transaction() as session:
        if name and session.get(ReleaseRow, name) is not None:
            raise FleetError(f"release '{name}' exists; choose another name")
        wanted = [
            (path, manifest, find_bases(session, folder.repository, manifest)) for path, manifest in manifests
        ]
    targets = [
        NewTarget(
            device_class=manifest.target,
            name=manifest.file_name,
            source=path,
            custom={"manifest_sha256": manifest.sha256, **_list_needs(manifest)},
        )
        for path, manifest in manifests
    ]
    # Offered first, recorded then: what is offered and not recorded is wanted of no device.
    repository = TufRepository(folder.repository, folder.repository_keys)
    published = repository.publish(targets, now)
    deltas = publish_deltas(repository, wanted, now)
    with store.transaction() as session:
        day = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d")
        count = session.scalar(
            select(func.count()).select_from(ReleaseRow).where(ReleaseRow.name.startswith(f"{day}."))
        )
        name = name or f"{day}.{(count or 0) + 1}"
        session.add(
            ReleaseRow(
                name=name, created_at=now, created_by=actor, note=note, approved_at=now, approved_by=actor
            )
        )
        session.flush()
        for (_, manifest), target in zip(manifests, published, strict=True):
            session.add(_make_row(name, manifest, target, deltas.get(manifest.sha256, ())))
        digests = {manifest.file_name: manifest.sha256 for _, manifest in manifests}
        audit.record(session, actor, "release.make", name, note=note, packages=digests)
    return find_release(store, name)


def _check(manifests: Sequence[tuple[Path, Manifest]]) -> None:
    if not manifests:
        raise FleetError("a release needs at least one package")
    seen: dict[tuple[str, str], Path] = {}
    for path, manifest in manifests:
        place = (manifest.name, manifest.target)
        if place in seen:
            raise FleetError(
                f"{seen[place].name} and {path.name} are both model '{manifest.name}' for class"
                f" '{manifest.target}'; a release holds one package a model and class"
            )
        seen[place] = path


def _make_row(
    release: str, manifest: Manifest, target: PublishedTarget, deltas: Sequence[DeltaOffer]
) -> ReleasePackageRow:
    return ReleasePackageRow(
        release=release,
        model=manifest.name,
        target=manifest.target,
        version=manifest.version,
        manifest_sha256=manifest.sha256,
        path=target.path,
        size_bytes=target.size_bytes,
        sha256=target.sha256,
        needs=_list_needs(manifest),
        deltas=[to_plain(offer) for offer in deltas],
    )


def _list_needs(manifest: Manifest) -> dict[str, Any]:
    """Return what a package needs of a device, which looks at it before it downloads the package."""
    needs: dict[str, Any] = {"engines": list(list_backends(manifest))}
    estimate = manifest.figures.get("memory_estimate")
    if isinstance(estimate, Mapping) and isinstance(estimate.get("bytes_above_engine"), int):
        needs["memory_bytes"] = estimate["bytes_above_engine"]
    return needs


def find_release(store: Store, name: str) -> ReleaseSummary:
    """Return a release.

    Raises:
        FleetError: there is none of that name.
    """
    found = [release for release in list_releases(store) if release.name == name]
    if not found:
        raise FleetError(f"no release '{name}'; `edgekit fleet release --list` shows them")
    return found[0]


def list_releases(store: Store) -> list[ReleaseSummary]:
    """Return all releases, the newest first."""
    with store.transaction() as session:
        packages: dict[str, list[tuple[str, str, str, int]]] = {}
        deltas: dict[str, list[tuple[str, str, str, int]]] = {}
        rows = session.scalars(select(ReleasePackageRow)).all()
        versions = {one.manifest_sha256: one.version for one in rows}
        for one in rows:
            packages.setdefault(one.release, []).append((one.model, one.version, one.target, one.size_bytes))
            deltas.setdefault(one.release, []).extend(
                (one.model, one.target, versions.get(delta["from_sha256"], ""), delta["size_bytes"])
                for delta in one.deltas
            )
        return [
            ReleaseSummary(
                name=row.name,
                note=row.note,
                created_at=row.created_at,
                created_by=row.created_by,
                is_withdrawn=row.withdrawn_at is not None,
                packages=tuple(sorted(packages.get(row.name, ()))),
                deltas=tuple(sorted(deltas.get(row.name, ()))),
            )
            for row in session.scalars(select(ReleaseRow).order_by(ReleaseRow.created_at.desc()))
        ]
