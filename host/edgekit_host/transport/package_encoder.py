"""Encodes packages for transfer to devices, as deltas from other packages or as independent files.

Both describe a package as a sequence of byte ranges, most of which are tensors of the model. A tensor can
be predicted from the old package. The differences from this prediction are coded with `rans_encoder` or LZMA,
whichever is estimated to be smaller. For small packages, the encoder tries three variants of this estimate
and takes the smallest result.

Source: docs/reference/fleet-deltas.md.
"""

import functools
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_host.transport import rans_encoder
from edgekit_host.transport.tensor_positions import TensorPosition, find_tensors
from edgekit_runtime.agent.artifacts.deltas import (
    BLOCK_BYTES,
    BYTES,
    CODED,
    FIXED_POINT_ONE,
    LITERAL,
    MAGIC,
    MAX_CHANNELS,
    MAX_RUNS,
    NEW_BYTES,
    NEW_FLOAT16,
    NEW_FLOAT32,
    NEW_INT32,
    NEW_MULTIPLES,
    NEW_NOISE,
    PRODUCT,
    SCALED_INT8,
    SCALED_UINT8,
    STEPS_16,
    WORDS_16,
    WORDS_32,
    WORDS_BYTES,
    WORDS_LZMA_MODEL,
    WORDS_MODEL,
    RunKind,
    add_steps,
    list_lzma_filters,
    multiply,
    multiply_step,
    predict,
    read_words,
)
from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import DEFAULT_LIMITS
from edgekit_runtime.package.canonical_zip import read_members
from edgekit_runtime.package.golden import draw_bytes

WORTH: Final = 0.8
"""A coded file or delta is offered only if its size is below this share of the package's size."""
WORDS_END: Final = bytes(range(0xC0, 0xE0))
"""Bytes after the words. The packed words end within them, so they do not depend on what follows."""
_GRAM_BYTES: Final = 8  # shortest piece to copy. A run costs about as many bytes
_RUN_BYTES: Final = 5
_LEAST_TENSOR_BYTES: Final = 16
_CODES_FACTORS: Final = (1.0, 0.8, math.inf)  # of the estimated size of codes. All are tried
_TRIED_PACKAGE_BYTES: Final = 1 << 18  # if larger, only the first factor is tried. Others save 0.1 %
_QUICK_BYTES: Final = 64 << 10  # of a stream that is packed with all models
_TRIMMED_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 8 << 10
_LZMA_END_BYTES: Final = 12
_LZMA_MODELS: Final = (3, 0, 90, 93, 110)  # lc, lp, pb: 3, 0, 0; 0, 0, 0; 0, 0, 2; 3, 0, 2; 2, 2, 2
_LEAST_CODED_WORDS_BYTES: Final = 16 << 10  # planes of smaller tensors change before the tables follow
_HALF_EXPONENTS: Final = (-24, 15)  # of float16
_NOISE_SEEDS: Final = 64  # of golden inputs, one each
_MAX_MULTIPLE: Final = 0x7FFF
_GOLDEN: Final = "golden/"
_TRIED_BYTES: Final = 4 << 10  # of float16 weights that are compared first. Most steps do not fit them
_UNKNOWN_BYTES: Final = 64 << 10  # a larger member without known tensors is compared in place
_MAX_SEARCHED_BYTES: Final = (
    2 << 20
)  # of what is neither tensor nor equal in place. The index takes 100 times that


@dataclass(frozen=True, slots=True)
class _Run:
    """A section of the new package.

    `base` is an offset in the old package, or for a `PRODUCT` in the new package.
    """

    kind: RunKind
    base: int
    begin: int
    length: int
    multipliers: NDArray[np.int32] | None = field(default=None, compare=False)  # computed from other fields
    step: int = 0
    is_coded: bool = False


def encode(base: bytes, package: bytes) -> bytes | None:
    """Return the delta from one package to another, or None if it would exceed the limits of a delta.

    Args:
        base: The old package, which is valid, or empty for an independent file.
        package: The new package, which is valid.
    """
    factors = _CODES_FACTORS[: None if len(package) <= _TRIED_PACKAGE_BYTES else 1]
    try:
        finder = _RunFinder(base, package)
        choices = dict.fromkeys(tuple(finder.find(factor)) for factor in factors)
        pack = functools.cache(_pack)  # choices share streams
        return min((_encode(runs, base, package, pack) for runs in choices), key=len)
    except PackageError:
        return None


def coded_size(package: bytes) -> int:
    """Return the number of bytes that a device without an old version downloads for a package.

    The package is encoded for the download if this saves more than 20 %.
    """
    coded_bytes = len(encode(b"", package) or package)
    return coded_bytes if coded_bytes < WORTH * len(package) else len(package)


def _encode(
    runs: Sequence[_Run], old: bytes, target: bytes, pack: Callable[[bytes], tuple[int, bytes]]
) -> bytes:
    base, new = np.frombuffer(old, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
    control, literals, residuals, expected = bytearray(), bytearray(), bytearray(), 0
    codes = [np.zeros(0, np.uint8)]
    for run in runs:
        control.append(run.kind.number | (CODED if run.is_coded else 0))
        control += pack_number(run.length)
        if run.kind.has_base:
            control += pack_number(_fold_number(run.base - expected))
            expected = run.base
        expected += run.length
        if run.multipliers is not None:
            control += pack_number(len(run.multipliers))
            literals += run.multipliers.astype("<u2").tobytes()
        if run.kind.has_step:
            control += pack_number(run.step)
        if run.kind is LITERAL:
            literals += target[run.begin : run.begin + run.length]
        elif run.is_coded:
            codes.append(_subtract(run, base, new))
        else:
            residuals += _subtract(run, base, new).tobytes()
    packed = [pack(bytes(stream)) for stream in (control, literals, residuals)]
    coded = np.concatenate(codes)
    numbers = [len(base), len(new), len(runs)]
    numbers += [number for model, content in packed for number in (len(content), model)]
    head = b"".join(map(pack_number, (*numbers, len(coded))))
    return b"".join((MAGIC, head, *(content for _, content in packed), rans_encoder.encode(coded)))


def pack_number(number: int) -> bytes:
    """Encode a non-negative number in 7-bit groups, lowest first. Bit 7 is set in all bytes but the last."""
    content = bytearray()
    while number >= 0x80:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*content, number))


def _fold_number(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _pack(data: bytes) -> tuple[int, bytes]:
    """Compress `data` with the best LZMA model, and return the model and the compressed bytes."""
    if not data:
        return 0, b""
    models = _LZMA_MODELS[: None if len(data) <= _QUICK_BYTES else 2 if len(data) <= _TRIMMED_BYTES else 1]
    tries = [(model, _compress(data, model)) for model in models]
    prefix = read_words()
    with_words = _unpack_words(prefix) + data
    packed = _compress(with_words, WORDS_LZMA_MODEL)
    if packed.startswith(prefix):  # not with a version of liblzma that chooses other matches
        tries.append((WORDS_MODEL, packed[len(prefix) :]))
    model, packed = min(tries, key=lambda candidate: len(candidate[1]))
    if model == WORDS_MODEL:
        return model, _trim(prefix + packed, with_words, WORDS_LZMA_MODEL)[len(prefix) :]
    return model, _trim(packed, data, model)


def _unpack_words(packed: bytes) -> bytes:
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=list_lzma_filters(WORDS_LZMA_MODEL))
    return unpacker.decompress(packed, max_length=WORDS_BYTES - len(WORDS_END)) + WORDS_END


def compress(data: bytes, model: int) -> bytes:
    """Return `data` as raw LZMA without its length. `model` sets the parameters, see `list_lzma_filters`."""
    return _trim(_compress(data, model), data, model)


def _compress(data: bytes, model: int) -> bytes:
    # No match reaches further than the data. To clear the tables of a large dictionary takes longer.
    (options,) = list_lzma_filters(model)
    filters = [{**options, "dict_size": min(options["dict_size"], max(_QUICK_BYTES, len(data)))}]
    return lzma.compress(data, lzma.FORMAT_RAW, filters=filters)


def _trim(packed: bytes, data: bytes, model: int) -> bytes:
    """Remove the last bytes of raw LZMA that are not needed to decode `data`."""
    if len(data) > _TRIMMED_BYTES:
        return packed
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=list_lzma_filters(model))
    size = max(0, len(packed) - _LZMA_END_BYTES - 4)
    missing = len(data) - len(unpacker.decompress(packed[:size]))
    while missing:
        missing -= len(unpacker.decompress(packed[size : size + 1]))
        size += 1
    return packed[:size]


def _measure_packed(content: NDArray[np.uint8]) -> float:
    """Return the LZMA size of bytes within a stream. For many bytes, it is extrapolated from a piece."""
    begin = max(0, (len(content) - _SAMPLE_BYTES) // 2)
    piece = content[begin : begin + _SAMPLE_BYTES].tobytes()
    return _measure_piece(piece) * len(content) / len(piece)


@functools.lru_cache(maxsize=256)  # of at most 2 MB; packages of one model share tensors
def _measure_piece(piece: bytes) -> int:
    filters = [{**list_lzma_filters(0)[0], "dict_size": _SAMPLE_BYTES}]
    return max(1, len(lzma.compress(piece, lzma.FORMAT_RAW, filters=filters)) - _LZMA_END_BYTES)


def _estimate_coded(residual: NDArray[np.uint8], width: int) -> float:
    """Estimate the size of at most one block of residuals with adaptive codes for their byte planes."""
    if not len(residual):
        return 0.0
    if width > 1 and len(residual) < _LEAST_CODED_WORDS_BYTES:
        return math.inf
    return sum(_count_bits(plane) for plane in residual.reshape(width, -1)) / 8


def _count_bits(plane: NDArray[np.uint8]) -> float:
    """Return the length of an adaptive code (Krichevsky-Trofimov), and the loss from tables of size 2^14."""
    counts = np.bincount(plane)
    total = len(plane)
    nats = math.lgamma(total + len(counts) / 2) - math.lgamma(len(counts) / 2)
    nats -= sum(math.lgamma(count + 0.5) - math.lgamma(0.5) for count in counts[counts > 0])
    return nats / math.log(2) + 1.44 * total * len(counts) / 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """A run with its estimated sizes, compressed with LZMA and with rANS."""

    run: _Run
    packed_bytes: float
    coded_bytes: float

    def bytes(self, codes_factor: float) -> float:
        return min(self.packed_bytes, codes_factor * self.coded_bytes)


def _estimate(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> _Estimate:
    residual = _subtract(replace(run, length=min(run.length, BLOCK_BYTES)), base, new)
    return _Estimate(
        run=run,
        packed_bytes=_measure_packed(residual),
        coded_bytes=_estimate_coded(residual, run.kind.residual_width),
    )


@dataclass(frozen=True, slots=True)
class _Options:
    """The possible runs for a tensor, and its size in bytes as a literal, if that is allowed."""

    estimates: Sequence[_Estimate]
    literal_bytes: float = math.inf

    def choose(self, codes_factor: float) -> _Run | None:
        """Return the smallest run with its coding, or None if a literal is not larger."""
        best = min(self.estimates, key=lambda estimate: estimate.bytes(codes_factor))
        size = best.bytes(codes_factor)
        if self.literal_bytes <= size + _RUN_BYTES or (
            math.isfinite(self.literal_bytes) and math.isinf(codes_factor)
        ):
            return None
        return replace(best.run, is_coded=size < best.packed_bytes)


def _list_new_runs(tensor: TensorPosition, new: NDArray[np.uint8]) -> _Options:
    """Return the possible runs for a tensor without a base."""
    content = new[tensor.offset : tensor.offset + tensor.length]
    kinds = {1: [NEW_BYTES], 2: [NEW_FLOAT16], 4: [NEW_INT32, NEW_FLOAT32]}[tensor.width]
    zero = 0x80 if tensor.is_signed is False else 0
    runs = [_Run(kind, 0, tensor.offset, tensor.length, step=zero if kind.has_step else 0) for kind in kinds]
    step = _find_step(content) if tensor.width == 4 else 0
    if step:
        runs.append(_Run(NEW_MULTIPLES, 0, tensor.offset, tensor.length, step=step))
    literal_bytes = _measure_packed(new[tensor.offset :][: min(tensor.length, BLOCK_BYTES)])
    return _Options([_estimate(run, new, new) for run in runs], literal_bytes)


@functools.cache
def _draw_noise_heads() -> NDArray[np.uint8]:
    """Return the first noise bytes of each seed."""
    return np.stack([draw_bytes(seed, 0, _GRAM_BYTES) for seed in range(_NOISE_SEEDS)])


def _find_noise(content: NDArray[np.uint8]) -> int | None:
    """Return the seed that generates these bytes, or None."""
    head = content[:_GRAM_BYTES]
    for seed in np.flatnonzero((_draw_noise_heads()[:, : len(head)] == head).all(axis=1)):
        if np.array_equal(draw_bytes(int(seed), 0, len(content)), content):
            return int(seed)
    return None


def _find_step(content: NDArray[np.uint8]) -> int:
    """Find the largest power of two of which all float32 words are small multiples.

    Return its bits, or 0 if there is none.
    """
    floats = np.ascontiguousarray(content).view("<f4")
    if not np.isfinite(floats).all() or not floats.any():
        return 0
    words = floats.astype(np.float64)
    mantissas, exponents = np.frexp(words[words != 0])
    integers = np.abs(mantissas * 2.0**24).astype(np.int64)
    lowest = (exponents - 24 + np.log2(integers & -integers).astype(np.int64)).min()
    step = np.float32(2.0 ** float(lowest))
    bits = int(step.view(np.uint32))
    counts = words / float(step)
    if np.abs(counts).max() > _MAX_MULTIPLE:
        return 0
    return bits if np.array_equal(multiply_step(counts.astype(np.int16), bits), content) else 0


# The runs


class _RunFinder:
    """Finds the runs that make up the new package. Each run is measured once for all factors.

    Raises:
        PackageError: A file is not a package.
    """

    def __init__(self, old: bytes, target: bytes) -> None:
        self._old, self._target = old, target
        self._base_tensors = {tensor.name: tensor for tensor in list_tensors(old)} if old else {}
        self._tensors = {tensor.name: tensor for tensor in list_tensors(target)}
        self._base, self._new = np.frombuffer(old, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
        self._options: dict[tuple[str, tuple[int, int]], _Options] = {}

    def find(self, codes_factor: float) -> list[_Run]:
        """Return the runs in order.

        Args:
            codes_factor: The factor on the estimated size of codes.

        Raises:
            PackageError: Too much of the package is unknown.
        """
        matched: list[_Run] = []
        matched_old: list[tuple[int, int]] = []
        end, factors = 0, (0, 0)  # offset and length of the words before, as the device has them
        for tensor in self._tensors.values():
            if tensor.offset < end or tensor.length < _LEAST_TENSOR_BYTES or tensor.length % tensor.width:
                continue
            key = tensor.name, factors
            if key not in self._options:
                self._options[key] = self._list_runs(tensor, factors)
            run = self._options[key].choose(codes_factor)
            if run is None:
                continue
            if run.kind.has_base and (twin := self._find_twin(tensor)):
                matched_old.append((twin.offset, twin.length))
            matched.append(run)
            end = tensor.offset + tensor.length
            if tensor.width == 4:
                factors = (tensor.offset, tensor.length if tensor.length <= BLOCK_BYTES else 0)
        runs = sorted([*matched, *self._fill(matched, matched_old)], key=lambda run: run.begin)
        if len(runs) > MAX_RUNS:
            raise PackageError("the package has too many pieces")
        return runs

    def _find_twin(self, tensor: TensorPosition) -> TensorPosition | None:
        twin = self._base_tensors.get(tensor.name)
        is_alike = twin is not None and (twin.length, twin.width) == (tensor.length, tensor.width)
        return twin if is_alike else None

    def _list_runs(self, tensor: TensorPosition, factors: tuple[int, int]) -> _Options:
        base, new = self._base, self._new
        seed = _find_noise(new[tensor.offset : tensor.offset + tensor.length]) if tensor.width == 1 else None
        if seed is not None:
            run = _Run(NEW_NOISE, 0, tensor.offset, tensor.length, step=seed)
            return _Options([_Estimate(run=run, packed_bytes=0, coded_bytes=math.inf)])
        twin = self._find_twin(tensor)
        if twin is None:
            return _list_new_runs(tensor, new)
        scales = (
            None
            if tensor.scale not in self._tensors or twin.scale not in self._base_tensors
            else (
                _read_floats(self._base_tensors[twin.scale], base),
                _read_floats(self._tensors[tensor.scale], new),
            )
        )
        runs = [_choose_run(tensor, twin, base, new, scales), *_find_products(tensor, factors, new)]
        return _Options([_estimate(min(runs, key=lambda run: _estimate_bytes(run, base, new)), base, new)])

    def _fill(self, matched: Sequence[_Run], matched_old: list[tuple[int, int]]) -> Iterator[_Run]:
        """Yield the runs between those of the tensors."""
        gaps = list(_list_gaps([(run.begin, run.length) for run in matched], len(self._target)))
        if not self._old:
            yield from (_Run(LITERAL, 0, begin, length) for begin, length in gaps)
            return
        if sum(length for _, length in gaps) > _MAX_SEARCHED_BYTES:
            raise PackageError("too much of the package is unknown")
        copier = _Copier(self._old, list(_list_gaps(sorted(matched_old), len(self._old))))
        for begin, length in gaps:
            yield from copier.find(self._target, begin, length)


def list_tensors(package: bytes) -> Iterator[TensorPosition]:
    """Yield the tensors in a package. Each golden file and each other large file counts as one tensor."""
    view = memoryview(package)
    for member in read_members(view, "package", DEFAULT_LIMITS.max_members):
        tensors = find_tensors(view[member.payload_offset : member.end_offset], member.name)
        if not tensors and member.size_bytes > _UNKNOWN_BYTES and not member.name.startswith(_GOLDEN):
            yield TensorPosition(
                name=member.name, offset=member.payload_offset, length=member.size_bytes, width=1
            )
        if member.name.startswith(_GOLDEN):
            yield TensorPosition(
                name=member.name,
                offset=member.payload_offset,
                length=member.size_bytes,
                width=1 if "input" in member.name or member.size_bytes % 4 else 4,
            )
        for tensor in tensors:
            yield replace(
                tensor,
                name=f"{member.name}/{tensor.name}",
                scale=tensor.scale and f"{member.name}/{tensor.scale}",
                offset=member.payload_offset + tensor.offset,
            )


def _list_gaps(ranges: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and length of each gap between sorted `ranges`."""
    position = 0
    for begin, length in (*ranges, (end, 0)):
        if begin > position:
            yield position, begin - position
        position = max(position, begin + length)


class _Copier:
    """Finds pieces of the new package in the unmatched parts of the old one."""

    def __init__(self, old: bytes, gaps: list[tuple[int, int]]) -> None:
        self._old, self._shift = old, 0
        self._positions: dict[bytes, int] = {}
        if sum(length for _, length in gaps) <= _MAX_SEARCHED_BYTES:
            for begin, length in gaps:
                for offset in range(begin, begin + length - _GRAM_BYTES + 1):
                    self._positions.setdefault(old[offset : offset + _GRAM_BYTES], offset)

    def find(self, new: bytes, begin: int, length: int) -> Iterator[_Run]:
        position = unknown = begin
        end = begin + length
        while position < end:
            old_position = self._locate(new[position : min(end, position + _GRAM_BYTES)], position)
            if old_position is None:
                position += 1
                continue
            same = _GRAM_BYTES
            while position + same < end and old_position + same < len(self._old):
                if new[position + same] != self._old[old_position + same]:
                    break
                same += 1
            if unknown < position:
                yield _Run(LITERAL, 0, unknown, position - unknown)
            yield _Run(BYTES, old_position, position, same)
            self._shift = old_position - position
            position = unknown = position + same
        if unknown < end:
            yield _Run(LITERAL, 0, unknown, end - unknown)

    def _locate(self, gram: bytes, position: int) -> int | None:
        expected = position + self._shift
        if len(gram) < _GRAM_BYTES:
            return None
        if expected >= 0 and self._old[expected : expected + _GRAM_BYTES] == gram:
            return expected
        return self._positions.get(gram)


# Tensors


def _choose_run(
    tensor: TensorPosition,
    twin: TensorPosition,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    scales: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
) -> _Run:
    """Return the run of a tensor with the smallest estimated size.

    `scales` contains the old and the new scales, if known.
    """
    kind = {1: BYTES, 2: WORDS_16, 4: WORDS_32}[tensor.width]
    plain = _Run(kind, twin.offset, tensor.offset, tensor.length)
    if tensor.width == 2:
        steps = _find_steps(tensor, twin, base, new)
        return min((plain, *steps), key=lambda run: _estimate_bytes(run, base, new))
    if tensor.is_signed is None:
        return plain
    kind = SCALED_INT8 if tensor.is_signed else SCALED_UINT8
    tries = [plain]
    for step, channels in _list_layouts(tensor.shape, tensor.length):
        multipliers = _fit(tensor, twin, base, new, step, channels)
        tries.append(_Run(kind, twin.offset, tensor.offset, tensor.length, multipliers, step))
        if scales is not None and len(scales[0]) == len(scales[1]) == channels:
            with np.errstate(all="ignore"):
                ratio = np.nan_to_num(FIXED_POINT_ONE * scales[0] / scales[1])
            multipliers = _as_multipliers(ratio)
            tries.append(_Run(kind, twin.offset, tensor.offset, tensor.length, multipliers, step))
    return min(tries, key=lambda run: _estimate_bytes(run, base, new))


def _find_steps(
    tensor: TensorPosition, twin: TensorPosition, base: NDArray[np.uint8], new: NDArray[np.uint8]
) -> Iterator[_Run]:
    """Yield the run with the largest step by which all float16 weights changed, if there is one."""
    least, most = (4 * exponent for exponent in _HALF_EXPONENTS)
    for quarter in range(most, least - 1, -1):
        bits = int(np.float32(2.0 ** (quarter / 4)).view(np.uint32))  # as `edgekit package --like` steps
        run = _Run(STEPS_16, twin.offset, tensor.offset, tensor.length, step=bits)
        if all(_has_steps(run, base, new, length) for length in (_TRIED_BYTES, tensor.length)):
            yield run
            return


def _has_steps(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8], length: int) -> bool:
    """Return whether a device reproduces the first `length` bytes of a run."""
    old, new_words = _read_pair(replace(run, length=min(length, run.length)), base, new)
    return np.array_equal(add_steps(old, _count_steps(old, new_words, run.step), run.step), new_words)


def _count_steps(old: NDArray[np.uint8], new: NDArray[np.uint8], bits: int) -> NDArray[np.int16]:
    """Return the number of steps between float16 words. It is meaningless if there are too many."""
    step = np.array([bits], "<u4").view("<f4").astype(np.float64)
    with np.errstate(all="ignore"):
        change = new.view("<f2").astype(np.float64) - old.view("<f2")
        counts = np.nan_to_num(np.rint(change / step))
    return np.asarray(np.clip(counts, -0x7FFF, 0x7FFF).astype(np.int16))


def _find_products(
    tensor: TensorPosition, factors: tuple[int, int], new: NDArray[np.uint8]
) -> Iterator[_Run]:
    """Yield runs that compute a tensor from the words before it, such as bias scales from weight scales."""
    offset, length = factors
    if (tensor.width, tensor.length) != (4, length):
        return
    before, product = (
        np.ascontiguousarray(new[begin : begin + length]).view("<f4").astype(np.float64)
        for begin in (offset, tensor.offset)
    )
    with np.errstate(all="ignore"):
        ratio = np.float32(np.median(product / before))
    if np.isfinite(ratio) and ratio:
        for factor in (ratio, np.nextafter(ratio, np.float32(0)), np.nextafter(ratio, np.float32(np.inf))):
            yield _Run(PRODUCT, offset, tensor.offset, length, step=int(factor.view(np.uint32)))


def _list_layouts(shape: tuple[int, ...], length: int) -> Iterator[tuple[int, int]]:
    """Yield the step and channel count of each layout.

    The layouts are one channel, and channels along the first or the last axis.
    """
    yield length, 1
    if len(shape) > 1 and 1 < shape[0] <= MAX_CHANNELS:
        yield length // shape[0], shape[0]
    if len(shape) > 1 and 1 < shape[-1] <= MAX_CHANNELS:
        yield 1, shape[-1]


def _fit(
    tensor: TensorPosition,
    twin: TensorPosition,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    step: int,
    channels: int,
) -> NDArray[np.int32]:
    """Return the multiplier of each channel with the least squared error."""
    flip = 0 if tensor.is_signed else 0x80

    def read(content: NDArray[np.uint8], offset: int) -> NDArray[np.float64]:
        flat = (content[offset : offset + tensor.length] ^ np.uint8(flip)).view(np.int8)
        return np.asarray(flat.reshape(-1, channels, step).astype(np.float64))

    old, new_floats = read(base, twin.offset), read(new, tensor.offset)
    power = (old * old).sum(axis=(0, 2))
    ratio = np.divide((old * new_floats).sum(axis=(0, 2)), power, out=np.ones(channels), where=power > 0)
    return _as_multipliers(ratio * FIXED_POINT_ONE)


def _as_multipliers(ratio: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.asarray(np.clip(np.rint(ratio), 0, 0xFFFF).astype(np.int32))


def _read_floats(tensor: TensorPosition, content: NDArray[np.uint8]) -> NDArray[np.float64]:
    begin, end = tensor.offset, tensor.offset + tensor.length // 4 * 4
    return np.ascontiguousarray(content[begin:end]).view("<f4").astype(np.float64)


def _estimate_bytes(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> float:
    """Estimate the size with an ideal entropy coder that uses only byte frequencies."""
    counts = np.bincount(_subtract(run, base, new), minlength=256)
    shares = counts[counts > 0] / run.length
    bits = run.length * -float((shares * np.log2(shares)).sum())
    channels = 0 if run.multipliers is None else len(run.multipliers)
    return bits / 8 + 1.5 * channels


def _read_pair(
    run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the predicted and the actual bytes of a run."""
    new_words = np.ascontiguousarray(new[run.begin : run.begin + run.length])
    if run.kind is PRODUCT:
        return multiply(new[run.base : run.base + run.length].tobytes(), run.step), new_words
    if not run.kind.has_base:
        return np.full(run.length, run.step if run.kind is NEW_BYTES else 0, np.uint8), new_words
    old = np.ascontiguousarray(base[run.base : run.base + run.length])
    if run.multipliers is not None:
        old = predict(old, run.multipliers, run.step, 0, is_signed=run.kind is SCALED_INT8)
    return old, new_words


def _subtract(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the residual of a run, which `add_residual` adds on the device."""
    if run.kind is NEW_NOISE:
        return np.zeros(0, np.uint8)
    old, new_words = _read_pair(run, base, new)
    width = run.kind.residual_width
    if run.kind.width == 1:
        return _fold(new_words - old)
    unsigned = np.dtype(f"<u{width}")
    if run.kind is NEW_MULTIPLES:
        step = np.array([run.step], "<u4").view("<f4")
        folded = _fold((new_words.view("<f4") / step).astype(np.int16).view(unsigned))
    elif run.kind is STEPS_16:
        folded = _fold(_count_steps(old, new_words, run.step).view(unsigned))
    elif run.kind.is_float:
        word = new_words.view(unsigned)
        folded = (word << unsigned.type(1)) | (word >> unsigned.type(8 * width - 1))
    else:
        folded = _fold(new_words.view(unsigned) - old.view(unsigned))
    words = BLOCK_BYTES // run.kind.width
    blocks = (folded[start : start + words] for start in range(0, len(folded), words))
    return np.concatenate([block.view(np.uint8).reshape(-1, width).T.ravel() for block in blocks])


def _fold(difference: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the zigzag code, which maps 0, -1, 1, -2 to 0, 1, 2, 3 (modulo the type)."""
    kind = difference.dtype
    unit = kind.type(1)
    sign = np.zeros_like(difference) - (difference >> kind.type(8 * kind.itemsize - 1))
    return np.asarray((difference << unit) ^ sign)
