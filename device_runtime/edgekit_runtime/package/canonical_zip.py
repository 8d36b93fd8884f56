"""The canonical ZIP form, in which a list of members has exactly one valid byte sequence.

Members are stored without compression, and their contents start at multiples of 64 bytes. Every other field
has one permitted value, and there are no bytes between, before or after the members and the directory. The
reader computes each structural byte from the names, sizes and checksums, and refuses an archive that differs.
It is therefore safe from attacks on lenient ZIP readers. Compressed, encrypted, split and zip64 archives are
refused.

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.16 (end record).
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import BinaryIO, Final

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.member_names import MAX_NAME_BYTES, find_name_problem, find_names_problem
from edgekit_runtime.records import dataclass

ALIGNMENT_BYTES: Final = 64  # a cache line, and what the engines ask of weights that are used in place
MAX_ARCHIVE_BYTES: Final = 0xFFFF_FFFE  # beyond this the format needs zip64
MAX_ARCHIVE_MEMBERS: Final = 0xFFFE

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_EXTRA: Final = struct.Struct("<HHH")
_COMMON_FIELDS: Final = (
    "version needed",
    "flags",
    "compression method",
    "time",
    "date",
    "CRC-32",
    "compressed size",
    "size",
    "name length",
    "extra length",
)
_LOCAL_FIELDS: Final = ("local header signature", *_COMMON_FIELDS)
_CENTRAL_FIELDS: Final = (
    "central directory signature",
    "version made by",
    *_COMMON_FIELDS,
    "comment length",
    "disk number",
    "internal attributes",
    "external attributes",
    "local header offset",
)
_END_FIELDS: Final = (
    "end record signature",
    "disk number",
    "directory disk number",
    "members on this disk",
    "members",
    "directory size",
    "directory offset",
    "comment length",
)

_VERSION_NEEDED: Final = 10  # 1.0: stored files
_MADE_BY_UNIX: Final = (3 << 8) | 20
_REGULAR_FILE_0644: Final = 0o100644 << 16
_DATE_1980_01_01: Final = (1 << 5) | 1
_EXTRA_ALIGNMENT_ID: Final = (
    0xD935  # the registered "alignment" field of Android's zipalign: ordinary tools skip it
)
_HINTS: Final = {
    "compression method": "members are stored, never compressed",
    "flags": "no encryption and no data descriptors",
    "external attributes": "every member is a regular file with mode 0644, never a link",
    "local header signature": "bytes lie before or between the members",
}


@dataclass(frozen=True, slots=True)
class Member:
    """The position of one member in the archive.

    Attributes:
        payload_offset: The offset of the member's content, a multiple of 64.
        crc32: The checksum of the content according to the headers.
    """

    name: str
    header_offset: int
    payload_offset: int
    size_bytes: int
    crc32: int

    @property
    def end_offset(self) -> int:
        """The offset of the first byte after the content."""
        return self.payload_offset + self.size_bytes


def place_member(name: str, size_bytes: int, crc32: int, header_offset: int) -> Member:
    """Return the member with its header at `header_offset` and its content at the next multiple of 64."""
    earliest = header_offset + _LOCAL.size + len(name) + _EXTRA.size
    return Member(name, header_offset, -(-earliest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, size_bytes, crc32)


def _common_values(member: Member, extra_bytes: int) -> tuple[int, ...]:
    sizes = (member.crc32, member.size_bytes, member.size_bytes, len(member.name), extra_bytes)
    return (_VERSION_NEEDED, 0, 0, 0, _DATE_1980_01_01, *sizes)


def build_local_header(member: Member) -> bytes:
    """Return the local header of a member, with the padding up to its content."""
    extra_bytes = member.payload_offset - member.header_offset - _LOCAL.size - len(member.name)
    header = _LOCAL.pack(0x04034B50, *_common_values(member, extra_bytes))
    extra = _EXTRA.pack(_EXTRA_ALIGNMENT_ID, extra_bytes - 4, ALIGNMENT_BYTES)
    return header + member.name.encode("ascii") + extra.ljust(extra_bytes, b"\0")


def build_directory(members: Sequence[Member]) -> bytes:
    """Return the central directory and the end record, which follow the last member."""
    entries = []
    for member in members:
        values = _common_values(member, 0)
        tail = (0, 0, 0, _REGULAR_FILE_0644, member.header_offset)
        entries.append(_CENTRAL.pack(0x02014B50, _MADE_BY_UNIX, *values, *tail) + member.name.encode("ascii"))
    directory = b"".join(entries)
    offset = members[-1].end_offset if members else 0
    disks, counts = (0, 0), (len(members),) * 2
    return directory + _END.pack(0x06054B50, *disks, *counts, len(directory), offset, 0)


def write_archive(out: BinaryIO, members: Iterable[tuple[str, bytes | memoryview]]) -> int:
    """Write the members as a canonical archive, in the given order, and return its size in bytes.

    Args:
        out: An empty binary file.
        members: Pairs of the name and the content of a member.

    Raises:
        PackageError: A name is not allowed in a package, or the archive would need zip64.
    """
    contents = list(members)
    if problem := find_names_problem(name for name, _ in contents):
        raise PackageError(f"package: {problem}")
    placed: list[Member] = []
    offset = 0
    for name, content in contents:
        member = place_member(name, len(content), zlib.crc32(content), offset)
        offset = member.end_offset
        if offset > MAX_ARCHIVE_BYTES or len(placed) >= MAX_ARCHIVE_MEMBERS:
            raise PackageError(
                f"package: over {MAX_ARCHIVE_BYTES} bytes or {MAX_ARCHIVE_MEMBERS} members with '{name}'"
            )
        out.write(build_local_header(member))
        out.write(content)
        placed.append(member)
    directory = build_directory(placed)
    if offset + len(directory) > MAX_ARCHIVE_BYTES:
        raise PackageError(f"package: over {MAX_ARCHIVE_BYTES} bytes with its directory")
    out.write(directory)
    return offset + len(directory)


def read_members(data: memoryview, where: str, max_members: int) -> tuple[Member, ...]:
    """Check that the structure of an archive is canonical, and return its members.

    The contents are not read. The caller must compare them with the CRC-32 of each member.

    Args:
        data: The whole archive.
        where: The start of each error message.
        max_members: The maximum number of members.

    Raises:
        PackageError: A structural byte differs from the canonical form, or there are too many members.
    """
    count, directory_offset = _read_end(data, where, max_members)
    members: list[Member] = []
    offset = 0
    for _ in range(count):
        member = _read_local(data, where, offset, directory_offset)
        offset = member.end_offset
        members.append(member)
    if offset != directory_offset:
        raise PackageError(
            f"{where}: members end at byte {offset}, the directory starts at {directory_offset}"
        )
    if problem := find_names_problem(member.name for member in members):
        raise PackageError(f"{where}: {problem}")
    _check_directory(data, where, members, directory_offset)
    return tuple(members)


def _read_end(data: memoryview, where: str, max_members: int) -> tuple[int, int]:
    start = len(data) - _END.size
    if start < 0 or bytes(data[start : start + 4]) != b"PK\x05\x06":
        raise PackageError(
            f"{where}: no ZIP end record in the last {_END.size} of {len(data)} bytes: not a package,"
            " truncated, or bytes were appended; fetch the file again"
        )
    values = _END.unpack_from(data, start)
    count, directory_bytes, directory_offset = values[4:7]
    if count > max_members:  # also the marker 0xFFFF that announces zip64
        raise PackageError(f"{where}: holds {count} members, the limit is {max_members} (zip64 is not read)")
    _compare(
        values, (0x06054B50, 0, 0, count, count, directory_bytes, directory_offset, 0), _END_FIELDS, where
    )
    if directory_offset + directory_bytes != start:
        raise PackageError(
            f"{where}: directory of {directory_bytes} bytes at {directory_offset} should end at {start}:"
            " bytes were added or are missing; fetch the file again"
        )
    return count, directory_offset


def _read_local(data: memoryview, where: str, offset: int, limit: int) -> Member:
    here = f"{where}: member at byte {offset}"
    if offset + _LOCAL.size > limit:
        raise PackageError(f"{here}: runs into the directory at {limit}")
    values = _LOCAL.unpack_from(data, offset)
    crc32, _, size_bytes, name_bytes = values[6:10]
    # The fixed fields come first: the name of something that is no canonical header means nothing.
    fixed = (0x04034B50, _VERSION_NEEDED, 0, 0, 0, _DATE_1980_01_01)
    _compare(values[:6], fixed, _LOCAL_FIELDS[:6], here)
    if not 0 < name_bytes <= MAX_NAME_BYTES or offset + _LOCAL.size + name_bytes > limit:
        raise PackageError(
            f"{here}: name length is {name_bytes}, expected 1 to {MAX_NAME_BYTES} before the directory"
        )
    name = bytes(data[offset + _LOCAL.size : offset + _LOCAL.size + name_bytes]).decode("latin-1")
    if problem := find_name_problem(name):
        raise PackageError(f"{here}: name {name!r} {problem}")
    member = place_member(name, size_bytes, crc32, offset)
    if member.end_offset > limit:
        raise PackageError(f"{here} '{name}': {size_bytes} bytes reach past the directory at {limit}")
    expected = build_local_header(member)
    if data[offset : member.payload_offset] != expected:
        _compare(values, _LOCAL.unpack_from(expected), _LOCAL_FIELDS, f"{here} '{name}'")
        raise PackageError(
            f"{here} '{name}': padding is not {ALIGNMENT_BYTES}-byte alignment filled with zeros"
        )
    return member


def _check_directory(data: memoryview, where: str, members: Sequence[Member], offset: int) -> None:
    expected = build_directory(members)
    if data[offset:] == expected:
        return
    position = 0
    for member in members:
        here = f"{where}: directory entry of '{member.name}'"
        if offset + position + _CENTRAL.size > len(data):
            raise PackageError(f"{here}: is cut off")
        fields = _CENTRAL.unpack_from(data, offset + position)
        _compare(fields, _CENTRAL.unpack_from(expected, position), _CENTRAL_FIELDS, here)
        position += _CENTRAL.size + len(member.name)
    raise PackageError(f"{where}: directory does not name the members in their order, each once")


def _compare(values: Sequence[int], expected: Sequence[int], fields: Sequence[str], where: str) -> None:
    for value, expected_value, field in zip(values, expected, fields, strict=True):
        if value != expected_value:
            hint = f" ({_HINTS[field]})" if field in _HINTS else ""
            raise PackageError(f"{where}: {field} is {value:#x}, expected {expected_value:#x}{hint}")
