import gzip
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from edgekit_runtime.codecs.compression import compress, decompress, decompress_frame, list_codings, read_size
from edgekit_runtime.errors import BackendError, RequestError

zstandard = pytest.importorskip("zstandard")

TEXT = b"".join(f"{number} ".encode() for number in range(20_000))
LIMIT = 1 << 20


def status(data: bytes, coding: str = "zstd", max_bytes: int = LIMIT) -> int:
    with pytest.raises(RequestError) as caught:
        decompress(data, coding, max_bytes=max_bytes)
    return caught.value.status


def without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(data)


@pytest.mark.parametrize("data", [b"", b"a", TEXT, memoryview(TEXT)[5:]])
def test_compressed_data_come_back_whole(data: bytes) -> None:
    frame = compress(data)
    assert read_size(frame, "zstd") == len(data)
    assert decompress(memoryview(frame), "zstd", max_bytes=LIMIT) == bytes(data)


@pytest.mark.parametrize(
    ("coding", "write"), [("zstd", without_size), ("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_frame_without_a_size_is_read_up_to_the_limit(coding: str, write: Callable[[bytes], bytes]) -> None:
    data = write(TEXT)
    assert read_size(data, coding) is None
    assert decompress(data, coding, max_bytes=len(TEXT)) == TEXT
    assert status(data, coding, len(TEXT) - 1) == 413


@pytest.mark.parametrize("write", [compress, without_size, gzip.compress, zlib.compress])
def test_bomb_is_refused_as_too_large(write: Callable[[bytes], bytes]) -> None:
    coding = {gzip.compress: "gzip", zlib.compress: "deflate"}.get(write, "zstd")
    assert status(write(bytes(100 << 20)), coding) == 413


@pytest.mark.parametrize(
    ("coding", "write"),
    [("zstd", compress), ("zstd", without_size), ("gzip", gzip.compress), ("deflate", zlib.compress)],
)
def test_cut_or_extended_or_foreign_body_is_refused(coding: str, write: Callable[[bytes], bytes]) -> None:
    data = write(TEXT)
    for end in (0, 3, len(data) // 2, len(data) - 1):
        assert status(data[:end], coding) == 400
    for extra in (b"x", data[:-1], bytes(64)):
        assert status(data + extra, coding) == 400
    assert status(b"no frame at all, " * 9, coding) == 400


@pytest.mark.parametrize("coding", ["zstd", "gzip"])
def test_body_of_several_frames_is_their_contents_in_a_row(coding: str) -> None:
    ways: list[Callable[[bytes], bytes]] = [gzip.compress] if coding == "gzip" else [compress, without_size]
    generator = random.Random(1)
    for _ in range(40):
        contents = [TEXT[: generator.choice([0, 1, 900, 50_000])] for _ in range(generator.randrange(1, 6))]
        frames = [generator.choice(ways)(content) for content in contents]
        if coding == "zstd":
            skippable = struct.pack("<II", 0x184D2A50, 8) + bytes(8)
            frames.insert(generator.randrange(len(frames) + 1), skippable)
        whole = b"".join(contents)
        data = b"".join(frames)
        assert decompress(data, coding, max_bytes=len(whole) + 8) == whole
        if len(whole) > 8:
            assert status(data, coding, len(whole) - 1) == 413


def test_deflate_is_one_stream() -> None:
    assert status(zlib.compress(TEXT) * 2, "deflate") == 400


@pytest.mark.parametrize(("coding", "compress_frame"), [("zstd", compress), ("gzip", gzip.compress)])
def test_body_of_very_many_empty_frames_is_refused(
    coding: str, compress_frame: Callable[[bytes], bytes]
) -> None:
    assert status(compress_frame(b"") * 100_000, coding) == 400


def test_body_of_many_members_is_not_copied_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Reader:
        def __init__(self, window_bits: int) -> None:
            self._reader = make_reader(window_bits)

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._reader, name)
            if name == "unused_data":
                sizes.append(len(value))
            return value

    make_reader = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Reader)
    text = random.Random(2).randbytes(200_000)
    data = gzip.compress(b"") * 4000 + gzip.compress(text)
    assert decompress(data, "gzip", max_bytes=LIMIT) == text
    assert len(sizes) >= 4000
    assert max(sizes) <= 16 << 10


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate"])
def test_short_frame_is_read_whole_or_not_at_all(coding: str) -> None:
    write = {"zstd": compress, "gzip": gzip.compress, "deflate": zlib.compress}[coding]
    data = write(TEXT)
    assert decompress_frame(memoryview(data), coding, max_bytes=len(TEXT) + 1) == TEXT
    for other in (write(TEXT + TEXT), data + write(b"x"), data + b"x", data[:-1]):
        assert decompress_frame(other, coding, max_bytes=len(TEXT) + 1) is None


@pytest.mark.parametrize("size", [0, 1, len(TEXT) - 1, len(TEXT) + 1, LIMIT])
def test_frame_that_lies_about_its_size_is_refused(size: int) -> None:
    frame = bytearray(compress(TEXT))
    assert frame[4] >> 6 == 2  # its size has four bytes, after the window if there is one
    at = 5 if frame[4] & 0x20 else 6
    assert struct.unpack_from("<I", frame, at) == (len(TEXT),)
    struct.pack_into("<I", frame, at, size)
    assert status(bytes(frame)) == 400


def test_frame_that_asks_for_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    assert status(writer.compress(TEXT) + writer.flush()) == 400


def test_unknown_coding_is_unsupported() -> None:
    assert status(b"", "br") == 415
    assert list_codings() == ("zstd", "gzip", "deflate")


def test_missing_library_is_named_and_only_zstd_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert list_codings() == ("gzip", "deflate")
    assert decompress(gzip.compress(TEXT), "gzip", max_bytes=LIMIT) == TEXT
    with pytest.raises(BackendError, match="zstandard"):
        compress(TEXT)
