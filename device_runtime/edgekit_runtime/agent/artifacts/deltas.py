"""Makes a package from a delta and the installed package, or from a coded file.

Deltas are not trusted. A delta can write only the result file, and no more bytes than expected. The result
must have the digest that the manager signed. Memory and time are bounded.

A delta has one of two formats. The first is a zstd frame whose dictionary is the installed package
(`zstd --patch-from`). The second is a list of runs, each of which describes consecutive bytes of the result.
A coded file has the second format and needs no installed package. Example: the coded file of a package of
1000 bytes with the int8 weights -1 and 2.

    head       EKDELTA4, sizes of base (0) and result (1000), 3 runs, sizes of the streams
    runs       700 literal bytes, then 2 coded bytes with zero point 0, then 298 literal bytes
    literals   the 998 bytes of the headers, the manifest and the graph
    residuals  empty
    codes      1 and 4, which are the folded weights

Source: docs/reference/fleet-deltas.md; RFC 8878 (zstd).
"""

import hashlib
import lzma
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.agent.documents import DeltaOffer, DesiredModel
from edgekit_runtime.codecs.compression import find_zstd
from edgekit_runtime.codecs.rans import RansDecoder
from edgekit_runtime.encryption.container import ContentKey, Header, encrypt_chunks
from edgekit_runtime.errors import DigestError, OutputError, PackageError
from edgekit_runtime.package.golden import draw_bytes
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically

MAGIC: Final = b"EKDELTA4"
Buffer: TypeAlias = bytes | mmap.mmap


@dataclass(frozen=True, slots=True)
class RunKind:
    """A method to compute a run, which is a sequence of consecutive bytes of the result.

    Attributes:
        number: number of the kind in the delta file.
        width: size of a word in bytes.
        has_base: whether the run is computed from bytes of the base.
        has_channels: whether the delta has a multiplier for each channel of the run.
        has_step: whether the delta has a step, a zero point or a seed for the run.
        is_float: True for floats with the sign in the lowest bit, False for folded words, see `unfold`.
        residual_width: size of a word's residual in bytes. The value -1 means `width`.
    """

    number: int
    width: int
    has_base: bool = False
    has_channels: bool = False
    has_step: bool = False
    is_float: bool = False
    residual_width: int = -1

    def __post_init__(self) -> None:
        if self.residual_width < 0:
            object.__setattr__(self, "residual_width", self.width)


LITERAL: Final = RunKind(0, 1)
BYTES: Final = RunKind(1, 1, has_base=True)
WORDS_16: Final = RunKind(2, 2, has_base=True)
WORDS_32: Final = RunKind(4, 4, has_base=True)
SCALED_INT8: Final = RunKind(5, 1, has_base=True, has_channels=True, has_step=True)
SCALED_UINT8: Final = RunKind(6, 1, has_base=True, has_channels=True, has_step=True)
PRODUCT: Final = RunKind(7, 4, has_step=True)
STEPS_16: Final = RunKind(8, 2, has_base=True, has_step=True)
NEW_BYTES: Final = RunKind(9, 1, has_step=True)
NEW_INT32: Final = RunKind(10, 4)
NEW_FLOAT32: Final = RunKind(11, 4, is_float=True)
NEW_FLOAT16: Final = RunKind(12, 2, is_float=True)
NEW_MULTIPLES: Final = RunKind(13, 4, has_step=True, residual_width=2)
NEW_NOISE: Final = RunKind(14, 1, has_step=True, residual_width=0)
KINDS: Final = {
    kind.number: kind
    for kind in (
        LITERAL,
        BYTES,
        WORDS_16,
        WORDS_32,
        SCALED_INT8,
        SCALED_UINT8,
        PRODUCT,
        STEPS_16,
        NEW_BYTES,
        NEW_INT32,
        NEW_FLOAT32,
        NEW_FLOAT16,
        NEW_MULTIPLES,
        NEW_NOISE,
    )
}
CODED: Final = 0x80
"""A bit in the kind of a run. If it is set, the residuals of the run are in the stream of codes."""
FIXED_POINT_ONE: Final = 1 << 12
"""The multiplier 1."""
BLOCK_BYTES: Final = 1 << 16
MAX_RUNS: Final = 1 << 16
MAX_CHANNELS: Final = 1 << 16
WORDS_MODEL: Final = 225
"""Stands for `WORDS_LZMA_MODEL` in a stream that continues the packed words."""
WORDS_LZMA_MODEL: Final = 0
WORDS_BYTES: Final = 27215
MAX_ZSTD_BYTES: Final = 32 << 20
"""The maximum size of base and result together, because a zstd delta holds both in memory."""
ZSTD_SUFFIX: Final = ".zst"
RUNS_SUFFIX: Final = ".ekdelta"

_STEP_BITS: Final = {NEW_BYTES.number: 8, NEW_NOISE.number: 16}
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_WINDOW_BYTES: Final = 64 << 20
_PACKED_BYTES: Final = 16 << 10
_BYTES_PER_S: Final = 100_000.0  # of a slow device. A slower delta was built to waste time
_LEAST_S: Final = 60.0


def list_lzma_filters(model: int) -> list[dict[str, Any]]:
    """Return the filters that decode raw LZMA data.

    `model` states the LZMA parameters as one number, (pb · 5 + lp) · 9 + lc.

    Raises:
        PackageError: `model` is too large.
    """
    position_bits, literal = divmod(model, 45)
    if model >= WORDS_MODEL:
        raise PackageError(f"the delta is malformed: there is no LZMA model {model}")
    bits = {"lc": literal % 9, "lp": literal // 9, "pb": position_bits}
    return [{"id": lzma.FILTER_LZMA1, "preset": 9, "dict_size": 1 << 20, **bits}]


def read_words() -> bytes:
    """Return raw LZMA data with texts that most packages contain. A `WORDS_MODEL` stream continues it."""
    return files(__package__).joinpath("words.lzma").read_bytes()


@dataclass(frozen=True, slots=True)
class _Run:
    kind: RunKind
    is_coded: bool
    offset: int
    length: int
    channels: int
    step: int

    def check(self, base_bytes: int, left_bytes: int, factors_bytes: int) -> None:
        if (
            not 0 < self.length <= left_bytes
            or self.length % self.kind.width
            or (self.is_coded and self.kind in (LITERAL, NEW_NOISE))
            or (self.kind.has_base and not 0 <= self.offset <= base_bytes - self.length)
            or (self.kind is PRODUCT and self.length != factors_bytes)
            or (self.kind.has_channels and not (0 < self.channels <= MAX_CHANNELS and self.step))
            or self.step >= 1 << _STEP_BITS.get(self.kind.number, 32)
        ):
            raise PackageError(f"the delta is malformed: {self} of a base of {base_bytes} bytes")


def find_delta(desired_model: DesiredModel, installed: frozenset[str]) -> DeltaOffer | None:
    """Return the smallest delta that this device can apply, or None if no delta is smaller than the package.

    The result may be a coded file, which needs no installed package.

    `installed` contains the digests of the manifests of the installed packages.
    """
    usable = [
        offer
        for offer in desired_model.deltas
        if (not offer.from_sha256 or offer.from_sha256 in installed)
        and 0 < offer.size_bytes < desired_model.size_bytes
        and (offer.path.endswith(RUNS_SUFFIX) or (offer.path.endswith(ZSTD_SUFFIX) and find_zstd()))
    ]
    return min(usable, key=lambda offer: offer.size_bytes, default=None)


def apply_delta(
    delta: BinaryIO,
    base: Buffer,
    path: Path,
    *,
    size_bytes: int,
    sha256: str,
    stop: threading.Event,
    disk: Disk = DISK,
    encryption: tuple[ContentKey, Header] | None = None,
) -> None:
    """Apply a delta to an installed package, and write the new package. An error leaves no file at `path`.

    Args:
        delta: content of the delta, which need not be verified.
        base: content of the installed package, empty for a coded file.
        path: path of the file to write.
        size_bytes: size of the package before encryption.
        sha256: expected digest of the file.
        stop: event that stops the work.
        disk: file operations.
        encryption: key and header with which to encrypt the package, or None to write it unencrypted.

    Raises:
        PackageError: the delta is damaged, needs another base, makes a package of another size, takes too
            long, or was stopped.
        DigestError: the file has another digest.
        OutputError: the disk is full or fails.
    """
    digest, pieces = hashlib.sha256(), rebuild(delta, base, size_bytes, stop)
    if encryption is not None:
        pieces = encrypt_chunks(_make_reader(pieces), *encryption)
    try:
        with write_atomically(path, mode=0o600, disk=disk) as out:
            for piece in pieces:
                digest.update(piece)
                out.write(piece)
            if digest.hexdigest() != sha256:
                raise DigestError(f"the delta makes sha256 {digest.hexdigest()}, wanted is {sha256}")
    except OutputError:
        raise
    except OSError as cause:
        raise PackageError(f"the delta cannot be applied: {cause}") from cause


def _make_reader(pieces: Iterator[bytes]) -> Callable[[int], bytes]:
    """Return a file's `read` over `pieces`: it returns fewer bytes than requested only at the end."""
    buffer = bytearray()

    def read(size_bytes: int) -> bytes:
        while len(buffer) < size_bytes and (piece := next(pieces, b"")):
            buffer.extend(piece)
        content = bytes(buffer[:size_bytes])
        del buffer[:size_bytes]
        return content

    return read


def rebuild(delta: BinaryIO, base: Buffer, size_bytes: int, stop: threading.Event) -> Iterator[bytes]:
    """Yield the content of the package in pieces. The caller checks the digest of the whole package.

    The arguments are those of `apply_delta`.

    Raises:
        PackageError: see `apply_delta`.
    """
    give_up_s = time.monotonic() + _LEAST_S + size_bytes / _BYTES_PER_S
    left_bytes = size_bytes
    try:
        for piece in _decode(delta, base, size_bytes):
            left_bytes -= len(piece)
            if left_bytes < 0:
                raise PackageError(f"the delta makes more than the {size_bytes} bytes of the package")
            if stop.is_set() or time.monotonic() > give_up_s:
                raise PackageError("the delta was stopped, or took too long")
            yield piece
    except (lzma.LZMAError, EOFError, ValueError, MemoryError, OSError) as cause:
        raise PackageError(f"the delta cannot be applied: {cause}") from cause
    if left_bytes:
        raise PackageError(f"the delta ends {left_bytes} bytes before the package does")


def _decode(file: BinaryIO, base: Buffer, size_bytes: int) -> Iterator[bytes]:
    begin = file.read(len(MAGIC))
    if begin == MAGIC:
        yield from _decode_runs(file, base, size_bytes)
    elif begin[:4] == _ZSTD_MAGIC:
        file.seek(0)
        yield from _decode_zstd(file, base, size_bytes)
    else:
        raise PackageError("the delta is malformed: it begins like no format that is known here")


def _decode_zstd(file: BinaryIO, base: Buffer, size_bytes: int) -> Iterator[bytes]:
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


def _decode_runs(file: BinaryIO, base: Buffer, size_bytes: int) -> Iterator[bytes]:
    base_bytes, result_bytes, count = (_read_number(file.read) for _ in range(3))
    if base_bytes != len(base) or result_bytes != size_bytes or count > MAX_RUNS:
        raise PackageError(
            f"the delta makes {result_bytes} bytes of {base_bytes} in {count} runs, expected"
            f" {size_bytes} of {len(base)} in {MAX_RUNS} at most"
        )
    packed = [(_read_number(file.read), _read_number(file.read)) for _ in range(3)]
    coded_bytes = _read_number(file.read)
    if coded_bytes > size_bytes:
        raise PackageError(f"the delta is malformed: it has {coded_bytes} codes")
    streams, position = [], file.tell()
    for packed_bytes, model in packed:
        streams.append(_Unpacker(_Part(file, position, position + packed_bytes), model))
        position += packed_bytes
    control, literals, residuals = streams
    codes = RansDecoder(_Part(file, position, file.seek(0, 2)).read, coded_bytes)
    left_bytes, expected, factors = size_bytes, 0, b""
    for _ in range(count):
        run = _read_run(control.read, expected)
        run.check(base_bytes, left_bytes, len(factors))
        left_bytes -= run.length
        expected = run.offset + run.length
        multipliers = None
        if run.kind.has_channels:
            multipliers = np.frombuffer(literals.read(2 * run.channels), dtype="<u2").astype(np.int32)
        for start in range(0, run.length, BLOCK_BYTES):
            length = min(BLOCK_BYTES, run.length - start)
            if run.kind is LITERAL:
                yield literals.read(length)
                continue
            if run.kind is NEW_NOISE:
                yield draw_bytes(run.step, start, start + length).tobytes()
                continue
            begin = run.offset + start
            old = np.frombuffer(
                base[begin : begin + length] if run.kind.has_base else bytes(length), np.uint8
            )
            if run.kind is PRODUCT:
                old = multiply(factors, run.step)
            elif run.kind is NEW_BYTES:
                old = np.full(length, run.step, np.uint8)
            elif multipliers is not None:
                old = predict(old, multipliers, run.step, start, is_signed=run.kind is SCALED_INT8)
            residual_bytes = length // run.kind.width * run.kind.residual_width
            residual = np.frombuffer(
                (codes if run.is_coded else residuals).read(residual_bytes), dtype=np.uint8
            )
            piece = add_residual(old, residual, run.kind, run.step).tobytes()
            yield piece
            if run.kind.width == 4:
                factors = piece if run.length <= BLOCK_BYTES else b""


def _read_run(read: Callable[[int], bytes], expected: int) -> _Run:
    number = read(1)[0]
    kind = KINDS.get(number & ~CODED)
    if kind is None:
        raise PackageError(f"the delta is malformed: it has a run of kind {number}")
    length = _read_number(read)
    offset = expected
    if kind.has_base:
        folded = _read_number(read)
        offset += (folded >> 1) ^ -(folded & 1)
    channels = _read_number(read) if kind.has_channels else 0
    step = _read_number(read) if kind.has_step else 0
    return _Run(kind, number >= CODED, offset, length, channels, step)


def _read_number(read: Callable[[int], bytes]) -> int:
    """Return a number of at most 42 bits: 7 in each byte, the lowest first; the last byte is below 128."""
    number = 0
    for shift in range(0, 42, 7):
        byte = read(1)
        number |= (byte[0] & 0x7F if byte else 0) << shift
        if not byte or byte[0] < 0x80:
            break
    return number


class _Part:
    def __init__(self, file: BinaryIO, begin: int, end: int) -> None:
        self._file, self._position, self._end = file, begin, end

    def read(self, size_bytes: int) -> bytes:
        self._file.seek(self._position)
        content = self._file.read(min(size_bytes, self._end - self._position))
        self._position += len(content)
        return content


class _Unpacker:
    """Reads a requested number of bytes from one of the packed streams of a delta."""

    def __init__(self, part: _Part, model: int) -> None:
        has_words = model == WORDS_MODEL
        filters = list_lzma_filters(WORDS_LZMA_MODEL if has_words else model)
        self._part, self._unpacker = part, lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)
        self._packed = read_words() if has_words else b""
        if has_words:
            self.read(WORDS_BYTES)

    def read(self, size_bytes: int) -> bytes:
        pieces, remaining = [], size_bytes
        while remaining > 0:
            if self._unpacker.eof:
                raise PackageError("the delta is damaged: a stream ends too early")
            packed, self._packed = self._packed, b""
            if self._unpacker.needs_input and not packed:
                packed = self._part.read(_PACKED_BYTES)
                if not packed:
                    raise PackageError("the delta is damaged: it ends too early")
            piece = self._unpacker.decompress(packed, max_length=remaining)
            remaining -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)


def predict(
    old: NDArray[np.uint8], multipliers: NDArray[np.int32], step: int, start: int, *, is_signed: bool
) -> NDArray[np.uint8]:
    """Predict the elements of a tensor whose scales have changed.

    Args:
        old: uint8 [n], the bytes of the old elements, which are int8, or uint8 with zero point 128.
        multipliers: int32 [channels], new scale / old scale, in units of 1 / `FIXED_POINT_ONE`.
        step: number of consecutive elements that belong to one channel.
        start: index in the tensor of the first element of `old`.
        is_signed: whether the elements are int8.

    Returns:
        uint8 [n], the bytes of the new elements.
    """
    channel = (np.arange(start, start + len(old)) // step) % len(multipliers)
    flip = np.uint8(0 if is_signed else 0x80)
    signed = (old ^ flip).view(np.int8).astype(np.int32)
    scaled = (signed * multipliers[channel] + FIXED_POINT_ONE // 2) >> 12
    return np.asarray(np.clip(scaled, -128, 127).astype(np.int8).view(np.uint8) ^ flip)


def multiply(factors: bytes, bits: int) -> NDArray[np.uint8]:
    """Multiply numbers by one factor, for example to compute the scales of a bias from those of the weights.

    Args:
        factors: the numbers to multiply, as the bytes of float32 [n].
        bits: the float32 factor as a 32-bit integer.

    Returns:
        uint8 [4 n], the products as float32 [n]. They are computed in double precision.
    """
    with np.errstate(all="ignore"):  # Bad factors give bad bytes; the digest check rejects them.
        factor = np.array([bits], "<u4").view("<f4").astype(np.float64)
        product = np.frombuffer(factors, "<f4").astype(np.float64) * factor
        return np.asarray(product.astype("<f4")).view(np.uint8)


def multiply_step(counts: NDArray[np.int16], bits: int) -> NDArray[np.uint8]:
    """Multiply whole numbers by a step.

    Args:
        counts: int16 [n].
        bits: the float32 step as a 32-bit integer.

    Returns:
        uint8 [4 n], the products as float32 [n]. They are computed in double precision.
    """
    with np.errstate(all="ignore"):  # as in `multiply`
        step = np.array([bits], "<u4").view("<f4").astype(np.float64)
        return np.asarray((counts * step).astype("<f4")).view(np.uint8)


def add_steps(old: NDArray[np.uint8], steps: NDArray[np.int16], bits: int) -> NDArray[np.uint8]:
    """Add multiples of a step to float16 numbers.

    Args:
        old: uint8 [2 n], the bytes of float16 [n] from the base.
        steps: int16 [n], the multiples. A multiple of 0 leaves the number unchanged, even a NaN.
        bits: the float32 step as a 32-bit integer.

    Returns:
        uint8 [2 n], the sums as float16 [n]. They are computed in double precision.
    """
    words = old.view("<f2")
    with np.errstate(all="ignore"):  # as in `multiply`
        step = np.array([bits], "<u4").view("<f4").astype(np.float64)
        moved = (words.astype(np.float64) + steps * step).astype("<f2")
    return np.where(steps == 0, words.view("<u2"), moved.view("<u2")).view(np.uint8)


def add_residual(
    old: NDArray[np.uint8], residual: NDArray[np.uint8], kind: RunKind, step: int
) -> NDArray[np.uint8]:
    """Add the stored residual to the predicted bytes of a part of a run.

    Args:
        old: uint8 [n], the predicted bytes, or zeros if there is no prediction.
        residual: uint8 [n / kind.width * kind.residual_width]. The lowest bytes of all words come first, then
            the second lowest bytes of all words, and so on.
        kind: kind of the run.
        step: the float32 step as a 32-bit integer. Only `NEW_MULTIPLES` and `STEPS_16` use it.

    Returns:
        uint8 [n], the bytes of the result.
    """
    if kind.width == 1:
        return np.asarray(old + unfold(residual))
    unsigned = np.dtype(f"<u{kind.residual_width}")
    words = np.ascontiguousarray(residual.reshape(kind.residual_width, -1).T).view(unsigned).ravel()
    if kind is NEW_MULTIPLES:
        return multiply_step(unfold(words).view(np.int16), step)
    if kind is STEPS_16:
        return add_steps(old, unfold(words).view(np.int16), step)
    if kind.is_float:
        unit = unsigned.type(1)
        return np.asarray((words >> unit) | (words << unsigned.type(8 * kind.width - 1))).view(np.uint8)
    return np.asarray(old.view(unsigned) + unfold(words)).view(np.uint8)


def unfold(folded: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Undo the folding of signs: 0, 1, 2, 3 ... become 0, -1, 1, -2 ... in two's complement."""
    unit = folded.dtype.type(1)
    return np.asarray((folded >> unit) ^ (np.zeros_like(folded) - (folded & unit)))
