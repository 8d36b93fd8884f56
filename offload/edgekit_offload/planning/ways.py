"""The ways that run the whole model in one place, and what each sends: raw, uint8, media codecs, deltas.

They are the rivals that a cut must beat. The fair one for photographs is a JPEG, for speech Opus, for a
series of a sensor its differences. Sizes are measured on samples. What the codes stand for is found in the
samples too (`partition.calibrate`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series
from edgekit_offload.partition.coding import RAW, Coding, Lattice
from edgekit_offload.planning.codings import Feeds, compressed_bytes, median_s
from edgekit_offload.planning.costs import MESSAGE_BYTES, TENSOR_BYTES
from edgekit_offload.planning.result import Refusal, SentTensor
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.remote.cut_table import OffloadPlan, PlanCosts
from edgekit_runtime.tensors import Array

RAW_WAY: Final = "raw"
JPEG: Final = "jpeg:90"
WEBP: Final = "webp:80"
OPUS: Final = "opus:24"
_LEAST_PIXELS: Final = 8  # of a side
_CHANNELS: Final = (1, 3)
_LEAST_AUDIO_SAMPLES: Final = 4000
_LEAST_SERIES: Final = 8
_IMAGE_RANK: Final = 4
_SERIES_RANKS: Final = (2, 3)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What whole-model ways have in common.

    Attributes:
        device_s, server_s: time of the whole model on each side.
        output_bytes: of one request, all outputs.
        outputs: how many.
        device_slowdown, server_slowdown: time of that machine as a multiple of this one's, for coding.
    """

    device_s: float
    server_s: float
    output_bytes: float
    outputs: int
    device_slowdown: float
    server_slowdown: float


@dataclass(frozen=True, slots=True)
class UploadWay:
    """A way that uploads the input.

    Attributes:
        plan: with modelled costs.
        sent: what it sends.
        coding: of the head.
    """

    plan: OffloadPlan
    sent: tuple[SentTensor, ...]
    coding: Coding


@dataclass(frozen=True, slots=True)
class _CodedInput:
    """One input in codes.

    Attributes:
        name: of the input; `sent` is the name of its codes.
        coding: what a head does for it.
        codes: of each sample.
        rounding: see `SentTensor`.
    """

    name: str
    sent: str
    coding: Coding
    codes: Sequence[Array]
    rounding: str = ""


def find_uploads(
    feeds: Sequence[Feeds], whole: WholeModel
) -> tuple[tuple[UploadWay, ...], tuple[Refusal, ...]]:
    """Return every way to upload the input that suits its kind, and why the others do not.

    Args:
        feeds: samples, one request each.
        whole: times of the whole model.
    """
    inputs = _Inputs(feeds, whole)
    ways = [inputs.upload(RAW_WAY, None)]
    floats = [name for name, one in feeds[0].items() if one.dtype == np.float32 and one.ndim > 1]
    lattice = find_bytes(_stack(feeds, floats[0])) if len(floats) == 1 else None
    found = [_find_pixels(name, feeds, lattice) for name in feeds[0]]
    pixels = next((one for one in found if one is not None), None)
    coded: list[tuple[str, _CodedInput]] = []
    refusals = []
    if lattice is not None:
        coding = Coding("uint8", {floats[0]: lattice})
        codes = [_code(one[floats[0]], lattice, np.uint8) for one in feeds]
        coded.append(("uint8", _CodedInput(floats[0], f"{floats[0]}.codes", coding, codes)))
    if pixels is not None:
        coded += [(codec, pixels) for codec in (JPEG, WEBP)]
    else:
        refusals.append(
            Refusal("jpeg", "The input does not consist of 8-bit pixels, so no image codec can carry it.")
        )
    if lattice is None and pixels is None and len(floats) == 1:
        coded += _find_series(floats[0], feeds)
    tried = [inputs.try_upload(name, one) for name, one in coded]
    ways += [one for one in tried if isinstance(one, UploadWay)]
    refusals += [one for one in tried if isinstance(one, Refusal)]
    return tuple(ways), tuple(refusals)


class _Inputs:
    """The samples, and what every way to send them has in common."""

    def __init__(self, feeds: Sequence[Feeds], whole: WholeModel) -> None:
        self._raw = {name: float(np.mean([one[name].nbytes for one in feeds])) for name in feeds[0]}
        self._whole = whole

    def try_upload(self, name: str, coded: _CodedInput) -> UploadWay | Refusal:
        """Return the way that sends one input in codes, or why there is none."""
        try:
            return self.upload(name, coded)
        except EdgekitError as cause:  # another shape, or a library that is not installed
            return Refusal(name, f"{cause}.")

    def upload(self, name: str, coded: _CodedInput | None) -> UploadWay:
        """Return the way that sends one input in codes, and the others raw.

        Raises:
            DataError: no such file can be made of it.
            BackendError: the library is not installed.
            CutError: there are several samples in a request.
        """
        sizes = [SentTensor(one, "raw", size, size) for one, size in self._raw.items()]
        encode_s = decode_s = 0.0
        media, saved_bytes, coding = {}, 0.0, RAW
        if coded is not None:
            coding = coded.coding
            if name in (JPEG, WEBP, OPUS):
                media[coded.sent] = name
                size, encode_s, decode_s = _measure_media(name, coded.codes)
            else:
                size = float(np.mean([compressed_bytes(one) for one in coded.codes]))
                if size < coded.codes[0].nbytes:
                    encode_s = decode_s = median_s(lambda: compressed_bytes(coded.codes[0]))
                    saved_bytes = coded.codes[0].nbytes - size
            sizes = [
                SentTensor(one.name, name, one.raw_bytes, size, coded.rounding)
                if one.name == coded.name
                else one
                for one in sizes
            ]
        whole, stem = self._whole, name.replace(":", "")
        upload_bytes = sum(one.sent_bytes for one in sizes) + MESSAGE_BYTES + TENSOR_BYTES * len(sizes)
        has_zstd = saved_bytes > 0
        costs = PlanCosts(
            device_s=encode_s * whole.device_slowdown,
            server_s=whole.server_s + decode_s * whole.server_slowdown,
            upload_bytes=upload_bytes,
            download_bytes=whole.output_bytes + MESSAGE_BYTES + TENSOR_BYTES * whole.outputs,
            plain_bytes=upload_bytes + saved_bytes if has_zstd else None,
            compress_s=encode_s * whole.device_slowdown if has_zstd else 0.0,
            decompress_s=decode_s * whole.server_slowdown if has_zstd else 0.0,
        )
        plan = OffloadPlan(
            name,
            costs,
            head=None if coding.kind == "raw" else f"{stem}.head",
            tail=f"{stem}.tail",
            media=media,
            compression="zstd" if has_zstd else "identity",
        )
        return UploadWay(plan, tuple(sizes), coding)


def _measure_media(codec: str, arrays: Sequence[Array]) -> tuple[float, float, float]:
    """Return the mean size of files, and the times to encode and to decode one on this machine."""
    from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media

    parsed, first = MediaCodec.parse(codec), arrays[0][0]
    if arrays[0].shape[0] != 1:
        raise CutError(f"{codec} carries one sample a request, the model takes {arrays[0].shape[0]} at once")
    files = [encode_media(parsed, one[0]) for one in arrays]
    channels = 1 if first.shape[-1] == 1 else 3
    return (
        float(np.mean([len(one) for one in files])),
        median_s(lambda: encode_media(parsed, first)),
        median_s(lambda: decode_media(parsed, files[0], dtype=first.dtype.name, channels=channels)),
    )


def _find_pixels(name: str, feeds: Sequence[Feeds], lattice: Lattice | None) -> _CodedInput | None:
    """Return an input as pixels uint8 [N, H, W, C], or None where it does not consist of these.

    Floats are pixels where the values of each channel lie on a lattice of at most 256 steps, as they do after
    scaling and normalising.
    """
    first = feeds[0][name]
    if first.ndim != _IMAGE_RANK:
        return None
    is_channels_last = first.shape[-1] in _CHANNELS
    sides = first.shape[1:3] if is_channels_last else first.shape[2:]
    if min(sides) < _LEAST_PIXELS or not (is_channels_last or first.shape[1] in _CHANNELS):
        return None
    if first.dtype == np.uint8 and is_channels_last:
        return _CodedInput(name, name, RAW, [one[name] for one in feeds])
    if first.dtype != np.float32 or lattice is None:
        return None
    codes = [_code(one[name], lattice, np.uint8) for one in feeds]
    if not is_channels_last:
        codes = [np.ascontiguousarray(one.transpose(0, 2, 3, 1)) for one in codes]
    return _CodedInput(name, f"{name}.pixels", Coding("pixels", {name: lattice}), codes)


def _find_series(name: str, feeds: Sequence[Feeds]) -> list[tuple[str, _CodedInput]]:
    """Return an input that is a series as differences, and as sound if it is that."""
    first, found = feeds[0][name], []
    if first.ndim in _SERIES_RANKS and max(first.shape[1:]) >= _LEAST_SERIES:
        lattice = find_series(_stack(feeds, name))
        codes = [_code(one[name], lattice, np.int32) for one in feeds]
        changes = [
            np.diff(one, axis=lattice.time_axis, prepend=one.take([0], lattice.time_axis) * 0)
            for one in codes
        ]
        coding = Coding("delta", {name: lattice})
        codes = [one.astype(np.int16) for one in changes]
        found.append(
            ("delta", _CodedInput(name, f"{name}.codes", coding, codes, _describe_rounding(lattice)))
        )
    is_sound = first.size == first.shape[-1] >= _LEAST_AUDIO_SAMPLES
    if is_sound and max(float(np.abs(one[name]).max()) for one in feeds) <= 1:
        codes = [_code(one[name].reshape(1, -1), SOUND, np.int16) for one in feeds]
        found.append((OPUS, _CodedInput(name, f"{name}.samples", Coding("samples", {name: SOUND}), codes)))
    return found


def _describe_rounding(lattice: Lattice) -> str:
    """Return what codes do to the samples, in words; empty where nothing."""
    if lattice.is_exact:
        return ""
    if lattice.is_grid:
        return "not exact in the last bits of float32"
    return f"not exact: rounded to steps of {lattice.step[0]:.2g}"


def _stack(feeds: Sequence[Feeds], name: str) -> NDArray[np.float32]:
    return np.concatenate([one[name] for one in feeds]).astype(np.float32, copy=False)


def _code(values: Array, lattice: Lattice, dtype: type[np.generic]) -> Array:
    """Return the codes of values, as the nodes of a head compute them."""
    per_axis = [1] * values.ndim
    per_axis[lattice.axis] = len(lattice.step)
    offset, step = (np.reshape(one, per_axis).astype(np.float32) for one in (lattice.offset, lattice.step))
    codes = np.floor((values - offset) / step + np.float32(0.5))
    return np.asarray(np.clip(codes, lattice.lowest, lattice.highest), dtype)
