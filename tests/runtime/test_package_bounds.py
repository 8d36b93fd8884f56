"""Bounds of packages, at the limit and one beyond; archives that end in the middle of a header."""

import dataclasses
import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import ManifestError, PackageError, SignatureError
from edgekit_runtime.package import archive, canonical_zip
from edgekit_runtime.package.archive import Limits, read_package, write_package
from edgekit_runtime.package.canonical_zip import (
    build_directory,
    build_local_header,
    place_member,
    read_members,
    write_archive,
)
from edgekit_runtime.package.manifest import MANIFEST_NAME, SIGNATURE_NAME
from edgekit_runtime.package.manifest_entries import Artifact
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE, Statement


def pack(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    assert write_archive(file, members) == len(file.getvalue())
    return file.getvalue()


def read(data: bytes, max_members: int = 10) -> list[str]:
    return [member.name for member in read_members(memoryview(data), "here", max_members)]


def test_limits_are_by_default_those_of_the_format_page() -> None:
    assert dataclasses.astuple(Limits()) == (2_147_483_648, 1_048_576, 65_536, 1024)


@pytest.mark.parametrize(
    "limit", ["max_package_bytes", "max_manifest_bytes", "max_signature_bytes", "max_members"]
)
def test_package_one_beyond_a_limit_is_refused(limit: str, maker: Any, package_path: Path) -> None:
    layout = maker.layout(package_path.read_bytes())
    last = {
        "max_package_bytes": package_path.stat().st_size,
        "max_manifest_bytes": layout[MANIFEST_NAME].size_bytes,
        "max_signature_bytes": layout[SIGNATURE_NAME].size_bytes,
        "max_members": 6,
    }[limit]
    read_package(package_path, maker.trust, Limits(**{limit: last})).close()
    with pytest.raises(PackageError, match=f"{last}.* the limit is {last - 1}"):
        read_package(package_path, maker.trust, Limits(**{limit: last - 1}))


def test_manifest_at_its_limit_is_written_and_one_beyond_refused(maker: Any, tmp_path: Path) -> None:
    spare = (1 << 20) - len(maker.manifest(figures={"long": ""}).to_bytes())
    maker.write(tmp_path / "last.edgepkg", figures={"long": "x" * spare})
    with read_package(tmp_path / "last.edgepkg", maker.trust) as package:
        assert len(package.manifest.to_bytes()) == 1_048_576
    with pytest.raises(PackageError, match=r"manifest\.json has 1048577 bytes, the limit is 1048576"):
        maker.write(tmp_path / "over.edgepkg", figures={"long": "x" * (spare + 1)})


@pytest.mark.parametrize("what", ["package", "signature"])
def test_package_beyond_the_default_limits_is_not_written(
    what: str, maker: Any, package_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = maker.layout(package_path.read_bytes())
    name = f"max_{what}_bytes"
    last = {"package": package_path.stat().st_size, "signature": layout[SIGNATURE_NAME].size_bytes}[what]
    monkeypatch.setattr(archive, "DEFAULT_LIMITS", Limits(**{name: last}))
    maker.write(tmp_path / "last.edgepkg")
    monkeypatch.setattr(archive, "DEFAULT_LIMITS", Limits(**{name: last - 1}))
    with pytest.raises(PackageError, match=f"has {last} bytes, the limit is {last - 1}"):
        maker.write(tmp_path / "over.edgepkg")
    assert not (tmp_path / "over.edgepkg").exists()


@pytest.mark.parametrize(("members", "is_written"), [(1024, True), (1025, False)])
def test_members_are_written_up_to_their_limit(
    members: int, is_written: bool, maker: Any, tmp_path: Path
) -> None:
    more = {f"more/{number}": b"" for number in range(members - 2 - len(maker.artifacts))}
    empty = hashlib.sha256(b"").hexdigest()
    entries = (*maker.manifest().artifacts, *(Artifact(path, 0, empty, "other") for path in more))
    manifest = dataclasses.replace(
        maker.manifest(), artifacts=tuple(sorted(entries, key=lambda one: one.path))
    )
    path = tmp_path / "x.edgepkg"
    if not is_written:
        with pytest.raises(PackageError, match="1025 members, the limit is 1024"):
            write_package(path, manifest, {**maker.artifacts, **more}, maker.signer)
        return
    write_package(path, manifest, {**maker.artifacts, **more}, maker.signer)
    with read_package(path, maker.trust) as package:
        assert len(package.manifest.artifacts) == 1022


@pytest.mark.parametrize("name", ["x", "x" * 255, "a/" * 127 + "b"])
def test_name_at_a_bound_of_its_length_is_written_and_read(name: str) -> None:
    assert read(pack((name, b"content"))) == [name]


def test_archive_at_the_limit_of_the_format_is_written_and_one_beyond_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size_bytes = len(pack(("a", b"a"), ("b", b"b")))
    monkeypatch.setattr(canonical_zip, "MAX_ARCHIVE_BYTES", size_bytes)
    pack(("a", b"a"), ("b", b"b"))
    monkeypatch.setattr(canonical_zip, "MAX_ARCHIVE_BYTES", size_bytes - 1)
    with pytest.raises(PackageError, match=f"package: over {size_bytes - 1} bytes with its directory"):
        pack(("a", b"a"), ("b", b"b"))


@pytest.mark.parametrize(("limit_bytes", "reason"), [(65, "with its directory"), (64, "members with 'a'")])
def test_member_beyond_the_limit_of_the_format_is_refused_by_name(
    limit_bytes: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canonical_zip, "MAX_ARCHIVE_BYTES", limit_bytes)  # the content ends at 65
    with pytest.raises(PackageError, match=f"package: over {limit_bytes} bytes .*{reason}"):
        pack(("a", b"a"))


def test_members_at_the_limit_of_the_format_are_written_and_one_beyond_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canonical_zip, "MAX_ARCHIVE_MEMBERS", 2)
    assert read(pack(("a", b""), ("b", b""))) == ["a", "b"]
    with pytest.raises(PackageError, match="bytes or 2 members with 'c'"):
        pack(("a", b""), ("b", b""), ("c", b""))


def test_members_are_read_up_to_the_number_that_is_asked_for() -> None:
    data = pack(("a", b""), ("b", b""))
    assert read(data, 2) == ["a", "b"]
    with pytest.raises(PackageError, match=r"here: holds 2 members, the limit is 1 \(zip64 is not read\)"):
        read(data, 1)


def end_record(count: int, directory_bytes: int, directory_offset: int) -> bytes:
    return struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, directory_bytes, directory_offset, 0)


LOCAL = build_local_header(place_member("a" * 10, 1, 0, 0))


@pytest.mark.parametrize(
    ("kept_bytes", "reason"),
    [
        (29, "runs into the directory at 29"),
        (30, "name length is 10, expected 1 to 255 before the directory"),
        (39, "name length is 10, expected 1 to 255 before the directory"),
        (40, "'aaaaaaaaaa': 1 bytes reach past the directory at 40"),
        (64, "'aaaaaaaaaa': 1 bytes reach past the directory at 64"),
    ],
)
def test_member_that_is_cut_off_by_the_directory_is_refused(kept_bytes: int, reason: str) -> None:
    with pytest.raises(PackageError) as caught:
        read(LOCAL[:kept_bytes] + end_record(1, 0, kept_bytes))
    assert str(caught.value).startswith("here: member at byte 0")
    assert str(caught.value).endswith(reason)


@pytest.mark.parametrize(
    ("kept_bytes", "reason"),
    [
        (0, "directory entry of 'a': is cut off"),
        (23, "directory entry of 'a': is cut off"),
        (24, "directory entry of 'a': size is 0x6054b50"),
        (47, "directory entry of 'b': is cut off"),
        (47 + 23, "directory entry of 'b': is cut off"),
        (93, "directory does not name the members in their order, each once"),
    ],
)
def test_directory_that_is_cut_off_is_refused(kept_bytes: int, reason: str) -> None:
    data = pack(("a", b"a"), ("b", b"b"))
    offset = struct.unpack_from("<I", data, len(data) - 6)[0]
    cut = data[: offset + kept_bytes] + end_record(2, kept_bytes, offset)
    with pytest.raises(PackageError) as caught:
        read(cut)
    assert str(caught.value).startswith(f"here: {reason}")


def test_directory_in_another_order_is_refused() -> None:
    members = [place_member("a", 0, 0, 0)]
    members.append(place_member("b", 0, 0, members[0].end_offset))
    data = b"".join(map(build_local_header, members)) + build_directory(members)
    assert read(data) == ["a", "b"]
    swapped = b"".join(map(build_local_header, members)) + build_directory(members[::-1])
    # The offset of the directory is that of the end of the last member.
    swapped = swapped[:-6] + data[-6:]
    with pytest.raises(PackageError, match="directory entry of 'a': local header offset"):
        read(swapped)


def test_archive_without_members_is_its_end_record_alone() -> None:
    assert (pack(), read(pack())) == (end_record(0, 0, 0), [])


@pytest.mark.parametrize("size_bytes", [0, 1, 21])
def test_file_shorter_than_an_end_record_is_none(size_bytes: int) -> None:
    with pytest.raises(PackageError, match=f"no ZIP end record in the last 22 of {size_bytes} bytes"):
        read(bytes(size_bytes))


@pytest.mark.parametrize(
    "first",
    [("a.json", "b.json"), ("zz.json", "zzz.json"), (SIGNATURE_NAME, MANIFEST_NAME), (MANIFEST_NAME,)],
)
def test_package_that_starts_with_other_members_is_refused(
    first: tuple[str, ...], maker: Any, tmp_path: Path
) -> None:
    (tmp_path / "x.edgepkg").write_bytes(pack(*((name, b"{}") for name in first)))
    with pytest.raises(PackageError) as caught:
        read_package(tmp_path / "x.edgepkg", maker.trust)
    assert f"starts with members {list(first)}, expected {MANIFEST_NAME}, {SIGNATURE_NAME}" in str(
        caught.value
    )


@pytest.mark.parametrize("name", [MANIFEST_NAME, SIGNATURE_NAME])
def test_wrong_crc_of_what_is_signed_is_refused_by_name(name: str, maker: Any, package_path: Path) -> None:
    data = package_path.read_bytes()
    members = list(maker.layout(data).values())
    contents = [data[member.payload_offset : member.end_offset] for member in members]
    changed = [
        dataclasses.replace(member, crc32=member.crc32 ^ 1) if member.name == name else member
        for member in members
    ]
    pieces = [build_local_header(member) + content for member, content in zip(changed, contents, strict=True)]
    package_path.write_bytes(b"".join(pieces) + build_directory(changed))
    wanted = next(
        zlib.crc32(content) for member, content in zip(members, contents, strict=True) if member.name == name
    )
    with pytest.raises(
        PackageError, match=f"'{name}' has CRC-32 {wanted:#010x}, its header says {wanted ^ 1:#010x}"
    ):
        read_package(package_path, maker.trust)


def test_whole_package_is_copied_whatever_lies_at_its_path(maker: Any, package_path: Path) -> None:
    data, copy = package_path.read_bytes(), io.BytesIO()
    with read_package(package_path, maker.trust) as package:
        package_path.unlink()
        package.copy_to(copy)
    assert copy.getvalue() == data


def test_package_with_a_variant_selected_reads_the_same_artifacts(maker: Any, package_path: Path) -> None:
    with read_package(package_path, maker.trust) as package:
        selected = package.select("default")
        assert (selected.manifest, selected.key_id, selected.path) == (
            package.manifest,
            package.key_id,
            package_path,
        )
        assert bytes(selected.read("labels.txt")) == maker.artifacts["labels.txt"]


def test_signature_for_another_subject_is_refused_with_its_key(maker: Any, tmp_path: Path) -> None:
    statement = Statement("other.json", "0" * 64, PACKAGE_PREDICATE_TYPE, {})
    envelope = maker.signer(statement.to_bytes())
    (tmp_path / "x.edgepkg").write_bytes(pack((MANIFEST_NAME, b"{}"), (SIGNATURE_NAME, envelope)))
    with pytest.raises(SignatureError) as caught:
        read_package(tmp_path / "x.edgepkg", maker.trust)
    assert caught.value.key_id == maker.signer.key_id


def test_artifacts_that_are_not_given_are_named_in_order(maker: Any, tmp_path: Path) -> None:
    artifacts = {**maker.artifacts, "b.bin": b"", "a.bin": b""}
    del artifacts["labels.txt"]
    with pytest.raises(ManifestError, match=r"named and given differ in a\.bin, b\.bin, labels\.txt$"):
        write_package(tmp_path / "x.edgepkg", maker.manifest(), artifacts, maker.signer)
