"""One small model, one package of it, and a signer with a fixed key."""

import dataclasses
import hashlib
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner
from tests.fork_server import popen_own

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.package.canonical_zip import Member, read_members, write_archive
from edgekit_runtime.package.golden import Codes, Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Artifact,
    BackendChoice,
    Manifest,
)
from edgekit_runtime.tensors import TensorSpec
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE, Statement
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import StatementSigner

WEIGHT = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
CODES = np.array([[0, 1, 2, 3]], np.uint8)
SCALE, OFFSET = 0.5, -1.0


def make_signer(seed: int) -> CryptoSigner:
    return CryptoSigner(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


def make_model() -> bytes:
    """Y[N, 2] = X[N, 4] @ WEIGHT."""
    onnx = pytest.importorskip("onnx")
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", float32, ["N", 4])],
        [helper.make_tensor_value_info("y", float32, ["N", 2])],
        [onnx.numpy_helper.from_array(WEIGHT, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


@dataclasses.dataclass
class PackageMaker:
    """Makes packages, valid and hostile."""

    signer: StatementSigner
    trust: TrustStore
    artifacts: dict[str, bytes]
    roles: dict[str, str]

    @property
    def sampled_artifacts(self) -> dict[str, bytes]:
        """Artifacts of which golden x is [0, 0, 3, 3], a code a pair, and golden y only its first value."""
        values = np.float32([-1, -1, 0.5, 0.5])
        expected = (values @ WEIGHT)[:1]
        return {**self.artifacts, "golden/x.bin": bytes([0, 3]), "golden/y.bin": expected.tobytes()}

    def sampled_manifest(self) -> Manifest:
        """Return the manifest of `sampled_artifacts`, with every field that golden tensors can have."""
        golden = Golden(
            (GoldenInput("x", "float32", (1, 4), "golden/x.bin", Codes("uint8", SCALE, OFFSET, (1, 2))),),
            (
                GoldenOutput(
                    name="y",
                    dtype="float32",
                    shape=(1, 2),
                    path="golden/y.bin",
                    atol=1e-5,
                    rtol=1e-5,
                    every=2,
                ),
            ),
        )
        return self.manifest(self.sampled_artifacts, golden=golden)

    def manifest(self, artifacts: Mapping[str, bytes] | None = None, **changes: Any) -> Manifest:
        contents = self.artifacts if artifacts is None else artifacts
        entries = tuple(
            Artifact(path, len(content), hashlib.sha256(content).hexdigest(), self.roles[path])
            for path, content in sorted(contents.items())
        )
        golden = Golden(
            (GoldenInput("x", "float32", (1, 4), "golden/x.bin", Codes("uint8", SCALE, OFFSET)),),
            (
                GoldenOutput(
                    name="y", dtype="float32", shape=(1, 2), path="golden/y.bin", atol=1e-5, rtol=1e-5
                ),
            ),
        )
        fields: dict[str, Any] = {
            "name": "linear",
            "version": "1.0.0",
            "target": "x86-64",
            "inputs": (TensorSpec("x", "float32", ("N", 4)),),
            "outputs": (TensorSpec("y", "float32", ("N", 2)),),
            "artifacts": entries,
            "backend": BackendChoice("ort", "model.onnx", {"threads": 1}),
            "golden": golden,
            "labels": "labels.txt",
            "budget": {"max_latency_ms": 10.0},
            "figures": {"size_bytes": 100, "accuracy": 0.75},
            "provenance": {"source_sha256": "0" * 64},
        }
        return Manifest(**{**fields, **changes})

    def write(self, path: Path, **changes: Any) -> bytes:
        write_package(path, self.manifest(**changes), self.artifacts, self.signer)
        return path.read_bytes()

    def write_signed(self, path: Path, manifest_bytes: bytes) -> None:
        """Write a well-signed package around any bytes instead of the manifest."""
        digest = hashlib.sha256(manifest_bytes).hexdigest()
        envelope = self.signer(Statement(MANIFEST_NAME, digest, PACKAGE_PREDICATE_TYPE, {}).to_bytes())
        head = [(MANIFEST_NAME, manifest_bytes), (SIGNATURE_NAME, envelope)]
        with path.open("wb") as file:
            write_archive(file, [*head, *sorted(self.artifacts.items())])

    @staticmethod
    def layout(data: bytes) -> dict[str, Member]:
        return {member.name: member for member in read_members(memoryview(data), "test", 1024)}


def make_maker() -> PackageMaker:
    signer = make_signer(1)
    values = CODES.astype(np.float32) * np.float32(SCALE) + np.float32(OFFSET)
    artifacts = {
        "golden/x.bin": CODES.tobytes(),
        "golden/y.bin": (values @ WEIGHT).tobytes(),
        "labels.txt": b"no\nyes\n",
        "model.onnx": make_model(),
    }
    roles = {
        "golden/x.bin": "golden",
        "golden/y.bin": "golden",
        "labels.txt": "labels",
        "model.onnx": "model",
    }
    return PackageMaker(StatementSigner(signer), TrustStore([signer.public_key]), artifacts, roles)


@pytest.fixture(scope="session")
def maker() -> PackageMaker:
    return make_maker()


@pytest.fixture
def copied_children_of_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let children be copies in one test: others of its file replace or kill real processes."""
    monkeypatch.setattr(subprocess, "Popen", popen_own)


@pytest.fixture
def other_signer() -> StatementSigner:
    """A key that nobody trusts."""
    return StatementSigner(make_signer(2))


@pytest.fixture
def package_path(maker: PackageMaker, tmp_path: Path) -> Path:
    path = tmp_path / "linear-1.0.0-x86-64.edgepkg"
    maker.write(path)
    return path


@pytest.fixture
def edit(package_path: Path) -> Callable[[int, bytes], None]:
    """Overwrites bytes of the package at an offset."""

    def overwrite(offset: int, replacement: bytes) -> None:
        data = bytearray(package_path.read_bytes())
        data[offset : offset + len(replacement)] = replacement
        package_path.write_bytes(data)

    return overwrite
