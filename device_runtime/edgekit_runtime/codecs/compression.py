"""Compression of HTTP bodies with zstd, and decompression of zstd, gzip and deflate.

Received data may be hostile. The decompressed size is checked before memory is allocated, and a body must
consist of complete frames (or gzip members) without trailing bytes.

Source: RFC 8878 (zstd), RFC 9659 (its window in HTTP), RFC 9110, section 8.4.1 (gzip, deflate), RFC 1952,
    section 2.2 (members of gzip).
"""

import contextlib
import functools
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from edgekit_runtime.errors import BackendError, RequestError
from edgekit_runtime.system.install_hint import install_command

IDENTITY: Final = "identity"
ZSTD: Final = "zstd"

_LEVEL: Final = 1
_MAX_WINDOW_BYTES: Final = 8 << 20  # RFC 9659: the limit for senders, the least for readers
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Input bytes at a time. After a member, the rest of a piece is copied. A KiB of zstd gives at most 32 MB. The
# readers of the others take a limit of their output.
_PIECE_BYTES: Final = {ZSTD: 1 << 10, "gzip": 16 << 10, "deflate": 16 << 10}
# Of one body. Empty frames take no space, so only their number limits them.
_MAX_FRAMES: Final = {ZSTD: 4096, "gzip": 4096, "deflate": 1}
_OUTPUT_BYTES: Final = 256 << 10


def list_codings() -> tuple[str, ...]:
    """Return the content codings that can be read on this machine, the best first."""
    return (ZSTD, *_WINDOW_BITS) if find_zstd() is not None else tuple(_WINDOW_BITS)


def has_zstd() -> bool:
    return find_zstd() is not None


def compress(data: "bytes | memoryview") -> bytes:
    """Return `data` as one zstd frame that states its size, compressed at level 1.

    Raises:
        BackendError: zstandard is not installed. Send the data uncompressed.
    """
    frame: bytes = _need_zstd().ZstdCompressor(level=_LEVEL).compress(data)
    return frame


def read_size(data: "bytes | memoryview", coding: str) -> int | None:
    """Return the decompressed size that `data` states, or None if it states none. The size may be wrong.

    Raises:
        RequestError: the beginning of `data` is invalid (status 400), or the coding is unknown (415).
    """
    if coding in _WINDOW_BITS:
        return None
    if coding != ZSTD:
        raise RequestError(415, f"the content coding {coding[:32]!r} is not supported, use zstd or identity")
    zstd = _need_zstd()
    try:
        frame = zstd.get_frame_parameters(data)
    except zstd.ZstdError as cause:
        raise RequestError(400, f"the body is no zstd frame: {cause}") from cause
    return None if frame.content_size == zstd.CONTENTSIZE_UNKNOWN else frame.content_size


def decompress(data: "bytes | memoryview", coding: str, *, max_bytes: int) -> bytes:
    """Return the content of a compressed body.

    Args:
        data: the whole body.
        coding: `zstd`, `gzip` or `deflate`, in lower case.
        max_bytes: maximum size of the content. No more memory is used, even if the body states a larger size.

    Raises:
        RequestError: the body is malformed, cut off, of another size than it states, or followed by other
            bytes (status 400), the content is larger than `max_bytes` (413), or the coding is unknown (415).
        BackendError: zstandard is not installed.
    """
    size_bytes = read_size(data, coding)
    if size_bytes is not None and size_bytes > max_bytes:
        raise _refuse_size(size_bytes, max_bytes)
    if coding != ZSTD:
        make_inflater = functools.partial(zlib.decompressobj, _WINDOW_BITS[coding])
        return _read_frames(data, coding, max_bytes, make_inflater, zlib.error)
    if size_bytes and (content := _read_zstd_frame(data)) is not None:
        return content
    zstd = _need_zstd()
    reader = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    make_reader = functools.partial(reader.decompressobj, write_size=_OUTPUT_BYTES)
    return _read_frames(data, coding, max_bytes, make_reader, zstd.ZstdError)


def decompress_frame(data: "bytes | memoryview", coding: str, *, max_bytes: int) -> bytes | None:
    """Return the content of a body that is one valid frame, or None for any other body.

    The result is also None if the content is larger than `max_bytes`, or if a zstd frame states no size. No
    more than `max_bytes` are ever decompressed. The errors are those of `read_size`.
    """
    size_bytes = read_size(data, coding)
    if coding == ZSTD:
        return _read_zstd_frame(data) if size_bytes and size_bytes <= max_bytes else None
    reader = zlib.decompressobj(_WINDOW_BITS[coding])
    with contextlib.suppress(zlib.error):
        content = reader.decompress(data, max_bytes)
        if reader.eof and not reader.unused_data:
            return content
    return None


def _read_zstd_frame(data: "bytes | memoryview") -> bytes | None:
    """Return the content of one frame, which states its size; None if damaged, or with bytes behind it."""
    zstd = _need_zstd()
    reader = zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    try:
        content: bytes = reader.decompress(data, allow_extra_data=False)
    except zstd.ZstdError:
        return None
    return content


def _read_frames(
    data: "bytes | memoryview",
    coding: str,
    max_bytes: int,
    make_reader: Callable[[], Any],
    error: type[Exception],
) -> bytes:
    """Return the content of all frames; `make_reader` makes the reader of one, which raises `error`."""
    contents: list[bytes] = []
    left_bytes = max_bytes + 1  # one more than allowed, which tells that there is more
    reader, frames = make_reader(), 1
    try:
        for start in range(0, len(data), _PIECE_BYTES[coding]):
            piece = data[start : start + _PIECE_BYTES[coding]]
            while len(piece):
                if reader.eof:
                    reader, frames = make_reader(), frames + 1
                if frames > _MAX_FRAMES[coding]:
                    raise RequestError(400, f"bytes follow the {coding} body, or it has too many parts")
                contents.append(reader.decompress(piece, *(() if coding == ZSTD else (left_bytes,))))
                left_bytes -= len(contents[-1])
                if left_bytes <= 0:
                    raise _refuse_size(None, max_bytes)
                piece = reader.unused_data
    except error as cause:
        raise RequestError(400, f"the {coding} body cannot be read: {cause}") from cause
    if not reader.eof:
        raise RequestError(400, f"the {coding} body ends in the middle")
    return b"".join(contents)  # which copies nothing where there is one


def _refuse_size(size_bytes: int | None, max_bytes: int) -> RequestError:
    size = "more" if size_bytes is None else f"{size_bytes} bytes"
    return RequestError(413, f"the decompressed body has {size}, the limit here is {max_bytes} bytes")


def find_zstd() -> ModuleType | None:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def _need_zstd() -> Any:
    zstd = find_zstd()
    if zstd is None:
        raise BackendError(f"zstd needs the package zstandard; {install_command('offload')}")
    return zstd
