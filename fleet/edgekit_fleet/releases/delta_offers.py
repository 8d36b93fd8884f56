"""Makes the deltas and coded files of a release.

A delta needs an old package on the device, and a coded file does not. Deltas are made for the most used old
packages. The number of files and the time to make them are limited.
"""

import hashlib
import io
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
from edgekit_fleet.store.tables import ContentKeyRow, DeviceRow, ReleasePackageRow, ReleaseRow
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.encryption.container import ContentKey, decrypt_chunks, encrypt, make_header
from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.manifest import Manifest

MAX_DELTAS: Final = 4
"""The maximum number of deltas per package. It is small because deltas take space in a desired document."""
_MAX_S: Final = 120.0  # for all packages of a release. A package without a delta by then is downloaded whole
_ID_DIGITS: Final = 12
_MAX_PACKAGE_BYTES: Final = 128 << 20  # making a delta takes about 20 times this memory


@dataclass(frozen=True, slots=True)
class Base:
    """A released package that devices may have, and from which a delta can start.

    Attributes:
        manifest_sha256: The SHA-256 of the package's manifest.
        path: The path of the package.
        key: The key that encrypts the file, or None for a plain file.
    """

    manifest_sha256: str
    path: Path
    key: ContentKey | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPackage:
    """A package of a new release.

    Attributes:
        path: The path of the plain package.
        key: The key that encrypts the published file and its deltas, or None for a plain package.
        bases: The packages that deltas start from.
    """

    path: Path
    manifest: Manifest
    key: ContentKey | None
    bases: tuple[Base, ...]


def find_bases(session: Session, repository: Path, manifest: Manifest) -> tuple[Base, ...]:
    """Return the released packages from which deltas to a new package start, most used first.

    If no device has reported a released package, only the newest released package is returned.
    """
    statement = (
        select(ReleasePackageRow, ContentKeyRow.content_key)
        .join(ContentKeyRow, ContentKeyRow.key_id == ReleasePackageRow.key_id, isouter=True)
        .join(ReleaseRow, ReleaseRow.name == ReleasePackageRow.release)
        .where(ReleasePackageRow.model == manifest.name, ReleasePackageRow.target == manifest.target)
        .where(ReleasePackageRow.manifest_sha256 != manifest.sha256)
        .order_by(ReleaseRow.created_at.desc())
    )
    rows = session.execute(statement).all()
    released = {row.manifest_sha256: (row, secret) for row, secret in reversed(rows)}
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
        row, secret = released[digest]
        path = repository / name_target_file(row.path, row.sha256)
        if path.exists():
            bases.append(Base(digest, path, ContentKey(row.key_id, secret) if secret else None))
    return tuple(bases)


def publish_deltas(
    repository: TufRepository, packages: Sequence[NewPackage], now: float
) -> dict[str, tuple[DeltaOffer, ...]]:
    """Make the deltas and coded files of packages, and publish each file that saves enough bytes.

    After 120 s, no more files are made. `now` is in seconds since 1970.

    Returns:
        A dict from the SHA-256 of a manifest to its offers. Packages without offers are not included.

    Raises:
        OutputError: The repository cannot be written.
        SignatureError: A key of the repository is missing.
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
    folder: Path, packages: Sequence[NewPackage], give_up_s: float
) -> Iterator[tuple[Manifest, Base | None, NewTarget]]:
    for package in packages:
        manifest = package.manifest
        # A plain delta would tell who has the new version what the encrypted one was.
        bases = [base for base in package.bases if base.key is None or package.key is not None]
        for base in (None, *bases):
            try:
                sizes = [file.path.stat().st_size for file in (package, base) if file is not None]
                if time.monotonic() > give_up_s or max(sizes) > _MAX_PACKAGE_BYTES:
                    continue
                old = b"" if base is None else _read(base)
                delta = make_delta(old, package.path.read_bytes())
            except FileNotFoundError:  # its release is withdrawn, and the manager has just deleted it
                continue
            if delta is None:
                continue
            suffix, content = delta
            stem = Path(manifest.file_name).stem
            if package.key is not None:
                stem, content = name_encrypted(stem, package.key), _encrypt(content, package.key)
            # The digest, since another version of the compressor may make other bytes of the same packages.
            digest = hashlib.sha256(content).hexdigest()[:12]
            kind = "coded" if base is None else f"from-{base.manifest_sha256[:12]}"
            name = f"{stem}.{kind}.{digest}{suffix}"
            source = folder / f"{manifest.target}-{name}"
            source.write_bytes(content)
            yield manifest, base, NewTarget(device_class=manifest.target, name=name, source=source)


def _read(base: Base) -> bytes:
    return base.path.read_bytes() if base.key is None else b"".join(decrypt_chunks(base.path, base.key))


def _encrypt(content: bytes, key: ContentKey) -> bytes:
    sink = io.BytesIO()
    encrypt(io.BytesIO(content), sink, key, make_header(key, len(content)))
    return sink.getvalue()


def name_encrypted(stem: str, key: ContentKey) -> str:
    """Return `stem`, a dot, and the first digits of the key's id. Each key gives a different file name."""
    return f"{stem}.{key.key_id[:_ID_DIGITS]}"
