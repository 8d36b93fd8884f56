"""Deltas: small files that turn one package into another one.

Two deltas are made and the smaller one is kept: zstd with the old package as dictionary, and runs over the
tensors of the model, which encode differences of int8 weights well even if nearly every byte has changed. A
delta is used only after it has made the package here, byte for byte, as a device will.

Source: docs/reference/fleet-deltas.md.
"""

import lzma
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from edgekit_fleet.releases.tensor_positions import TensorPosition, find_tensors
from edgekit_runtime.agent.artifacts.deltas import (
    BLOCK_BYTES,
    BYTES,
    HEAD,
    LITERAL,
    LZMA_FILTERS,
    MAGIC,
    MAX_CHANNELS,
    MAX_RUNS,
    MAX_ZSTD_BYTES,
    ONE,
    PRODUCT,
    RUN,
    RUNS_SUFFIX,
    SCALED_INT8,
    SCALED_UINT8,
    STEPS_16,
    WIDTHS,
    WORDS_16,
    WORDS_32,
    ZSTD_SUFFIX,
    add_steps,
    apply_delta,
    multiply,
    predict,
)
from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import DEFAULT_LIMITS
from edgekit_runtime.package.canonical_zip import read_members
from edgekit_runtime.system.atomic_files import hash_file

_WORTH: Final = 0.8
"""A delta that is larger than this share of the package is not offered."""
_GRAM_BYTES: Final = 8  # shortest piece to copy; a run costs about as many bytes
_LEAST_TENSOR_BYTES: Final = 16
_QUICK_BYTES: Final = 4 << 20  # of a stream that is packed several times, a second each
_HALF_EXPONENTS: Final = (-24, 15)  # of float16
_TRIED_BYTES: Final = 4 << 10  # of float16 weights; most steps do not fit even those
_UNKNOWN_BYTES: Final = 64 << 10  # a larger member without known tensors is compared in place
_MAX_SEARCHED_BYTES: Final = (
    2 << 20
)  # of what is neither tensor nor equal in place; the index takes 100 x that


@dataclass(frozen=True, slots=True)
class _Run:
    """A stretch of the new package; see `RUN`. `base` is an offset; for a `PRODUCT`, in the new package."""

    kind: int
    base: int
    begin: int
    length: int
    multipliers: NDArray[np.int32] | None = None
    step: int = 0


def make_delta(base: Path, new: Path) -> tuple[str, bytes] | None:
    """Return suffix and content of the smallest delta from one package to another; None if none pays off.

    Args:
        base: the old package; it is valid.
        new: the package to make from it; it is valid.

    Raises:
        OSError: a package cannot be read.
    """
    old, target = base.read_bytes(), new.read_bytes()
    makers = [
        (RUNS_SUFFIX, _make_runs_delta(old, target)),
        (ZSTD_SUFFIX, _make_zstd_delta(old, target)),
    ]
    candidates = [
        (suffix, content)
        for suffix, content in makers
        if content is not None and len(content) < _WORTH * len(target)
    ]
    for suffix, content in sorted(candidates, key=lambda candidate: len(candidate[1])):
        if _is_exact(content, base, new):
            return suffix, content
    return None


def _is_exact(content: bytes, base: Path, new: Path) -> bool:
    with tempfile.TemporaryDirectory(prefix="edgekit-delta-") as folder:
        delta, rebuilt = Path(folder) / "delta", Path(folder) / "made"
        delta.write_bytes(content)
        size_bytes, sha256 = new.stat().st_size, hash_file(new)
        try:
            apply_delta(delta, base, rebuilt, size_bytes=size_bytes, sha256=sha256, stop=threading.Event())
        except PackageError:
            return False
    return True


def _make_zstd_delta(old: bytes, new: bytes) -> bytes | None:
    if len(old) + len(new) > MAX_ZSTD_BYTES:
        return None
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19,
        source_size=len(new),
        dict_size=len(old),
        window_log=max(10, (len(old) + len(new)).bit_length()),
        enable_ldm=True,
        write_checksum=False,
    )
    dictionary = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return zstandard.ZstdCompressor(compression_params=parameters, dict_data=dictionary).compress(new)


def _make_runs_delta(old: bytes, target: bytes) -> bytes | None:
    try:
        runs = _find_runs(old, target)
    except PackageError:
        return None
    if len(runs) > MAX_RUNS:
        return None
    base, new = np.frombuffer(old, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
    control, literals, residuals, expected = bytearray(), bytearray(), bytearray(), 0
    for run in runs:
        channels = 0 if run.multipliers is None else len(run.multipliers)
        old_begin = expected if run.kind in (LITERAL, PRODUCT) else run.base
        control += RUN.pack(run.kind, (old_begin - expected) & 0xFFFFFFFF, run.length, channels, run.step)
        expected = old_begin + run.length
        if run.multipliers is not None:
            literals += run.multipliers.astype("<u2").tobytes()
        if run.kind == LITERAL:
            literals += target[run.begin : run.begin + run.length]
        else:
            residuals += _subtract(run, base, new).tobytes()
    packed = [_pack(bytes(stream)) for stream in (control, literals, residuals)]
    head = HEAD.pack(MAGIC, len(old), len(target), len(runs), len(packed[0]), len(packed[1]))
    return b"".join((head, *packed))


def _pack(data: bytes) -> bytes:
    """Return `data` as LZMA2, packed with the best of a few literal models, which its chunks name."""
    models = ((0, 0, 0), (3, 0, 0), (0, 0, 2), (2, 2, 2))[: 4 if len(data) <= _QUICK_BYTES else 1]
    tries = [
        lzma.compress(data, lzma.FORMAT_RAW, filters=[{**LZMA_FILTERS[0], "lc": lc, "lp": lp, "pb": pb}])
        for lc, lp, pb in models
    ]
    return min(tries, key=len)


# The runs


def _find_runs(old: bytes, target: bytes) -> list[_Run]:
    """Return the runs of which the new package consists, in order.

    Raises:
        PackageError: one file is no package, or too much of it is unknown.
    """
    base_tensors = {tensor.name: tensor for tensor in _list_tensors(old)}
    tensors = {tensor.name: tensor for tensor in _list_tensors(target)}
    base, new = np.frombuffer(old, dtype=np.uint8), np.frombuffer(target, dtype=np.uint8)
    matched: list[_Run] = []
    matched_old: list[tuple[int, int]] = []
    end, factors = 0, (0, 0)  # offset and length of the words before, as the device has them
    for tensor in tensors.values():
        twin = base_tensors.get(tensor.name)
        if twin is None or (twin.length, twin.width) != (tensor.length, tensor.width):
            continue
        if tensor.offset < end or tensor.length < _LEAST_TENSOR_BYTES:
            continue
        scales = (
            None
            if tensor.scale not in tensors or twin.scale not in base_tensors
            else (_read_floats(base_tensors[twin.scale], base), _read_floats(tensors[tensor.scale], new))
        )
        runs = [_choose_run(tensor, twin, base, new, scales), *_find_products(tensor, factors, new)]
        matched.append(min(runs, key=lambda run: _estimate_bytes(run, base, new)))
        matched_old.append((twin.offset, twin.length))
        end = tensor.offset + tensor.length
        if tensor.width == 4:
            factors = (tensor.offset, tensor.length if tensor.length <= BLOCK_BYTES else 0)
    gaps = list(_list_gaps([(run.begin, run.length) for run in matched], len(target)))
    old_rest = list(_list_gaps(sorted(matched_old), len(old)))
    copier = _Copier(old, old_rest)
    if sum(length for _, length in gaps) > _MAX_SEARCHED_BYTES:
        raise PackageError("too much of the package is unknown")
    runs = [*matched, *(run for begin, length in gaps for run in copier.find(target, begin, length))]
    return sorted(runs, key=lambda run: run.begin)


def _list_tensors(package: bytes) -> Iterator[TensorPosition]:
    """Yield the tensors of all models of a package, and large other members as if they were one."""
    view = memoryview(package)
    for member in read_members(view, "package", DEFAULT_LIMITS.max_members):
        tensors = find_tensors(view[member.payload_offset : member.end_offset], member.name)
        if not tensors and member.size_bytes > _UNKNOWN_BYTES:
            yield TensorPosition(
                name=member.name, offset=member.payload_offset, length=member.size_bytes, width=1
            )
        for tensor in tensors:
            yield replace(
                tensor,
                name=f"{member.name}/{tensor.name}",
                scale=tensor.scale and f"{member.name}/{tensor.scale}",
                offset=member.payload_offset + tensor.offset,
            )


def _list_gaps(ranges: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """Yield begin and length of the gaps between `taken`, which is sorted."""
    position = 0
    for begin, length in (*ranges, (end, 0)):
        if begin > position:
            yield position, begin - position
        position = max(position, begin + length)


class _Copier:
    """Finds pieces of the new package in the rest of the old one."""

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
    """Return the run of a tensor that is expected to pack best; `scales` are of both versions, if known."""
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
        multipliers = _fit(tensor, twin, base, new, (step, channels))
        tries.append(_Run(kind, twin.offset, tensor.offset, tensor.length, multipliers, step))
        if scales is not None and len(scales[0]) == len(scales[1]) == channels:
            with np.errstate(all="ignore"):
                ratio = np.nan_to_num(ONE * scales[0] / scales[1])
            multipliers = _as_multipliers(ratio)
            tries.append(_Run(kind, twin.offset, tensor.offset, tensor.length, multipliers, step))
    return min(tries, key=lambda run: _estimate_bytes(run, base, new))


def _find_steps(
    tensor: TensorPosition, twin: TensorPosition, base: NDArray[np.uint8], new: NDArray[np.uint8]
) -> Iterator[_Run]:
    """Yield the run with the largest step by which all float16 weights have changed, if there is one."""
    least, most = (4 * exponent for exponent in _HALF_EXPONENTS)
    for quarter in range(most, least - 1, -1):
        bits = int(np.float32(2.0 ** (quarter / 4)).view(np.uint32))  # as `edgekit package --like` steps
        run = _Run(STEPS_16, twin.offset, tensor.offset, tensor.length, step=bits)
        if all(_has_steps(run, base, new, length) for length in (_TRIED_BYTES, tensor.length)):
            yield run
            return


def _has_steps(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8], length: int) -> bool:
    """Return whether the device makes the first `length` bytes of a run."""
    old, new_words = _read_pair(replace(run, length=min(length, run.length)), base, new)
    return np.array_equal(add_steps(old, _count_steps(old, new_words, run.step), run.step), new_words)


def _count_steps(old: NDArray[np.uint8], new: NDArray[np.uint8], bits: int) -> NDArray[np.int16]:
    """Return how many steps lie between float16 words; meaningless if there are too many."""
    step = np.array([bits], "<u4").view("<f4").astype(np.float64)
    with np.errstate(all="ignore"):
        change = new.view("<f2").astype(np.float64) - old.view("<f2")
        counts = np.nan_to_num(np.rint(change / step))
    return np.asarray(np.clip(counts, -0x7FFF, 0x7FFF).astype(np.int16))


def _find_products(
    tensor: TensorPosition, factors: tuple[int, int], new: NDArray[np.uint8]
) -> Iterator[_Run]:
    """Yield the runs that compute a tensor from words before it, as scales of a bias from weight scales."""
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
    """Yield step and number of channels: one for all, along the first axis, along the last."""
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
    layout: tuple[int, int],
) -> NDArray[np.int32]:
    """Return the multiplier of each channel with the least squared error."""
    step, channels = layout
    flip = 0 if tensor.is_signed else 0x80

    def read(content: NDArray[np.uint8], offset: int) -> NDArray[np.float64]:
        flat = (content[offset : offset + tensor.length] ^ np.uint8(flip)).view(np.int8)
        return np.asarray(flat.reshape(-1, channels, step).astype(np.float64))

    old, new_floats = read(base, twin.offset), read(new, tensor.offset)
    power = (old * old).sum(axis=(0, 2))
    ratio = np.divide((old * new_floats).sum(axis=(0, 2)), power, out=np.ones(channels), where=power > 0)
    return _as_multipliers(ratio * ONE)


def _as_multipliers(ratio: NDArray[np.float64]) -> NDArray[np.int32]:
    return np.asarray(np.clip(np.rint(ratio), 0, 0xFFFF).astype(np.int32))


def _read_floats(tensor: TensorPosition, content: NDArray[np.uint8]) -> NDArray[np.float64]:
    begin, end = tensor.offset, tensor.offset + tensor.length // 4 * 4
    return np.ascontiguousarray(content[begin:end]).view("<f4").astype(np.float64)


def _estimate_bytes(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> float:
    """Return the size after an ideal entropy coder that knows only the frequency of each byte."""
    counts = np.bincount(_subtract(run, base, new), minlength=256)
    shares = counts[counts > 0] / run.length
    bits = run.length * -float((shares * np.log2(shares)).sum())
    channels = 0 if run.multipliers is None else len(run.multipliers)
    return bits / 8 + 1.5 * channels


def _read_pair(
    run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the prediction of a run, and the bytes that it makes."""
    old, new_words = (
        np.ascontiguousarray(content[begin : begin + run.length])
        for content, begin in ((base, run.base), (new, run.begin))
    )
    if run.multipliers is not None:
        old = predict(old, run.multipliers, run.step, 0, is_signed=run.kind == SCALED_INT8)
    if run.kind == PRODUCT:
        old = multiply(new[run.base : run.base + run.length].tobytes(), run.step)
    return old, new_words


def _subtract(run: _Run, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the residual that `add_residual` on the device adds."""
    old, new_words = _read_pair(run, base, new)
    width = WIDTHS[run.kind]
    if width == 1:
        return _fold(new_words - old)
    unsigned = np.dtype(f"<u{width}")
    if run.kind == STEPS_16:
        folded = _fold(_count_steps(old, new_words, run.step).view(unsigned))
    else:
        folded = _fold(new_words.view(unsigned) - old.view(unsigned))
    words = BLOCK_BYTES // width
    blocks = (folded[start : start + words] for start in range(0, len(folded), words))
    return np.concatenate([block.view(np.uint8).reshape(-1, width).T.ravel() for block in blocks])


def _fold(difference: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return the zigzag code: 0, -1, 1, -2 ... become 0, 1, 2, 3 ... (modulo the type)."""
    kind = difference.dtype
    unit = kind.type(1)
    sign = np.zeros_like(difference) - (difference >> kind.type(8 * kind.itemsize - 1))
    return np.asarray((difference << unit) ^ sign)
