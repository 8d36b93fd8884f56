"""Evidence is a signed statement about a file, with figures that vary from run to run, such as latency."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DigestError, SignatureError
from edgekit_runtime.package.archive import Sign
from edgekit_runtime.system.atomic_files import hash_file, write_atomically
from edgekit_runtime.trust.dsse import EVIDENCE_PREDICATE_TYPE, Envelope, Statement, Verifier, read_unverified

MAX_EVIDENCE_BYTES: Final = 16 << 20


def evidence_path(package_path: Path) -> Path:
    """Return the path of a package's evidence, `NAME-VERSION-TARGET.evidence.json` in the same folder."""
    return package_path.with_name(package_path.name.removesuffix(".edgepkg") + ".evidence.json")


def write_evidence(path: Path, subject_path: Path, predicate: Mapping[str, JsonValue], sign: Sign) -> None:
    """Write a signed statement about a file atomically.

    Args:
        path: The path of the evidence file.
        subject_path: The path of the file that the statement is about. The statement contains its sha256.
        predicate: The content of the statement.
        sign: Signs the statement.

    Raises:
        SignatureError: The subject cannot be read, the predicate is not JSON or too large, or `sign` fails.
        OutputError: The evidence cannot be written.
    """
    statement = Statement(subject_path.name, _hash_subject(subject_path), EVIDENCE_PREDICATE_TYPE, predicate)
    envelope = sign(statement.to_bytes())
    Envelope.from_bytes(envelope, str(path))
    if len(envelope) > MAX_EVIDENCE_BYTES:
        raise SignatureError(f"{path}: evidence has {len(envelope)} bytes, the limit is {MAX_EVIDENCE_BYTES}")
    with write_atomically(path) as file:
        file.write(envelope)


def read_evidence(path: Path, subject_path: Path, trust: Verifier) -> Statement:
    """Verify the evidence file at `path` and the digest of its subject, and return the statement.

    The file name in the statement is not compared, so the subject may be renamed.

    Raises:
        SignatureError: The evidence is unreadable, too large, malformed or changed, or its key is not
            trusted.
        DigestError: The statement is about another file than `subject_path`.
    """
    statement, _ = trust.verify(_read_file(path), EVIDENCE_PREDICATE_TYPE, str(path))
    _check_subject(statement, path, subject_path)
    return statement


def read_unverified_evidence(path: Path, subject_path: Path) -> Statement:
    """Return the statement in the evidence file at `path` WITHOUT verifying the signature.

    Anybody may have written the file. Show the statement only to people who decide whether to trust the key.

    Raises:
        SignatureError: The evidence is unreadable, too large, or malformed.
        DigestError: The statement is about another file than `subject_path`.
    """
    statement, _ = read_unverified(_read_file(path), EVIDENCE_PREDICATE_TYPE, str(path))
    _check_subject(statement, path, subject_path)
    return statement


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_EVIDENCE_BYTES + 1)
    except OSError as cause:
        raise SignatureError(f"cannot read evidence {path}: {cause.strerror}") from cause
    if len(data) > MAX_EVIDENCE_BYTES:
        raise SignatureError(f"{path}: evidence is over the limit of {MAX_EVIDENCE_BYTES} bytes")
    return data


def _check_subject(statement: Statement, path: Path, subject_path: Path) -> None:
    sha256 = _hash_subject(subject_path)
    if sha256 != statement.sha256:
        raise DigestError(
            f"{subject_path}: has sha256 {sha256}, the evidence {path} is about {statement.sha256}"
        )


def _hash_subject(path: Path) -> str:
    try:
        return hash_file(path)
    except OSError as cause:
        raise SignatureError(f"cannot read {path}, which the evidence is about: {cause.strerror}") from cause
