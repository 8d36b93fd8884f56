"""Writes packages atomically, and reads a package only after verifying every byte of it.

A reader checks in this order that the ZIP structure is canonical, that the signature was made with a trusted
key, that the manifest has the signed digest, and that each artifact has the digest in the manifest. The
contents are hashed once, in a memory-mapped file, and returned as views of it.

A reader cannot detect changes to the file after verification. Anyone who can write to the package folder can
change a mapped file, or truncate it, which kills the process with SIGBUS. Only the runtime's user should
therefore have write access to that folder.

Source: docs/reference/package-format.md.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

from edgekit_runtime.errors import DigestError, ManifestError, PackageError, SignatureError
from edgekit_runtime.package.canonical_zip import (
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
"""Takes the payload (an in-toto statement) and returns the canonical bytes of its DSSE envelope."""

_ReadEnvelope: TypeAlias = Callable[[bytes, str], tuple[Statement, str]]
"""Takes an envelope and its location, and returns its statement and key id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for reading a package: sizes in bytes, and the number of files in it."""

    max_package_bytes: int = 2 << 30
    max_manifest_bytes: int = 1 << 20
    max_signature_bytes: int = 64 << 10
    max_members: int = 1024


DEFAULT_LIMITS: Final = Limits()


def write_package(
    path: Path, manifest: Manifest, artifacts: Mapping[str, bytes | memoryview], sign: Sign
) -> None:
    """Write a package atomically.

    The result is reproducible: the same manifest, artifacts and ed25519 key give the same bytes.

    Args:
        path: The path of the package file. An existing file stays intact until the new file is complete.
        manifest: The manifest, with the size and digest of each artifact.
        artifacts: A dict from the path of each artifact in the manifest to its content.
        sign: A function that takes an in-toto statement and returns a canonical DSSE envelope with it.

    Raises:
        ManifestError: The artifacts are not those that the manifest names.
        DigestError: The size or digest of an artifact differs from the manifest.
        PackageError: The package exceeds `DEFAULT_LIMITS` or the limits of the format.
        SignatureError: `sign` raised it, or did not return a canonical envelope.
        OutputError: The folder is missing or not writable, or the disk is full.
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
    """A package that has been fully verified.

    Attributes:
        key_id: The id of the trusted key that signed the package.
        submodel: The name that was given to `select_submodel`, or None.
        local_key: The key that encrypts files derived from an encrypted package, or None for a plain package.
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
            PackageError: The package has no such artifact, or is closed.
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
        """Write the bytes of this package to `file`, even if the file at `path` has since been replaced."""
        file.writelines(parts(self._file.stored))

    @property
    def key_file(self) -> bytes:
        """The content of the separate file that holds the wrapped key, or empty if there is no such file."""
        return b"" if self._file.decrypted is None else self._file.decrypted.key_file

    @property
    def is_encrypted(self) -> bool:
        return self.local_key is not None

    def open_content(self) -> int:
        """Return a new file descriptor of the decrypted package, which the caller must close.

        The content behind the descriptor does not change.
        """
        if self._file.decrypted is not None:
            return os.dup(self._file.decrypted.memory.descriptor)
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    def select(self, variant: str) -> "OpenedPackage":
        """Return a view of this package with only one variant. Closing the view or the package closes both.

        Raises:
            PackageError: There is no variant of that name.
        """
        return self._show(self.manifest.select(variant), self.submodel)

    def select_submodel(self, name: str) -> "OpenedPackage":
        """Return a submodel as a package of its own. Closing this package or the result closes both.

        Raises:
            PackageError: There is no submodel of that name.
        """
        return self._show(self.manifest.select_submodel(name), name)

    def list_members(self) -> dict[str, "OpenedPackage"]:
        """Return a dict from the name of each stage to its package. Empty if this is not a pipeline.

        Closing this package also closes the packages of all stages.

        Raises:
            ManifestError: The manifest of a stage is malformed, or describes more than one plain model.
            PackageError: An artifact of a stage is missing or differs.
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
        """Return a second handle to this package. Each handle must be closed separately."""
        shared = self._show(self.manifest, self.submodel)
        shared._view = self._view[:]
        return shared

    def close(self) -> None:
        """Close the package. Its memory is freed once no view from `read` is in use."""
        self._view.release()
        self._file = PackageFile(self._view, self._view)

    def __enter__(self) -> "OpenedPackage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_package(path: Path, trust: Verifier, limits: Limits = DEFAULT_LIMITS) -> OpenedPackage:
    """Verify the whole package at `path` and return it.

    `trust` decides whose signatures are accepted.

    Raises:
        PackageError: The file cannot be read, exceeds a limit, or is not in the canonical form.
        SignatureError: The signature is malformed or wrong, or its key is not trusted.
        UnavailableError: The file cannot be read at the moment, or its signature cannot be verified.
        DigestError: The manifest or an artifact differs from what was signed.
        ManifestError: The manifest is malformed, inconsistent or needs a newer reader.
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
    """A manifest that anyone could have written, since its signature was not verified.

    It gives no access to the artifacts, so nothing can be run from it.

    Attributes:
        claimed_key_id: The id of the key that supposedly signed the package.
    """

    manifest: Manifest
    claimed_key_id: str


def read_unverified_manifest(
    path: Path, limits: Limits = DEFAULT_LIMITS, *, check_artifacts: bool = True
) -> UnverifiedManifest:
    """Return the manifest of the package at `path` WITHOUT verifying who signed it.

    Use it to list packages, and to show a package to a user who decides whether to trust its key. Use
    `read_package` for everything else. All other checks of `read_package` are made, but if `check_artifacts`
    is False, the artifacts are not read. This saves most of the time.

    Raises:
        PackageError: As for `read_package`, except for an untrusted key or a wrong signature.
        UnavailableError: The machine has too little memory or too few file descriptors.
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
