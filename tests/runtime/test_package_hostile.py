"""Archives that were built to mislead a reader."""

import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import DigestError, ManifestError, PackageError
from edgekit_runtime.package.archive import read_package

Edit = Callable[[int, bytes], None]

# Offsets of fields within the three kinds of headers (APPNOTE 4.3.7, 4.3.12, 4.3.16).
LOCAL = {"version": 4, "flags": 6, "method": 8, "time": 10, "date": 12, "crc": 14, "packed": 18, "size": 22}
CENTRAL = {
    "made_by": 4, "flags": 8, "method": 10, "crc": 16, "packed": 20, "size": 24, "comment": 32, "disk": 34,
    "external": 38, "offset": 42,
}  # fmt: skip
END = {"disk": 4, "count_here": 8, "count": 10, "directory_size": 12, "directory_offset": 16, "comment": 20}


def refuse(path: Path, maker: Any, reason: str, error: type[PackageError] = PackageError) -> None:
    """Check that reading fails with `reason`, and without memory in proportion to what the file claims."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason):
            read_package(path, maker.trust)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def directory_entry(data: bytes, name: bytes) -> int:
    """Return the offset of the directory entry of `name`."""
    offset = struct.unpack_from("<I", data, len(data) - 6)[0]
    return data.index(name, offset) - 46


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("method", struct.pack("<H", 8), "compression method is 0x8.*stored, never compressed"),
        ("flags", struct.pack("<H", 1), "flags is 0x1.*no encryption"),
        ("flags", struct.pack("<H", 8), "flags is 0x8.*no data descriptors"),
        ("flags", struct.pack("<H", 0x800), "flags"),
        ("version", struct.pack("<H", 45), "version needed"),
        ("time", struct.pack("<H", 1), "time is"),
        ("date", struct.pack("<H", 0), "date is"),
        ("packed", struct.pack("<I", 1), "compressed size"),
        ("size", struct.pack("<I", 0xFFFF_FFFF), "reach past the directory"),
        ("size", struct.pack("<I", 1), "compressed size"),
    ],
)
def test_a_local_header_that_lies_is_refused(
    field: str, value: bytes, reason: str, maker: Any, package_path: Path, edit: Edit
) -> None:
    member = maker.layout(package_path.read_bytes())["model.onnx"]
    edit(member.header_offset + LOCAL[field], value)
    refuse(package_path, maker, reason)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("method", struct.pack("<H", 8), "compression method is 0x8"),
        ("external", struct.pack("<I", 0o120777 << 16), "external attributes.*never a link"),
        ("external", struct.pack("<I", 0o104755 << 16), "external attributes"),
        ("offset", struct.pack("<I", 0), "local header offset is 0x0"),
        ("size", struct.pack("<I", 0xFFFF_FFFF), "size is 0xffffffff"),
        ("packed", struct.pack("<I", 7), "compressed size is 0x7"),
        ("crc", struct.pack("<I", 0), "CRC-32 is 0x0"),
        ("comment", struct.pack("<H", 9), "comment length"),
        ("disk", struct.pack("<H", 1), "disk number"),
        ("made_by", struct.pack("<H", 0), "version made by"),
    ],
)
def test_a_directory_entry_that_lies_is_refused(
    field: str, value: bytes, reason: str, maker: Any, package_path: Path, edit: Edit
) -> None:
    edit(directory_entry(package_path.read_bytes(), b"model.onnx") + CENTRAL[field], value)
    refuse(package_path, maker, f"directory entry of 'model.onnx': {reason}")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("count", struct.pack("<H", 0xFFFF), "65535 members, the limit is 1024.*zip64"),
        ("count", struct.pack("<H", 5), "members on this disk"),
        ("count_here", struct.pack("<H", 0xFFFF), "members on this disk"),
        ("count_here", struct.pack("<HH", 5, 5), "members end at"),
        ("count_here", struct.pack("<HH", 7, 7), "runs into the directory"),
        ("count_here", struct.pack("<HH", 0, 0), "members end at byte 0"),
        ("directory_offset", struct.pack("<I", 0xFFFF_FFFF), "bytes were added or are missing"),
        ("directory_size", struct.pack("<I", 0), "bytes were added or are missing"),
        ("comment", struct.pack("<H", 1), "comment length"),
        ("disk", struct.pack("<H", 1), "disk number"),
    ],
)
def test_an_end_record_that_lies_is_refused(
    field: str, value: bytes, reason: str, maker: Any, package_path: Path, edit: Edit
) -> None:
    edit(package_path.stat().st_size - 22 + END[field], value)
    refuse(package_path, maker, reason)


@pytest.mark.parametrize(
    "name",
    [
        b"../../etc/", b"/etc/passw", b"..\\..\\evil", b"C:\\windows", b"model\0onnx", b"nul.onnx__",
        b"./el.onnx_", b"a//el.onnx", b"\xc3\xa9\xc3\xa9.onnx", b"model.onn.",
    ],
)  # fmt: skip
def test_a_path_trick_in_both_headers_is_refused_by_name(
    name: bytes, maker: Any, package_path: Path, edit: Edit
) -> None:
    data = package_path.read_bytes()
    edit(maker.layout(data)["model.onnx"].header_offset + 30, name)
    edit(directory_entry(data, b"model.onnx") + 46, name)
    refuse(package_path, maker, r"member at byte \d+: name .* has the part")


def test_another_name_in_the_directory_alone_is_refused(maker: Any, package_path: Path, edit: Edit) -> None:
    edit(directory_entry(package_path.read_bytes(), b"model.onnx") + 46, b"../../etc/")
    refuse(package_path, maker, "directory does not name the members")


@pytest.mark.parametrize(
    ("name", "reason"), [(b"golden/x.bin", "stands twice"), (b"golden/X.bin", "differ only in case")]
)
def test_a_name_that_collides_is_refused(
    name: bytes, reason: str, maker: Any, package_path: Path, edit: Edit
) -> None:
    data = package_path.read_bytes()
    edit(maker.layout(data)["golden/y.bin"].header_offset + 30, name)
    edit(directory_entry(data, b"golden/y.bin") + 46, name)
    refuse(package_path, maker, reason)


@pytest.mark.parametrize("length", [0, 300, 0xFFFF])
def test_a_name_length_out_of_bounds_is_refused(
    length: int, maker: Any, package_path: Path, edit: Edit
) -> None:
    edit(maker.layout(package_path.read_bytes())["model.onnx"].header_offset + 26, struct.pack("<H", length))
    refuse(package_path, maker, f"name length is {length}")


@pytest.mark.parametrize("extra_bytes", [0, 5, 70, 0xFFFF])
def test_an_extra_field_of_another_length_is_refused(
    extra_bytes: int, maker: Any, package_path: Path, edit: Edit
) -> None:
    offset = maker.layout(package_path.read_bytes())["model.onnx"].header_offset
    edit(offset + 28, struct.pack("<H", extra_bytes))
    refuse(package_path, maker, "extra length")


def test_bytes_hidden_in_the_padding_are_refused(maker: Any, package_path: Path, edit: Edit) -> None:
    edit(maker.layout(package_path.read_bytes())["model.onnx"].payload_offset - 1, b"!")
    refuse(package_path, maker, "padding")


def test_a_wrong_crc_that_both_headers_share_is_refused(maker: Any, package_path: Path, edit: Edit) -> None:
    data = package_path.read_bytes()
    edit(maker.layout(data)["model.onnx"].header_offset + LOCAL["crc"], b"\1\2\3\4")
    edit(directory_entry(data, b"model.onnx") + CENTRAL["crc"], b"\1\2\3\4")
    refuse(package_path, maker, "'model.onnx' has CRC-32")


def test_changed_content_is_a_wrong_digest(maker: Any, package_path: Path, edit: Edit) -> None:
    edit(maker.layout(package_path.read_bytes())["labels.txt"].payload_offset, b"NO")
    refuse(package_path, maker, "artifact 'labels.txt' has sha256 .*, expected", DigestError)


def test_a_changed_manifest_is_a_wrong_digest(maker: Any, package_path: Path, edit: Edit) -> None:
    edit(package_path.read_bytes().index(b'"accuracy":0.75') + 13, b"9")
    refuse(package_path, maker, "manifest.json has sha256", DigestError)


def test_every_truncation_is_refused(maker: Any, package_path: Path) -> None:
    data = package_path.read_bytes()
    for size_bytes in range(len(data)):
        package_path.write_bytes(data[:size_bytes])
        with pytest.raises(PackageError):
            read_package(package_path, maker.trust)


@pytest.mark.parametrize("garbage", [b"\0", b"PK\x05\x06" + bytes(18), b"x" * 100])
def test_appended_bytes_are_refused(garbage: bytes, maker: Any, package_path: Path) -> None:
    package_path.write_bytes(package_path.read_bytes() + garbage)
    refuse(package_path, maker, "appended|added")


@pytest.mark.parametrize("garbage", [b"\0", b"#!/bin/sh\n", b"x" * 64])
def test_prepended_bytes_are_refused(garbage: bytes, maker: Any, package_path: Path) -> None:
    package_path.write_bytes(garbage + package_path.read_bytes())
    refuse(package_path, maker, "added or are missing")


def test_prepended_bytes_with_a_corrected_end_record_are_refused(maker: Any, package_path: Path) -> None:
    data = bytearray(b"x" * 64 + package_path.read_bytes())
    struct.pack_into("<I", data, len(data) - 6, struct.unpack_from("<I", data, len(data) - 6)[0] + 64)
    package_path.write_bytes(data)
    refuse(package_path, maker, "member at byte 0: local header signature.*before or between")


def write_zip(path: Path, members: dict[str, bytes], method: int, *, zip64: bool = False) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            with archive.open(zipfile.ZipInfo(name), "w", force_zip64=zip64) as file:
                file.write(content)


def test_a_zip_bomb_is_refused(maker: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("manifest.json", bytes(50_000_000))
    assert (tmp_path / "bomb").stat().st_size < 100_000
    refuse(tmp_path / "bomb", maker, "version needed|compression method")


def test_a_zip64_archive_is_refused(maker: Any, tmp_path: Path) -> None:
    write_zip(tmp_path / "z", {"manifest.json": b"{}", "signature.dsse.json": b"{}"}, 0, zip64=True)
    refuse(tmp_path / "z", maker, "version needed")


def test_an_ordinary_zip_of_the_same_members_is_refused(
    maker: Any, package_path: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(package_path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    write_zip(tmp_path / "z", members, 0)
    refuse(tmp_path / "z", maker, "member at byte 0")


def test_overlapping_members_are_refused(maker: Any, package_path: Path, edit: Edit) -> None:
    data = package_path.read_bytes()
    first = maker.layout(data)["golden/x.bin"]
    # The first member now claims all bytes up to the directory, and so the others lie inside of it.
    size = struct.pack("<I", struct.unpack_from("<I", data, len(data) - 6)[0] - first.payload_offset)
    edit(first.header_offset + LOCAL["packed"], size * 2)
    refuse(package_path, maker, "runs into the directory")


@pytest.mark.parametrize("size_bytes", [0, 1, 21, 22, 1000])
def test_a_file_of_zeros_is_refused(size_bytes: int, maker: Any, tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(size_bytes))
    refuse(tmp_path / "zeros", maker, "no ZIP end record" if size_bytes else "is empty or not a regular file")


def test_a_huge_sparse_file_is_refused_by_its_size(maker: Any, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    refuse(tmp_path / "huge", maker, "1099511627776 bytes, the limit is")


def test_an_empty_archive_is_refused(maker: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"PK\x05\x06" + bytes(18))
    refuse(tmp_path / "empty", maker, r"starts with members \[\]")


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo"])
def test_what_is_no_file_is_refused_without_waiting(kind: str, maker: Any, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    refuse(path, maker, "cannot read" if kind == "missing" else "not a regular file")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {b'"version":1}': b'"version":2}'},
            "format.version is 2, this reader knows up to 1; update edgekit",
        ),
        ({b'"critical":[]': b'"critical":["delta"]'}, "format.critical needs delta.*update edgekit"),
        ({b'"role":"labels"': b'"role":"lapels"'}, "role 'labels'"),
        ({b"{": b"{ "}, "not canonical JSON"),
        ({b'"name":"linear"': b'"name":"../../x"'}, "name is '../../x'"),
    ],
)
def test_a_well_signed_manifest_that_is_wrong_is_refused(
    change: dict[bytes, bytes], reason: str, maker: Any, tmp_path: Path
) -> None:
    manifest = maker.manifest().to_bytes()
    for old, new in change.items():
        assert old in manifest
        manifest = manifest.replace(old, new)
    maker.write_signed(tmp_path / "x.edgepkg", manifest)
    refuse(tmp_path / "x.edgepkg", maker, reason, ManifestError)


@pytest.mark.parametrize("change", ["missing", "added", "renamed"])
def test_a_well_signed_package_with_other_members_is_refused(change: str, maker: Any, tmp_path: Path) -> None:
    artifacts = dict(maker.artifacts)
    manifest = maker.manifest()
    if change != "added":
        del artifacts["labels.txt"]
    if change != "missing":
        artifacts["moved.txt"] = b"no\nyes\n"
    other = type(maker)(maker.signer, maker.trust, artifacts, maker.roles)
    other.write_signed(tmp_path / "x.edgepkg", manifest.to_bytes())
    refuse(tmp_path / "x.edgepkg", maker, "the manifest names")


def test_a_member_of_another_size_than_the_manifest_says_is_refused(maker: Any, tmp_path: Path) -> None:
    artifacts = {**maker.artifacts, "labels.txt": b"no\nyes\nmaybe\n"}
    other = type(maker)(maker.signer, maker.trust, artifacts, maker.roles)
    other.write_signed(tmp_path / "x.edgepkg", maker.manifest().to_bytes())
    refuse(tmp_path / "x.edgepkg", maker, "'labels.txt' has 13 bytes, expected 7", DigestError)
