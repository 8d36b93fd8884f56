"""Makes a package from the installed one and a delta, with bounded memory, size and time.

A delta is not trusted: its maker cannot write outside the one file, nor more bytes than wanted, and the
result counts only with the digest that the manager signed. There are two formats, told apart by their first
bytes: a zstd frame whose dictionary is the installed package (`zstd --patch-from`), and runs over the tensors
of both.

Source: docs/reference/fleet-deltas.md; RFC 8878 (zstd).
"""

import hashlib
import lzma
import mmap
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.agent.documents import DeltaOffer, DesiredModel
from edgekit_runtime.codecs.compression import find_zstd
from edgekit_runtime.errors import DigestError, OutputError, PackageError
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically

MAGIC: Final = b"EKDELTA2"
HEAD: Final = struct.Struct("<8sQQIII")
"""Magic, bytes of base and result, number of runs, packed bytes of the runs and of the literals."""
RUN: Final = struct.Struct("<BIIII")
"""Kind, offset in the base less the end of the previous run, length in bytes, number of channels, elements
of one step along the channels (bits of a float32: the factor of a `PRODUCT`, the step of `STEPS_16`)."""
LITERAL, BYTES, WORDS_16, WORDS_32, SCALED_INT8, SCALED_UINT8, PRODUCT, STEPS_16 = 0, 1, 2, 4, 5, 6, 7, 8
WIDTHS: Final = {
    LITERAL: 1,
    BYTES: 1,
    WORDS_16: 2,
    WORDS_32: 4,
    SCALED_INT8: 1,
    SCALED_UINT8: 1,
    PRODUCT: 4,
    STEPS_16: 2,
}
"""Kind -> bytes of a word."""
ONE: Final = 1 << 12
"""The multiplier that changes nothing."""
BLOCK_BYTES: Final = 1 << 16
MAX_RUNS: Final = 1 << 16
MAX_CHANNELS: Final = 1 << 16
LZMA_FILTERS: Final = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 20}]
MAX_ZSTD_BYTES: Final = 32 << 20
"""Of base and result together: a zstd delta holds both in memory."""
ZSTD_SUFFIX: Final = ".zst"
RUNS_SUFFIX: Final = ".ekdelta"

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_WINDOW_BYTES: Final = 64 << 20
_PACKED_BYTES: Final = 16 << 10
_BYTES_PER_S: Final = 100_000.0  # of a slow device; a delta that takes longer is built to take long
_LEAST_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Run:
    kind: int
    offset: int
    length: int
    channels: int
    step: int

    def check(self, base_bytes: int, left_bytes: int, factors_bytes: int) -> None:
        has_base = self.kind not in (LITERAL, PRODUCT)
        is_scaled = self.kind in (SCALED_INT8, SCALED_UINT8)
        if (
            self.kind not in WIDTHS
            or not 0 < self.length <= left_bytes
            or self.length % WIDTHS[self.kind]
            or (has_base and self.offset + self.length > base_bytes)
            or (self.kind == PRODUCT and self.length != factors_bytes)
            or (is_scaled and not (0 < self.channels <= MAX_CHANNELS and self.step))
        ):
            raise PackageError(f"the delta is malformed: {self} of a base of {base_bytes} bytes")


def find_delta(desired_model: DesiredModel, installed: frozenset[str]) -> DeltaOffer | None:
    """Return the smallest delta that can be used here and is smaller than the package, or None.

    Args:
        desired_model: the package that the desired document names.
        installed: digests of the manifests of the packages that are installed here.
    """
    usable = [
        offer
        for offer in desired_model.deltas
        if offer.from_sha256 in installed
        and 0 < offer.size_bytes < desired_model.size_bytes
        and (offer.path.endswith(RUNS_SUFFIX) or (offer.path.endswith(ZSTD_SUFFIX) and find_zstd()))
    ]
    return min(usable, key=lambda offer: offer.size_bytes, default=None)


def apply_delta(
    delta: Path,
    base: Path,
    path: Path,
    *,
    size_bytes: int,
    sha256: str,
    stop: threading.Event,
    disk: Disk = DISK,
) -> None:
    """Write to `path` the package made from `delta` and `base`; after an error nothing is at `path`.

    Args:
        delta: verified against its digest or not: nothing in it is trusted.
        base: the installed package.
        path: path of the result.
        size_bytes: size of the wanted package file.
        sha256: digest of the wanted package file.
        stop: set to stop.
        disk: carries changes out.

    Raises:
        PackageError: the delta is damaged, for another base, makes another size, takes too long, or was
            stopped.
        DigestError: it makes another file.
        OutputError: the disk is full or fails.
    """
    give_up_s = time.monotonic() + _LEAST_S + size_bytes / _BYTES_PER_S
    digest, left_bytes = hashlib.sha256(), size_bytes
    try:
        with delta.open("rb") as file, write_atomically(path, mode=0o600, disk=disk) as out:
            for piece in _decode(file, base, size_bytes):
                left_bytes -= len(piece)
                if left_bytes < 0:
                    raise PackageError(f"the delta makes more than the {size_bytes} bytes of the package")
                if stop.is_set() or time.monotonic() > give_up_s:
                    raise PackageError("the delta was stopped, or took too long")
                digest.update(piece)
                out.write(piece)
            if left_bytes:
                raise PackageError(f"the delta ends {left_bytes} bytes before the package does")
            if digest.hexdigest() != sha256:
                raise DigestError(f"the delta makes sha256 {digest.hexdigest()}, wanted is {sha256}")
    except OutputError:
        raise
    except (OSError, lzma.LZMAError, EOFError, ValueError, MemoryError, struct.error) as cause:
        raise PackageError(f"the delta cannot be applied: {cause}") from cause


def _decode(file: BinaryIO, base: Path, size_bytes: int) -> Iterator[bytes]:
    with base.open("rb") as base_file, mmap.mmap(base_file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = file.read(HEAD.size)
        if begin[:4] == _ZSTD_MAGIC:
            file.seek(0)
            yield from _decode_zstd(file, content, size_bytes)
        elif begin[:8] == MAGIC and len(begin) == HEAD.size:
            yield from _decode_runs(file, begin, content, size_bytes)
        else:
            raise PackageError("the delta is malformed: it begins like no format that is known here")


def _decode_zstd(file: BinaryIO, base: mmap.mmap, size_bytes: int) -> Iterator[bytes]:
    zstd = find_zstd()
    if zstd is None or len(base) + size_bytes > MAX_ZSTD_BYTES:
        raise PackageError(f"a zstd delta needs the package zstandard, and {MAX_ZSTD_BYTES} bytes at most")
    dictionary = zstd.ZstdCompressionDict(base[:], dict_type=zstd.DICT_TYPE_RAWCONTENT)
    reader = zstd.ZstdDecompressor(dict_data=dictionary, max_window_size=_WINDOW_BYTES)
    try:
        with reader.stream_reader(file, read_size=_PACKED_BYTES, closefd=False) as stream:
            while piece := stream.read(BLOCK_BYTES):
                yield piece
    except zstd.ZstdError as cause:
        raise PackageError(f"the delta is damaged: {cause}") from cause


def _decode_runs(file: BinaryIO, head: bytes, base: mmap.mmap, size_bytes: int) -> Iterator[bytes]:
    _, base_bytes, result_bytes, count, runs_bytes, literals_bytes = HEAD.unpack(head)
    if base_bytes != len(base) or result_bytes != size_bytes or count > MAX_RUNS:
        raise PackageError(
            f"the delta makes {result_bytes} bytes of {base_bytes} in {count} runs, expected"
            f" {size_bytes} of {len(base)} in {MAX_RUNS} at most"
        )
    literals_begin = HEAD.size + runs_bytes
    residuals_begin = literals_begin + literals_bytes
    control = _Unpacker(file, HEAD.size, literals_begin)
    literals = _Unpacker(file, literals_begin, residuals_begin)
    residuals = _Unpacker(file, residuals_begin, file.seek(0, 2))
    left_bytes, expected, factors = size_bytes, 0, b""
    for _ in range(count):
        kind, offset, *others = RUN.unpack(control.read(RUN.size))
        run = _Run(kind, (expected + offset) & 0xFFFFFFFF, *others)
        run.check(base_bytes, left_bytes, len(factors))
        left_bytes -= run.length
        expected = run.offset + run.length
        multipliers = None
        if run.kind in (SCALED_INT8, SCALED_UINT8):
            multipliers = np.frombuffer(literals.read(2 * run.channels), dtype="<u2").astype(np.int32)
        for start in range(0, run.length, BLOCK_BYTES):
            length = min(BLOCK_BYTES, run.length - start)
            if run.kind == LITERAL:
                yield literals.read(length)
                continue
            if run.kind == PRODUCT:
                old = multiply(factors, run.step)
            else:
                old = np.frombuffer(base[run.offset + start : run.offset + start + length], dtype=np.uint8)
            if multipliers is not None:
                old = predict(old, multipliers, run.step, start, is_signed=run.kind == SCALED_INT8)
            residual = np.frombuffer(residuals.read(length), dtype=np.uint8)
            piece = add_residual(old, residual, run.kind, run.step).tobytes()
            yield piece
            if run.kind in (WORDS_32, PRODUCT):
                factors = piece if run.length <= BLOCK_BYTES else b""


class _Unpacker:
    """Reads a requested number of bytes from one of the packed streams of a delta."""

    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._position, self._end = file, begin, end
        self._unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=LZMA_FILTERS)

    def read(self, size_bytes: int) -> bytes:
        pieces, remaining = [], size_bytes
        while remaining > 0:
            if self._unpacker.eof:
                raise PackageError("the delta is damaged: a stream of it ends too early")
            packed = b""
            if self._unpacker.needs_input:
                self._file.seek(self._position)
                packed = self._file.read(min(_PACKED_BYTES, self._end - self._position))
                self._position += len(packed)
                if not packed:
                    raise PackageError("the delta is damaged: it ends too early")
            piece = self._unpacker.decompress(packed, max_length=remaining)
            remaining -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)


def predict(
    old: NDArray[np.uint8], multipliers: NDArray[np.int32], step: int, start: int, *, is_signed: bool
) -> NDArray[np.uint8]:
    """Return a tensor's elements if only its scales have changed; the result is equal on all machines.

    Args:
        old: uint8 [n], bytes of the base; signed, or with the zero point 128.
        multipliers: int32 [channels], of `ONE`.
        step: elements before the channel changes.
        start: number of the first element in its tensor.
        is_signed: see `old`.
    """
    channel = (np.arange(start, start + len(old)) // step) % len(multipliers)
    flip = np.uint8(0 if is_signed else 0x80)
    signed = (old ^ flip).view(np.int8).astype(np.int32)
    scaled = (signed * multipliers[channel] + ONE // 2) >> 12
    return np.asarray(np.clip(scaled, -128, 127).astype(np.int8).view(np.uint8) ^ flip)


def multiply(factors: bytes, bits: int) -> NDArray[np.uint8]:
    """Return float32 words times a factor, in double precision, rounded once: scales of a layer's bias.

    Args:
        factors: float32 words that were made before.
        bits: the float32 factor as its 32 bits.
    """
    factor = np.array([bits], "<u4").view("<f4").astype(np.float64)
    with np.errstate(all="ignore"):  # Bad factors give bad bytes; the digest check rejects them.
        product = np.frombuffer(factors, "<f4").astype(np.float64) * factor
        return np.asarray(product.astype("<f4")).view(np.uint8)


def add_steps(old: NDArray[np.uint8], steps: NDArray[np.int16], bits: int) -> NDArray[np.uint8]:
    """Return float16 words plus a number of steps each, in double precision, rounded once.

    Args:
        old: uint8 [2 n], words of the base.
        steps: int16 [n]; at 0 the word stays the same, even NaN.
        bits: the float32 step as its 32 bits.
    """
    step = np.array([bits], "<u4").view("<f4").astype(np.float64)
    words = old.view("<f2")
    with np.errstate(all="ignore"):  # as in `multiply`
        moved = (words.astype(np.float64) + steps * step).astype("<f2")
    return np.where(steps == 0, words.view("<u2"), moved.view("<u2")).view(np.uint8)


def add_residual(
    old: NDArray[np.uint8], residual: NDArray[np.uint8], kind: int, step: int
) -> NDArray[np.uint8]:
    """Return the elements of the result; `deltas` of the host subtracts.

    Args:
        old: uint8 [n], as predicted.
        residual: uint8 [n]: differences, folded so that small ones of both signs are small; for words, first
            all low bytes, then all next ones.
        kind: kind of the run.
        step: step of the run.
    """
    if WIDTHS[kind] == 1:
        return np.asarray(old + unfold(residual))
    unsigned = np.dtype(f"<u{WIDTHS[kind]}")
    words = np.ascontiguousarray(residual.reshape(unsigned.itemsize, -1).T).view(unsigned).ravel()
    if kind == STEPS_16:
        return add_steps(old, unfold(words).view(np.int16), step)
    return np.asarray(old.view(unsigned) + unfold(words)).view(np.uint8)


def unfold(folded: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return 0, -1, 1, -2 ... (modulo the type) of 0, 1, 2, 3 ..."""
    unit = folded.dtype.type(1)
    return np.asarray((folded >> unit) ^ (np.zeros_like(folded) - (folded & unit)))
