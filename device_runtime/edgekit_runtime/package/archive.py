"""Packages: writing one atomically, and reading one only after every byte of it has been verified.

A reader checks in this order: the structure is canonical (`canonical_zip`), the signature is by a trusted
key, the manifest is what was signed, each artifact is what the manifest says. Contents are hashed once,
through a mapping of the file, and returned as views of it.

Deliberately not checked: that the file stays as it was verified. Who can write to the package folder can
change a mapped file (or truncate it, which ends the process with SIGBUS), so that folder belongs to the
runtime's user alone.

Source: docs/reference/package-format.md.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

from edgekit_runtime.errors import DigestError, ManifestError, PackageError, SignatureError
from edgekit_runtime.package.canonical_zip import (
    MAX_ARCHIVE_BYTES,
    MAX_ARCHIVE_MEMBERS,
    Member,
    read_members,
    write_archive,
)
from edgekit_runtime.package.manifest import MANIFEST_NAME, SIGNATURE_NAME, Artifact, Manifest, parse_manifest
from edgekit_runtime.package.package_file import PackageFile, map_file
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.mapped_file import parts
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE, Envelope, Statement, Verifier, read_unverified

if TYPE_CHECKING:
    from edgekit_runtime.encryption.container import ContentKey
    from edgekit_runtime.package.pipeline import Stage

Sign: TypeAlias = Callable[[bytes], bytes]
"""Takes the payload (an in-toto statement), returns the canonical bytes of a DSSE envelope around it."""

_ReadEnvelope: TypeAlias = Callable[[bytes, str], tuple[Statement, str]]
"""Takes an envelope and where it lies, returns its statement and key id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Size limits of a reader, which checks a size before it reads the content.

    Raises:
        ValueError: a limit is not positive, or beyond what the format can hold.
    """

    max_package_bytes: int = 2 << 30
    max_manifest_bytes: int = 1 << 20
    max_signature_bytes: int = 64 << 10
    max_members: int = 1024

    def __post_init__(self) -> None:
        for limit in fields(self):
            if getattr(self, limit.name) < 1:
                raise ValueError(f"{limit.name} is {getattr(self, limit.name)}, expected at least 1")
        if self.max_package_bytes > MAX_ARCHIVE_BYTES or self.max_members > MAX_ARCHIVE_MEMBERS:
            raise ValueError(
                f"the format ends at {MAX_ARCHIVE_BYTES} bytes and {MAX_ARCHIVE_MEMBERS} members"
            )


DEFAULT_LIMITS: Final = Limits()


def write_package(
    path: Path, manifest: Manifest, artifacts: Mapping[str, bytes | memoryview], sign: Sign
) -> None:
    """Write a package atomically; the same manifest, artifacts and ed25519 key give the same bytes.

    Args:
        path: path of the package file; an earlier file there stays intact until the new file is complete.
        manifest: names each artifact with size and digest.
        artifacts: path -> content, exactly those that the manifest names.
        sign: returns the canonical DSSE envelope of a payload, an in-toto statement.

    Raises:
        ManifestError: the artifacts are not those that the manifest names.
        DigestError: an artifact has another size or digest than the manifest says.
        PackageError: the package exceeds `DEFAULT_LIMITS`, or what the format can hold.
        SignatureError: `sign` raised it, or returned no canonical envelope.
        OutputError: the folder is missing or unwritable, or the disk is full.
    """
    named = {artifact.path for artifact in manifest.artifacts}
    if named != set(artifacts):
        differing = sorted(named ^ set(artifacts))
        raise ManifestError(
            f"{path}: {MANIFEST_NAME}: artifacts named and given differ in {', '.join(differing)}"
        )
    contents: dict[str, memoryview] = {}
    for artifact in manifest.artifacts:
        content = memoryview(artifacts[artifact.path]).cast("B")  # len() in bytes, whatever it is a view of
        _check_digest(artifact, len(content), hashlib.sha256(content).hexdigest(), str(path))
        contents[artifact.path] = content
    manifest_bytes = manifest.to_bytes()
    statement = Statement(
        MANIFEST_NAME, hashlib.sha256(manifest_bytes).hexdigest(), PACKAGE_PREDICATE_TYPE, {}
    )
    envelope = sign(statement.to_bytes())
    Envelope.from_bytes(envelope, f"{path}: {SIGNATURE_NAME}")
    _check_size(MANIFEST_NAME, len(manifest_bytes), DEFAULT_LIMITS.max_manifest_bytes, str(path))
    _check_size(SIGNATURE_NAME, len(envelope), DEFAULT_LIMITS.max_signature_bytes, str(path))
    if len(contents) + 2 > DEFAULT_LIMITS.max_members:
        raise PackageError(f"{path}: {len(contents) + 2} members, the limit is {DEFAULT_LIMITS.max_members}")
    head = {MANIFEST_NAME: manifest_bytes, SIGNATURE_NAME: envelope}
    with write_atomically(path) as file:
        size_bytes = write_archive(file, [*head.items(), *contents.items()])
        _check_size("the package", size_bytes, DEFAULT_LIMITS.max_package_bytes, str(path))


class OpenedPackage:
    """A package that has been verified throughout.

    Attributes:
        key_id: id of the trusted key that signed it.
        submodel: name of the submodel that `select_submodel` chose, or None.
        local_key: encrypts files that are made from an encrypted package; None for a plain package.
    """

    __slots__ = (
        "_file",
        "_members",
        "_signed",
        "_view",
        "key_id",
        "local_key",
        "manifest",
        "path",
        "submodel",
    )

    def __init__(
        self, path: Path, manifest: Manifest, key_id: str, *, file: PackageFile, members: Mapping[str, Member]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.key_id = key_id
        self._file = file
        self._view = file.content
        self._members = members
        self._signed = manifest
        self.submodel: str | None = None
        self.local_key: ContentKey | None = None if file.decrypted is None else file.decrypted.local_key

    def read(self, artifact_path: str) -> memoryview:
        """Return the content of an artifact as a read-only view of the mapped file.

        Raises:
            PackageError: the package has no such artifact, or is closed.
        """
        member = self._members.get(artifact_path)
        if member is None:
            raise PackageError(
                f"{self.path}: no artifact '{artifact_path}', there are: {', '.join(self._members)}"
            )
        try:
            return self._view[member.payload_offset : member.end_offset]
        except ValueError as cause:
            raise PackageError(f"{self.path}: '{artifact_path}' was asked for after close()") from cause

    def copy_to(self, file: BinaryIO) -> None:
        """Write the opened package to `file`, even if `path` holds another file by now."""
        file.writelines(parts(self._file.stored))

    @property
    def key_file(self) -> bytes:
        """Content of the separate file with the wrapped key of the package; empty without such a file."""
        return b"" if self._file.decrypted is None else self._file.decrypted.key_file

    @property
    def is_encrypted(self) -> bool:
        return self.local_key is not None

    def open_content(self) -> int:
        """Return a new descriptor of the package, decrypted if it was encrypted; the caller closes it.

        Nobody changes its content.
        """
        if self._file.decrypted is not None:
            return os.dup(self._file.decrypted.memory.descriptor)
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def select(self, variant: str) -> "OpenedPackage":
        """Return this package as if a variant were its only variant. Closing either package closes both.

        Raises:
            PackageError: there is no variant of that name.
        """
        return self._show(self.manifest.select(variant), self.submodel)

    def select_submodel(self, name: str) -> "OpenedPackage":
        """Return this package as if a submodel were its model. Closing either package closes both.

        Raises:
            PackageError: there is no submodel of that name.
        """
        return self._show(self.manifest.select_submodel(name), name)

    def list_members(self) -> dict[str, "OpenedPackage"]:
        """Return stage -> package of its model; empty if this is no pipeline.

        Closing this package closes all of them.

        Raises:
            ManifestError: the manifest of a member is malformed, or describes more than one plain model.
            PackageError: an artifact that a member names is missing or differs.
        """
        pipeline = self.manifest.pipeline
        return (
            {} if pipeline is None else {stage.name: self._show_member(stage) for stage in pipeline.members}
        )

    def _show_member(self, stage: "Stage") -> "OpenedPackage":
        where = f"{self.path}: stage '{stage.name}'"
        try:
            manifest = parse_manifest(bytes(self.read(stage.manifest_path)))
        except ManifestError as cause:
            raise ManifestError(f"{where}: {cause}") from cause
        if manifest.pipeline is not None or manifest.submodels or manifest.states:
            raise ManifestError(f"{where}: is a pipeline, has submodels or states, expected one plain model")
        folder = stage.folder
        signed = {(artifact.path, artifact.sha256, artifact.role) for artifact in self.manifest.artifacts}
        for artifact in manifest.artifacts:
            if (f"{folder}{artifact.path}", artifact.sha256, artifact.role) not in signed:
                raise PackageError(f"{where}: '{artifact.path}' is missing or another one")
        member = self._show(manifest, None)
        member._members = {
            artifact.path: self._members[f"{folder}{artifact.path}"] for artifact in manifest.artifacts
        }
        return member

    @property
    def signed_sha256(self) -> str:
        """Hexadecimal SHA-256 of the signed manifest, also for a selected variant, submodel or stage."""
        return self._signed.sha256

    def _show(self, manifest: Manifest, submodel: str | None) -> "OpenedPackage":
        view = OpenedPackage(self.path, manifest, self.key_id, file=self._file, members=self._members)
        view._view, view._signed, view.submodel = self._view, self._signed, submodel
        view.local_key = self.local_key
        return view

    def share(self) -> "OpenedPackage":
        """Return a second handle of the package; each handle is closed separately."""
        shared = self._show(self.manifest, self.submodel)
        shared._view = self._view[:]
        return shared

    def close(self) -> None:
        """Release the mapping; it is freed with the last view that `read` returned."""
        self._view.release()
        self._file = PackageFile(self._view, self._view)

    def __enter__(self) -> "OpenedPackage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_package(path: Path, trust: Verifier, limits: Limits = DEFAULT_LIMITS) -> OpenedPackage:
    """Return the package at `path` after all of it has been verified.

    `trust`: decides whose signatures are accepted.

    Raises:
        PackageError: unreadable, beyond a limit, or not in the canonical form.
        SignatureError: the signature is malformed, wrong, or by a key that is not trusted.
        UnavailableError: the file cannot be read at the moment, or its signature cannot be verified.
        DigestError: the manifest or an artifact is not what was signed.
        ManifestError: the manifest is malformed, inconsistent or needs a newer reader.
    """

    def verify(envelope: bytes, where: str) -> tuple[Statement, str]:
        return trust.verify(envelope, PACKAGE_PREDICATE_TYPE, where)

    file = map_file(path, limits.max_package_bytes, getattr(trust, "decrypt", None))
    view = file.content
    try:
        members = read_members(view, str(path), limits.max_members)
        manifest, key_id = _read_signed_manifest(view, members, verify, limits, str(path))
        _check_artifacts(view, members, manifest, str(path))
    except BaseException:
        view.release()
        raise
    contents = {member.name: member for member in members[2:]}
    return OpenedPackage(path, manifest, key_id, file=file, members=contents)


@dataclass(frozen=True, slots=True)
class UnverifiedManifest:
    """The claims of a package. Its form and digests are right, but anybody can have written it.

    It gives no access to artifacts, so nothing can be run from it.

    Attributes:
        claimed_key_id: id of the key that the package says it is signed by.
    """

    manifest: Manifest
    claimed_key_id: str


def read_unverified_manifest(
    path: Path, limits: Limits = DEFAULT_LIMITS, *, check_artifacts: bool = True
) -> UnverifiedManifest:
    """Return the claims of the package at `path`, WITHOUT verifying who signed it.

    For showing it to a user who decides whether to trust that key, and for listing packages; use
    `read_package` for everything else. All other checks of `read_package` are made.

    `check_artifacts`: False saves most of the time: the artifacts are not read.

    Raises:
        PackageError: any that `read_package` raises, except for an untrusted key or a wrong signature.
        UnavailableError: the machine lacks memory or descriptors.
    """

    def read(envelope: bytes, where: str) -> tuple[Statement, str]:
        return read_unverified(envelope, PACKAGE_PREDICATE_TYPE, where)

    with map_file(path, limits.max_package_bytes).content as view:
        members = read_members(view, str(path), limits.max_members)
        manifest, key_id = _read_signed_manifest(view, members, read, limits, str(path))
        if check_artifacts:
            _check_artifacts(view, members, manifest, str(path))
    return UnverifiedManifest(manifest, key_id)


def _read_signed_manifest(
    view: memoryview, members: tuple[Member, ...], read_envelope: _ReadEnvelope, limits: Limits, where: str
) -> tuple[Manifest, str]:
    names = [member.name for member in members[:2]]
    if names != [MANIFEST_NAME, SIGNATURE_NAME]:
        raise PackageError(
            f"{where}: starts with members {names}, expected {MANIFEST_NAME}, {SIGNATURE_NAME}"
        )
    _check_size(MANIFEST_NAME, members[0].size_bytes, limits.max_manifest_bytes, where)
    _check_size(SIGNATURE_NAME, members[1].size_bytes, limits.max_signature_bytes, where)
    manifest_bytes = bytes(view[members[0].payload_offset : members[0].end_offset])
    envelope = bytes(view[members[1].payload_offset : members[1].end_offset])
    statement, key_id = read_envelope(envelope, f"{where}: {SIGNATURE_NAME}")
    if statement.subject_name != MANIFEST_NAME:
        raise SignatureError(
            f"{where}: signature is for '{statement.subject_name}', expected '{MANIFEST_NAME}'", key_id
        )
    sha256 = hashlib.sha256(manifest_bytes).hexdigest()
    if sha256 != statement.sha256:
        raise DigestError(
            f"{where}: {MANIFEST_NAME} has sha256 {sha256}, signed was {statement.sha256}; fetch it again"
        )
    for member, content in ((members[0], manifest_bytes), (members[1], envelope)):
        _check_crc32(member, zlib.crc32(content), where)
    try:
        return parse_manifest(manifest_bytes), key_id
    except ManifestError as cause:
        raise ManifestError(f"{where}: {cause}") from cause


def _check_artifacts(view: memoryview, members: tuple[Member, ...], manifest: Manifest, where: str) -> None:
    names = [member.name for member in members[2:]]
    expected = [artifact.path for artifact in manifest.artifacts]
    if names != expected:
        raise PackageError(f"{where}: holds the artifacts {names}, the manifest names {expected}")
    for member, artifact in zip(members[2:], manifest.artifacts, strict=True):
        crc32, digest = 0, hashlib.sha256()
        for part in parts(view[member.payload_offset : member.end_offset]):
            crc32 = zlib.crc32(part, crc32)
            digest.update(part)
        _check_digest(artifact, member.size_bytes, digest.hexdigest(), where)
        _check_crc32(member, crc32, where)


def _check_digest(artifact: Artifact, size_bytes: int, sha256: str, where: str) -> None:
    here = f"{where}: artifact '{artifact.path}'"
    if size_bytes != artifact.size_bytes:
        raise DigestError(f"{here} has {size_bytes} bytes, expected {artifact.size_bytes}")
    if sha256 != artifact.sha256:
        raise DigestError(f"{here} has sha256 {sha256}, expected {artifact.sha256}; fetch the file again")


def _check_crc32(member: Member, crc32: int, where: str) -> None:
    if member.crc32 != crc32:
        raise PackageError(
            f"{where}: '{member.name}' has CRC-32 {crc32:#010x}, its header says {member.crc32:#010x}"
        )


def _check_size(label: str, size_bytes: int, limit_bytes: int, where: str) -> None:
    if size_bytes > limit_bytes:
        raise PackageError(f"{where}: {label} has {size_bytes} bytes, the limit is {limit_bytes}")
