"""Operations on releases: make, list, withdraw."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from edgekit_fleet.operations.names import check_name, follows
from edgekit_fleet.releases.delta_offers import NewPackage, find_bases, name_encrypted, publish_deltas
from edgekit_fleet.releases.manager_key import ManagerKey, check_copies, record_exchange
from edgekit_fleet.releases.repository import NewTarget, PublishedTarget, TufRepository, open_repository
from edgekit_fleet.releases.repository_keys import MANAGER_ROLE
from edgekit_fleet.releases.withdrawn import list_withdrawn
from edgekit_fleet.rollouts.gate_table import MIN_AGREEMENT
from edgekit_fleet.rollouts.runner import OPEN_STATES
from edgekit_fleet.rollouts.views import list_encrypted
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.tables import ContentKeyRow, ReleasePackageRow, ReleaseRow, RolloutRow, read_record
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.encryption.container import encrypt_file, make_content_key
from edgekit_runtime.errors import FleetError, NotFoundError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.sessions.backends import list_backends
from edgekit_runtime.trust.dsse import Verifier

_SCORE: Final = ("metric", "value", "source_value", "drop_points", "samples", "samples_kind", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSummary:
    """A release.

    Attributes:
        name, note: The name and the note of the release.
        created_at: When the release was created, in seconds since 1970.
        created_by: The user who created the release.
        is_withdrawn: Whether no rollout may use the release.
        is_encrypted: Whether packages of the release are encrypted for the devices that may run them.
        packages: The model, version, target and size in bytes of each package.
        deltas: The model, target, old version and size in bytes of each delta. An unknown old version is
            replaced by the first 8 digits of the old package's digest. The old version is empty if the new
            package is compressed without an old one.
    """

    name: str
    note: str
    created_at: float
    created_by: str
    is_withdrawn: bool
    is_encrypted: bool
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
    min_agreement: float | None = None,
    encrypt: bool | None = None,
    allow_plain: bool = False,
) -> ReleaseSummary:
    """Make a release of packages. Devices can download it from now on, but only rollouts install it.

    The packages of an encrypted release are stored as ciphertext. Each package gets a new key and file name.

    Args:
        folder: The folder of the fleet.
        store: The store of the fleet.
        trust: The keys whose packages may be released.
        paths: The paths of the packages, at most one for each model and target.
        actor: The actor who makes the release.
        name: The name of the release, by default today's date and a number.
        note: A note to show.
        min_agreement: The minimum agreement with the previous version, from 0 to 1. By default, it
            is the result of `find_agreement`.
        encrypt: Whether to encrypt the packages. By default, the settings of the fleet decide.
        allow_plain: Whether a plain package may follow an encrypted version of its model.

    Raises:
        FleetError: There are two packages of one model for one target. The name is taken. A plain package
            would follow an encrypted version. A package to encrypt was already released without encryption.
        PackageError: A package is malformed, or its name was released with other content.
        SignatureError: A package is not signed with a trusted key.
        OutputError: The repository or the store cannot be written.
    """
    if name:
        check_name("release", name)
    repository, now = open_repository(folder), time.time()
    manifests = _read_manifests(paths, trust)
    is_encrypted = not allow_plain and folder.read_settings().encrypts if encrypt is None else encrypt
    with store.snapshot() as session:
        if name and session.get(ReleaseRow, name) is not None:
            raise FleetError(f"release '{name}' exists; choose another name")
        if is_encrypted:
            _check_never_plain(session, manifests)
        elif not allow_plain:
            _check_plain(session, manifests)
        packages = [
            NewPackage(
                path=path,
                manifest=manifest,
                key=make_content_key() if is_encrypted else None,
                bases=find_bases(session, folder.repository, manifest),
            )
            for path, manifest in manifests
        ]
    # Offered first, then recorded: no device is told to fetch a release that is offered but not recorded.
    with TemporaryDirectory(prefix="edgekit-release-") as temporary:
        targets = [_make_target(package, Path(temporary)) for package in packages]
        published = repository.publish(targets, now)
    deltas = publish_deltas(repository, packages, now)
    rows = [
        _make_row(package, target, deltas.get(package.manifest.sha256, ()), min_agreement)
        for package, target in zip(packages, published, strict=True)
    ]
    with store.transaction() as session:
        name = name or _choose_name(session, now)
        release = ReleaseRow(name=name, created_at=now, created_by=actor, note=note)
        _record(session, release, rows, packages, allow_plain=allow_plain)
    _offer_again(repository, targets, now)
    return find_release(store, name)


def _record(
    session: Session,
    release: ReleaseRow,
    rows: Sequence[ReleasePackageRow],
    packages: Sequence[NewPackage],
    *,
    allow_plain: bool,
) -> None:
    keys = [package.key for package in packages if package.key is not None]
    session.add(release)
    session.flush()
    for row in rows:
        row.release, row.allows_plain = release.name, allow_plain and not keys
    session.add_all(rows)
    session.add_all(
        ContentKeyRow(key_id=key.key_id, content_key=key.secret, created_at=release.created_at)
        for key in keys
    )
    digests = {package.manifest.file_name: package.manifest.sha256 for package in packages}
    stated = {"packages": digests, "encrypted": bool(keys), "allows_plain": allow_plain}
    audit.record(session, release.created_by, "release.make", release.name, note=release.note, **stated)


def _offer_again(repository: TufRepository, targets: Sequence[NewTarget], now: float) -> None:
    """Publish targets if another release with the same file was withdrawn before theirs was recorded.

    Who takes the lock later to withdraw it sees the record.
    """
    with repository.lock():
        is_offered = repository.list_targets().keys() >= {target.path for target in targets}
    if not is_offered:
        repository.publish(targets, now)


def _read_manifests(paths: Sequence[Path], trust: Verifier) -> list[tuple[Path, Manifest]]:
    """Return the manifests of packages, which must be intact, trusted, and one for each model and class."""
    manifests = []
    for path in paths:
        with read_package(path, trust) as package:
            manifests.append((path, package.manifest))
    _check(manifests)
    return manifests


def _check_plain(session: Session, manifests: Sequence[tuple[Path, Manifest]]) -> None:
    """Refuse plain packages of models that had an encrypted release.

    Raises:
        FleetError: There is such a package.
    """
    encrypted = list_encrypted(session, {manifest.name for _, manifest in manifests})
    for (model, _), release in encrypted.items():
        raise FleetError(
            f"{model} was released encrypted in '{release}', and anybody could read this one; release it with"
            " --encrypt, or with --allow-plain"
        )


def _check_never_plain(session: Session, manifests: Sequence[tuple[Path, Manifest]]) -> None:
    """Refuse to encrypt packages that were released as plain, since mirrors and devices have copies.

    Raises:
        FleetError: There is such a package.
    """
    digests = [manifest.sha256 for _, manifest in manifests]
    plain = select(ReleasePackageRow).where(
        ReleasePackageRow.manifest_sha256.in_(digests), ReleasePackageRow.key_id == ""
    )
    if row := session.scalars(plain.limit(1)).first():
        raise FleetError(
            f"{row.model} {row.version} was released plain in '{row.release}': mirrors and devices have it;"
            " encrypt a new version"
        )


def _make_target(package: NewPackage, folder: Path) -> NewTarget:
    manifest, key = package.manifest, package.key
    source, name = package.path, manifest.file_name
    custom: dict[str, JsonValue] = {"manifest_sha256": manifest.sha256, **_list_needs(manifest)}
    if key is not None:
        name = f"{name_encrypted(Path(name).stem, key)}{Path(name).suffix}"
        source = folder / f"{manifest.target}-{name}"
        header = encrypt_file(package.path, source, key)
        custom["header"] = header.to_json()  # a device that makes the file of a delta needs it
    return NewTarget(device_class=manifest.target, name=name, source=source, custom=custom)


def _choose_name(session: Session, now: float) -> str:
    day = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d")
    release_count = select(func.count()).select_from(ReleaseRow).where(ReleaseRow.name.startswith(f"{day}."))
    names = (f"{day}.{number}" for number in itertools.count((session.scalar(release_count) or 0) + 1))
    return next(name for name in names if session.get(ReleaseRow, name) is None)


def _check(manifests: Sequence[tuple[Path, Manifest]]) -> None:
    if not manifests:
        raise FleetError("a release needs at least one package")
    first_paths: dict[tuple[str, str], Path] = {}
    for path, manifest in manifests:
        key = (manifest.name, manifest.target)
        if key in first_paths:
            raise FleetError(
                f"{first_paths[key].name} and {path.name} are both model '{manifest.name}' for class"
                f" '{manifest.target}'; a release holds one package a model and class"
            )
        first_paths[key] = path


def _make_row(
    package: NewPackage,
    target: PublishedTarget,
    deltas: Sequence[DeltaOffer],
    min_agreement: float | None,
) -> ReleasePackageRow:
    manifest = package.manifest
    needs = _list_needs(manifest)
    agreement = find_agreement(manifest.figures) if min_agreement is None else min_agreement
    if agreement is not None:
        needs["min_agreement"] = agreement
    if (score := _find_score(manifest.figures)) is not None:
        needs["score"] = score
    return ReleasePackageRow(
        model=manifest.name,
        target=manifest.target,
        version=manifest.version,
        manifest_sha256=manifest.sha256,
        path=target.path,
        size_bytes=target.size_bytes,
        sha256=target.sha256,
        needs=needs,
        deltas=[to_plain(offer) for offer in deltas],
        key_id="" if package.key is None else package.key.key_id,
    )


def _list_needs(manifest: Manifest) -> dict[str, Any]:
    """Return the requirements of a package, which a device checks before the download."""
    needs: dict[str, Any] = {"engines": list(list_backends(manifest))}
    estimate = manifest.figures.get("memory_estimate")
    if isinstance(estimate, Mapping) and isinstance(estimate.get("bytes_above_engine"), int):
        needs["memory_bytes"] = estimate["bytes_above_engine"]
    return needs


def _find_score(figures: Mapping[str, JsonValue]) -> dict[str, JsonValue] | None:
    """Return the packager's own evidence, for people: the score beside that of the source model."""
    score = figures.get("score")
    return {name: score[name] for name in _SCORE if name in score} if isinstance(score, Mapping) else None


def find_agreement(figures: Mapping[str, JsonValue]) -> float | None:
    """Return the minimum agreement of a package with the previous version, from 0 to 1.

    If the package has a lower score than the source model, the result is the default minimum less the
    difference. `figures` are the figures in the package's manifest. If they do not contain a `score` that was
    measured on real samples, the result is None.
    """
    score = figures.get("score")
    if not isinstance(score, Mapping) or score.get("samples_kind") == "generated":
        return None
    points, value, source = (score.get(name) for name in ("drop_points", "value", "source_value"))
    lost = points / 100 if isinstance(points, (int, float)) else None
    if score.get("metric") == "agreement" and isinstance(value, (int, float)):
        lost = (source if isinstance(source, (int, float)) else 1.0) - value
    if lost is None or not math.isfinite(lost):
        return None
    return round(min(max(MIN_AGREEMENT.default - max(lost, 0.0), 0.0), 1.0), 4)


def withdraw_release(folder: FleetFolder, store: Store, name: str, actor: str) -> ReleaseSummary:
    """Withdraw a release. No rollout may use it, and no device can download it any more.

    Devices that run the release keep it, and devices with the release in their spare slot may return to it.
    After a day, the manager deletes the files that no other release uses (see `TufRepository.remove_unused`).

    Raises:
        FleetError: There is no such release, or an open rollout uses it.
        OutputError: The repository or the store cannot be written.
    """
    find_release(store, name)
    repository, now = open_repository(folder), time.time()
    with store.transaction() as session:
        used = session.scalars(
            select(RolloutRow.name).where(RolloutRow.release == name, RolloutRow.state.in_(OPEN_STATES))
        ).all()
        if used:
            raise FleetError(f"release '{name}' is used by rollout '{used[0]}'; abort it or wait for its end")
        row = session.get_one(ReleaseRow, name)
        row.withdrawn_at = row.withdrawn_at or now
        packages = session.scalars(select(ReleasePackageRow).where(ReleasePackageRow.release == name)).all()
        files = {package.path for package in packages}
        files |= {str(delta["path"]) for package in packages for delta in package.deltas}
        gone = files & list_withdrawn(session, float("inf"))
        audit.record(session, actor, "release.withdraw", name, files=sorted(gone))

    def find_gone() -> set[str]:
        with store.snapshot() as session:
            return gone & list_withdrawn(session, float("inf"))

    # After the store: no device is told to fetch a release that is withdrawn there and still offered.
    repository.withdraw(find_gone, now)
    return find_release(store, name)


def find_release(store: Store, name: str) -> ReleaseSummary:
    """Return the summary of a release.

    Raises:
        FleetError: There is no release of that name.
    """
    with store.snapshot() as session:
        summaries = summarize_releases(
            session, session.scalars(select(ReleaseRow).where(ReleaseRow.name == name)).all()
        )
    if not summaries:
        raise NotFoundError(f"no release '{name}'; `edgekit fleet release --list` shows them")
    return summaries[0]


def list_releases(store: Store, *, after: str = "", limit: int | None = None) -> list[ReleaseSummary]:
    """Return releases, newest first.

    Args:
        store: The store of the fleet.
        after: The name of the release after which the list begins. If empty, it begins with the newest.
        limit: The maximum number of releases.

    Raises:
        NotFoundError: There is no release `after`.
    """
    statement = select(ReleaseRow).order_by(ReleaseRow.created_at.desc(), ReleaseRow.name).limit(limit)
    if after:
        statement = statement.where(follows(ReleaseRow, find_release(store, after).created_at, after))
    with store.snapshot() as session:
        return summarize_releases(session, session.scalars(statement).all())


def read_base_versions(session: Session, packages: Sequence[ReleasePackageRow]) -> dict[str, str]:
    """Return a dict from manifest digest to version, for the packages from which deltas start.

    Unknown packages are not included.
    """
    bases = {delta["from_sha256"] for package in packages for delta in package.deltas}
    columns = ReleasePackageRow.manifest_sha256, ReleasePackageRow.version
    rows = session.execute(select(*columns).where(ReleasePackageRow.manifest_sha256.in_(bases)))
    return dict(rows.all())


def summarize_releases(session: Session, rows: Sequence[ReleaseRow]) -> list[ReleaseSummary]:
    """Return the summaries of releases, in their order."""
    packages: dict[str, list[tuple[str, str, str, int]]] = {}
    deltas: dict[str, list[tuple[str, str, str, int]]] = {}
    statement = select(ReleasePackageRow).where(ReleasePackageRow.release.in_([row.name for row in rows]))
    package_rows = session.scalars(statement).all()
    encrypted = {package.release for package in package_rows if package.key_id}
    versions = read_base_versions(session, package_rows)
    for package in package_rows:
        packages.setdefault(package.release, []).append(
            (package.model, package.version, package.target, package.size_bytes)
        )
        deltas.setdefault(package.release, []).extend(
            (
                package.model,
                package.target,
                versions.get(delta["from_sha256"], delta["from_sha256"][:8]),
                delta["size_bytes"],
            )
            for delta in package.deltas
        )
    return [
        read_record(
            ReleaseSummary,
            row,
            is_withdrawn=row.withdrawn_at is not None,
            is_encrypted=row.name in encrypted,
            packages=tuple(sorted(packages.get(row.name, ()))),
            deltas=tuple(sorted(deltas.get(row.name, ()))),
        )
        for row in rows
    ]


def rotate_keys(
    folder: FleetFolder, store: Store, roles: Sequence[str], *, actor: str, root_folder: Path | None = None
) -> None:
    """Rotate keys of the repository, and record this in the audit log. See `TufRepository.rotate`.

    Args:
        folder: The folder of the fleet.
        store: The store of the fleet.
        roles: `manager`, `root`, `targets`, `snapshot`, `timestamp`, `class-CLASS`. If empty, the root is
            only signed again.
        actor: The actor who rotates the keys.
        root_folder: The folder of the root's private keys, by default the folder of all other keys.

    Raises:
        FleetError: A role is unknown, or the manager's key is to be rotated while additional managers run,
            which have copies of it.
        SignatureError: Too few keys of the root are available.
        OutputError: The folder cannot be written.
    """
    repository = open_repository(folder)
    if MANAGER_ROLE in roles:
        with store.snapshot() as session:
            check_copies(session, folder, time.time())
    try:
        repository.rotate(time.time(), roles=roles, root_folder=root_folder)
    except ValueError as cause:
        raise FleetError(str(cause)) from cause
    key = None
    if MANAGER_ROLE in roles:
        key = ManagerKey(folder)
        key.read()
    with store.transaction() as session:
        record_exchange(session, actor, ",".join(roles) or "root, the same keys", key)
