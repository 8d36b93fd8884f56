import io
import re
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import DigestError, ManifestError, PackageError, SignatureError
from edgekit_runtime.package.archive import Limits, read_package, read_unverified_manifest, write_package
from edgekit_runtime.package.canonical_zip import write_archive
from edgekit_runtime.package.manifest import MANIFEST_NAME, SIGNATURE_NAME


def test_a_written_package_reads_back(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        contents = {path: bytes(package.read(path)) for path in maker.artifacts}
        assert (package.manifest, contents) == (maker.manifest(), maker.artifacts)


def test_the_opened_package_names_the_key_that_signed_it(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        assert package.key_id == maker.signer.key_id


def test_same_inputs_and_key_give_the_same_bytes(maker: Any, tmp_path: Path) -> None:
    assert maker.write(tmp_path / "a.edgepkg") == maker.write(tmp_path / "b.edgepkg")


def test_the_order_of_the_given_artifacts_does_not_matter(
    maker: Any, package_path: Path, tmp_path: Path
) -> None:
    reverse = dict(reversed(maker.artifacts.items()))
    write_package(tmp_path / "again.edgepkg", maker.manifest(), reverse, maker.signer)
    assert (tmp_path / "again.edgepkg").read_bytes() == package_path.read_bytes()


def test_members_are_in_order_stored_and_of_1980(maker: Any, package_path: Path) -> None:
    with zipfile.ZipFile(package_path) as archive:
        members = archive.infolist()
    assert [member.filename for member in members] == [
        MANIFEST_NAME,
        SIGNATURE_NAME,
        *sorted(maker.artifacts),
    ]
    assert {(member.compress_type, member.date_time) for member in members} == {(0, (1980, 1, 1, 0, 0, 0))}


def test_every_payload_starts_at_a_multiple_of_64(maker: Any, package_path: Path) -> None:
    offsets = [member.payload_offset for member in maker.layout(package_path.read_bytes()).values()]
    assert [offset % 64 for offset in offsets] == [0] * 6


def test_an_artifact_is_an_aligned_view_without_a_copy(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        view = package.read("model.onnx")
        first, second = (
            np.frombuffer(item, np.uint8).ctypes.data for item in (view, package.read("model.onnx"))
        )
    assert (view.readonly, first % 64, first) == (True, 0, second)


def test_pythons_zipfile_finds_the_archive_sound(maker: Any, package_path: Path) -> None:
    with zipfile.ZipFile(package_path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in maker.artifacts} == maker.artifacts


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_unzip_finds_the_archive_sound(package_path: Path) -> None:
    result = subprocess.run(["unzip", "-t", str(package_path)], capture_output=True, text=True, check=False)
    assert (result.returncode, "No errors detected" in result.stdout) == (0, True)


def test_an_empty_artifact_and_one_over_the_chunk_size_read_back(maker: Any, tmp_path: Path) -> None:
    artifacts = {**maker.artifacts, "labels.txt": b"", "model.onnx": bytes(range(256)) * 10_000}
    write_package(tmp_path / "x.edgepkg", maker.manifest(artifacts), artifacts, maker.signer)
    with read_package(tmp_path / "x.edgepkg", maker.trust) as package:
        assert {path: bytes(package.read(path)) for path in artifacts} == artifacts


def test_an_artifact_given_as_a_view_of_an_array_is_written_whole(maker: Any, tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    artifacts = {**maker.artifacts, "model.onnx": array.tobytes()}
    manifest = maker.manifest(artifacts)
    write_package(tmp_path / "x.edgepkg", manifest, {**artifacts, "model.onnx": array.data}, maker.signer)
    with read_package(tmp_path / "x.edgepkg", maker.trust) as package:
        assert bytes(package.read("model.onnx")) == array.tobytes()


def test_a_view_outlives_the_package_it_came_from(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        view = package.read("labels.txt")
    assert bytes(view) == maker.artifacts["labels.txt"]


def test_reading_after_close_is_refused(maker: Any, package_path: Path) -> None:
    package = read_package(package_path, maker.trust)
    package.close()
    with pytest.raises(PackageError, match="after close"):
        package.read("model.onnx")


def test_an_unknown_artifact_is_refused_with_those_there_are(maker: Any, package_path: Path) -> None:
    with (
        read_package(package_path, maker.trust) as package,
        pytest.raises(PackageError, match=r"'weights.bin'.*model\.onnx"),
    ):
        package.read("weights.bin")


def test_writing_an_artifact_that_the_manifest_does_not_describe_is_refused(
    maker: Any, tmp_path: Path
) -> None:
    artifacts = {**maker.artifacts, "model.onnx": maker.artifacts["model.onnx"][::-1]}
    with pytest.raises(DigestError, match=r"'model\.onnx' has sha256"):
        write_package(tmp_path / "x.edgepkg", maker.manifest(), artifacts, maker.signer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"extra.bin": b""}, {"labels.txt": None}])
def test_writing_other_artifacts_than_the_manifest_names_is_refused(
    change: dict[str, bytes | None], maker: Any, tmp_path: Path
) -> None:
    artifacts = {path: data for path, data in {**maker.artifacts, **change}.items() if data is not None}
    with pytest.raises(ManifestError, match=f"differ in {next(iter(change))}"):
        write_package(tmp_path / "x.edgepkg", maker.manifest(), artifacts, maker.signer)


def test_a_signer_that_returns_no_envelope_leaves_no_file(maker: Any, tmp_path: Path) -> None:
    with pytest.raises(SignatureError):
        write_package(tmp_path / "x.edgepkg", maker.manifest(), maker.artifacts, lambda _: b"{}")
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_over_the_default_limit_is_not_written(maker: Any, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="limit is 1048576"):
        maker.write(tmp_path / "x.edgepkg", figures={"long": "x" * (1 << 20)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "limit", ["max_package_bytes", "max_manifest_bytes", "max_signature_bytes", "max_members"]
)
def test_a_package_beyond_a_limit_is_refused(limit: str, maker: Any, package_path: Path) -> None:
    with pytest.raises(PackageError, match="the limit is 5"):
        read_package(package_path, maker.trust, Limits(**{limit: 5}))


def test_a_package_at_its_limits_is_read(maker: Any, package_path: Path) -> None:
    layout = maker.layout(package_path.read_bytes())
    limits = Limits(
        max_package_bytes=package_path.stat().st_size,
        max_manifest_bytes=layout[MANIFEST_NAME].size_bytes,
        max_signature_bytes=layout[SIGNATURE_NAME].size_bytes,
        max_members=6,
    )
    with read_package(package_path, maker.trust, limits) as package:
        assert package.manifest.name == "linear"


def test_a_hostile_name_is_not_written() -> None:
    with pytest.raises(PackageError, match=r"\.\./x"):
        write_archive(io.BytesIO(), [("../x", b"")])


def test_error_in_a_signed_manifest_names_the_package(maker: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.edgepkg"
    manifest = maker.manifest().to_json()
    for manifest_bytes in (
        b"[]",
        b"{}",
        encode_json({**manifest, "name": 7}),
        encode_json({**manifest, "inputs": 7}),
    ):
        maker.write_signed(path, manifest_bytes)
        for read in (lambda: read_package(path, maker.trust), lambda: read_unverified_manifest(path)):
            with pytest.raises(ManifestError, match=rf"^{re.escape(str(path))}: manifest.json"):
                read()
