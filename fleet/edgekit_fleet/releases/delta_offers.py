"""Chooses the deltas of a release, from the packages that most devices run, and its coded files.

Both are bounded in number and time.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.releases.deltas import make_delta
from edgekit_fleet.releases.repository import NewTarget, TufRepository, name_target_file
from edgekit_fleet.store.tables import DeviceRow, ReleasePackageRow, ReleaseRow
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.manifest import Manifest

MAX_DELTAS: Final = 4
"""Deltas for each package; few, since they take space in a desired document."""
_MAX_S: Final = 120.0  # for all packages of a release; a package without a delta by then is downloaded whole
_MAX_PACKAGE_BYTES: Final = 128 << 20  # making a delta takes about 20 times this memory


@dataclass(frozen=True, slots=True)
class Base:
    """A package that devices may have.

    Attributes:
        manifest_sha256: SHA-256 of the manifest of the package.
        target: target of the device class.
    """

    manifest_sha256: str
    path: Path
    target: str


def find_bases(session: Session, repository: Path, manifest: Manifest) -> tuple[Base, ...]:
    """Return the packages from which a delta to a new package pays off, the most used first.

    Where no device has reported, it is the newest released one.
    """
    statement = (
        select(ReleasePackageRow.manifest_sha256, ReleasePackageRow.path, ReleasePackageRow.sha256)
        .join(ReleaseRow, ReleaseRow.name == ReleasePackageRow.release)
        .where(ReleasePackageRow.model == manifest.name, ReleasePackageRow.target == manifest.target)
        .where(ReleasePackageRow.manifest_sha256 != manifest.sha256)
        .order_by(ReleaseRow.created_at.desc())
    )
    released = {row.manifest_sha256: row for row in reversed(session.execute(statement).all())}
    newest = list(reversed(released))
    used = Counter(
        str(model.get("manifest_sha256", ""))
        for reported in session.scalars(select(DeviceRow.reported).where(DeviceRow.target == manifest.target))
        for model in (reported or {}).get("models", ())
        if model.get("model") == manifest.name
    )
    chosen = [digest for digest, _ in used.most_common() if digest in released] or newest[:1]
    bases = []
    for digest in chosen[:MAX_DELTAS]:
        row = released[digest]
        path = repository / name_target_file(row.path, row.sha256)
        if path.exists():
            bases.append(Base(digest, path, manifest.target))
    return tuple(bases)


def publish_deltas(
    repository: TufRepository, packages: Sequence[tuple[Path, Manifest, tuple[Base, ...]]], now: float
) -> dict[str, tuple[DeltaOffer, ...]]:
    """Make and offer deltas and coded files; returns the offers of each package by its manifest's digest.

    `packages`: path and manifest of each package, and the packages to make deltas from.
    `now`: seconds since 1970.

    Raises:
        OutputError: the repository cannot be written.
        SignatureError: a key of it is missing.
    """
    offers: dict[str, tuple[DeltaOffer, ...]] = {}
    give_up_s = time.monotonic() + _MAX_S
    try:
        with TemporaryDirectory(prefix="edgekit-deltas-") as temporary:
            deltas = list(_make(Path(temporary), packages, give_up_s))
            published = repository.publish([target for _, _, target in deltas], now)
    except OSError as cause:
        raise OutputError(
            f"cannot make deltas in {gettempdir()}: {cause.strerror}; free space there, or set TMPDIR"
        ) from cause
    for (manifest, base, _), file in zip(deltas, published, strict=True):
        offer = DeltaOffer(
            from_sha256="" if base is None else base.manifest_sha256,
            path=file.path,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
        )
        offers[manifest.sha256] = (*offers.get(manifest.sha256, ()), offer)
    return offers


def _make(
    folder: Path, packages: Sequence[tuple[Path, Manifest, tuple[Base, ...]]], give_up_s: float
) -> Iterator[tuple[Manifest, Base | None, NewTarget]]:
    for path, manifest, bases in packages:
        for base in (None, *bases):
            base_path = None if base is None else base.path
            try:
                sizes = [file.stat().st_size for file in (path, base_path) if file is not None]
                if time.monotonic() > give_up_s or max(sizes) > _MAX_PACKAGE_BYTES:
                    continue
                delta = make_delta(base_path, path)
            except FileNotFoundError:  # its release is withdrawn, and the manager has just deleted it
                continue
            if delta is None:
                continue
            suffix, content = delta
            # The digest, since another version of the compressor may make other bytes of the same packages.
            digest = hashlib.sha256(content).hexdigest()[:12]
            kind = "coded" if base is None else f"from-{base.manifest_sha256[:12]}"
            name = f"{path.stem}.{kind}.{digest}{suffix}"
            source = folder / f"{manifest.target}-{name}"
            source.write_bytes(content)
            yield manifest, base, NewTarget(device_class=manifest.target, name=name, source=source)
