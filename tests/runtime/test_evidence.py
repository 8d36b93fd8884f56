import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import DigestError, OutputError, PackageError, SignatureError
from edgekit_toolkit.packaging import evidence
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence, write_evidence
from edgekit_toolkit.packaging.signing_keys import StatementSigner

PREDICATE = {"latency_ms": {"p50": 1.25, "p95": 2.5}, "device": "x86-64"}


@pytest.fixture
def path(maker: Any, package_path: Path) -> Path:
    path = evidence_path(package_path)
    write_evidence(path, package_path, PREDICATE, maker.signer)
    return path


def test_evidence_lies_beside_its_package(path: Path, package_path: Path) -> None:
    assert path == package_path.parent / "linear-1.0.0-x86-64.evidence.json"


def test_evidence_reads_back(path: Path, package_path: Path, maker: Any) -> None:
    statement = read_evidence(path, package_path, maker.trust)
    assert (statement.predicate, statement.subject_name) == (PREDICATE, package_path.name)


def test_evidence_is_a_dsse_envelope(path: Path) -> None:
    assert set(json.loads(path.read_bytes())) == {"payload", "payloadType", "signatures"}


def test_every_changed_byte_of_evidence_is_a_signature_error(
    path: Path, package_path: Path, maker: Any
) -> None:
    rng = random.Random(7)
    data = path.read_bytes()
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 1 << rng.randrange(8)]) + data[offset + 1 :])
        with pytest.raises(SignatureError):
            read_evidence(path, package_path, maker.trust)


@pytest.mark.parametrize("size_bytes", [0, 1, 100])
def test_truncated_evidence_is_a_signature_error(
    size_bytes: int, path: Path, package_path: Path, maker: Any
) -> None:
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.raises(SignatureError):
        read_evidence(path, package_path, maker.trust)


def test_evidence_of_an_untrusted_key_is_a_signature_error(
    package_path: Path, other_signer: StatementSigner, maker: Any, tmp_path: Path
) -> None:
    write_evidence(tmp_path / "e", package_path, PREDICATE, other_signer)
    with pytest.raises(SignatureError) as caught:
        read_evidence(tmp_path / "e", package_path, maker.trust)
    assert caught.value.key_id == other_signer.key_id


def test_the_signature_of_a_package_is_no_evidence(maker: Any, package_path: Path, tmp_path: Path) -> None:
    member = maker.layout(package_path.read_bytes())["signature.dsse.json"]
    envelope = package_path.read_bytes()[member.payload_offset : member.end_offset]
    (tmp_path / "e").write_bytes(envelope)
    with pytest.raises(SignatureError, match="predicate type"):
        read_evidence(tmp_path / "e", package_path, maker.trust)


def test_evidence_about_another_file_is_a_digest_error(path: Path, package_path: Path, maker: Any) -> None:
    maker.write(package_path, version="2.0.0")
    with pytest.raises(DigestError, match="is about"):
        read_evidence(path, package_path, maker.trust)


@pytest.mark.parametrize("missing", ["evidence", "package"])
def test_a_missing_file_is_named(missing: str, path: Path, package_path: Path, maker: Any) -> None:
    gone = path if missing == "evidence" else package_path
    gone.unlink()
    with pytest.raises(PackageError, match=gone.name):
        read_evidence(path, package_path, maker.trust)


def test_evidence_over_the_limit_is_neither_written_nor_read(
    path: Path, package_path: Path, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_EVIDENCE_BYTES", path.stat().st_size - 1)
    with pytest.raises(SignatureError, match="limit"):
        read_evidence(path, package_path, maker.trust)
    with pytest.raises(SignatureError, match="limit"):
        write_evidence(path, package_path, PREDICATE, maker.signer)


def test_evidence_at_the_limit_is_written_and_read(
    path: Path, package_path: Path, maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_EVIDENCE_BYTES", path.stat().st_size)
    write_evidence(path, package_path, PREDICATE, maker.signer)
    assert read_evidence(path, package_path, maker.trust).predicate == PREDICATE


def test_evidence_beyond_16_mib_is_not_read(path: Path, package_path: Path, maker: Any) -> None:
    with path.open("wb") as file:
        file.truncate(16_777_217)
    with pytest.raises(SignatureError, match="evidence is over the limit of 16777216 bytes"):
        read_evidence(path, package_path, maker.trust)


def test_evidence_beside_a_file_of_another_kind_keeps_its_whole_name(tmp_path: Path) -> None:
    assert evidence_path(tmp_path / "model.onnx") == tmp_path / "model.onnx.evidence.json"


def test_evidence_about_another_file_names_both_digests(path: Path, package_path: Path, maker: Any) -> None:
    before = hashlib.sha256(package_path.read_bytes()).hexdigest()
    maker.write(package_path, version="2.0.0")
    after = hashlib.sha256(package_path.read_bytes()).hexdigest()
    with pytest.raises(DigestError) as caught:
        read_evidence(path, package_path, maker.trust)
    assert str(caught.value) == f"{package_path}: has sha256 {after}, the evidence {path} is about {before}"


def test_evidence_that_cannot_be_written_is_an_output_error(package_path: Path, maker: Any) -> None:
    with pytest.raises(OutputError):
        write_evidence(package_path.parent / "missing" / "e", package_path, PREDICATE, maker.signer)
