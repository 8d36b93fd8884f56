"""Reading what a package says of itself without trusting its key: every other check stays."""

import random
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import DigestError, ManifestError, PackageError, SignatureError
from edgekit_runtime.package.archive import (
    Limits,
    OpenedPackage,
    read_package,
    read_unverified_manifest,
    write_package,
)
from edgekit_runtime.package.manifest import SIGNATURE_NAME
from edgekit_runtime.trust.dsse import EVIDENCE_PREDICATE_TYPE, PACKAGE_PREDICATE_TYPE, read_unverified
from edgekit_toolkit.packaging.evidence import read_unverified_evidence, write_evidence
from edgekit_toolkit.packaging.signing_keys import StatementSigner


@pytest.fixture
def strange_path(maker: Any, other_signer: StatementSigner, tmp_path: Path) -> Path:
    """A package by a key that nobody trusts."""
    path = tmp_path / "strange.edgepkg"
    write_package(path, maker.manifest(), maker.artifacts, other_signer)
    return path


def test_a_package_by_an_unknown_key_shows_its_manifest_and_that_key(
    maker: Any, other_signer: StatementSigner, strange_path: Path
) -> None:
    found = read_unverified_manifest(strange_path)
    assert (found.manifest, found.claimed_key_id) == (maker.manifest(), other_signer.key_id)


def test_what_was_not_verified_is_no_opened_package(strange_path: Path) -> None:
    found = read_unverified_manifest(strange_path)
    assert not isinstance(found, OpenedPackage)
    assert not hasattr(found, "read")


def test_a_package_by_an_unknown_key_stays_refused_by_read_package(maker: Any, strange_path: Path) -> None:
    with pytest.raises(SignatureError, match="trusted are"):
        read_package(strange_path, maker.trust)


def test_a_wrong_signature_is_the_only_change_that_passes(maker: Any, package_path: Path) -> None:
    data = package_path.read_bytes()
    layout = maker.layout(data)
    envelope = range(layout[SIGNATURE_NAME].payload_offset, layout[SIGNATURE_NAME].end_offset)
    rng = random.Random(5)
    for offset in rng.sample([offset for offset in range(len(data)) if offset not in envelope], 300):
        changed = bytearray(data)
        changed[offset] ^= 1 << rng.randrange(8)
        package_path.write_bytes(changed)
        with pytest.raises(PackageError):
            read_unverified_manifest(package_path)


def test_a_manifest_that_is_malformed_is_refused_unverified_too(maker: Any, package_path: Path) -> None:
    maker.write_signed(package_path, b"{}")
    with pytest.raises(ManifestError, match="'format' is missing"):
        read_unverified_manifest(package_path)


def test_limits_hold_for_unverified_reading(package_path: Path) -> None:
    with pytest.raises(PackageError, match="the limit is 5"):
        read_unverified_manifest(package_path, Limits(max_manifest_bytes=5))


def test_an_envelope_of_another_purpose_is_refused_unverified_too(maker: Any, package_path: Path) -> None:
    data = package_path.read_bytes()
    member = maker.layout(data)[SIGNATURE_NAME]
    with pytest.raises(SignatureError, match="predicate type"):
        read_unverified(data[member.payload_offset : member.end_offset], EVIDENCE_PREDICATE_TYPE, "x")


def test_a_broken_envelope_is_refused_unverified_too() -> None:
    with pytest.raises(SignatureError, match="'payload' is missing"):
        read_unverified(b"{}", PACKAGE_PREDICATE_TYPE, "x")


def test_evidence_by_an_unknown_key_shows_what_it_says(
    strange_path: Path, other_signer: StatementSigner, tmp_path: Path
) -> None:
    write_evidence(tmp_path / "e", strange_path, {"latency_ms": 1.25}, other_signer)
    assert read_unverified_evidence(tmp_path / "e", strange_path).predicate == {"latency_ms": 1.25}


def test_evidence_about_another_file_is_refused_unverified_too(
    strange_path: Path, package_path: Path, other_signer: StatementSigner, tmp_path: Path
) -> None:
    write_evidence(tmp_path / "e", strange_path, {}, other_signer)
    with pytest.raises(DigestError, match="is about"):
        read_unverified_evidence(tmp_path / "e", package_path)
