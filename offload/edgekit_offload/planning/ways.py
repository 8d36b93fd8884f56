"""The ways that run the whole model in one place, and what each sends: raw, uint8, media codecs, deltas.

They are the rivals that a cut must beat. The fair one for photographs is a JPEG, for speech Opus, for a
series of a sensor its differences. Sizes are measured on samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

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
_CODES: Final = 256
_LATTICE_ERROR: Final = 0.02  # of a step: what float32 and normalisation leave
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
        coding: of the head: raw, uint8 or delta.
        whole_s: time of the whole model on the server, which is in the costs.
    """

    plan: OffloadPlan
    sent: tuple[SentTensor, ...]
    coding: str
    whole_s: float


def find_uploads(
    feeds: Sequence[Feeds], whole: WholeModel
) -> tuple[tuple[UploadWay, ...], tuple[Refusal, ...]]:
    """Return every way to upload the input that suits its kind, and why the others do not.

    Args:
        feeds: samples, one request each.
        whole: times of the whole model.
    """
    ways = [_upload(RAW_WAY, "raw", _mean_sizes(feeds, "raw"), whole, coded_s=(0.0, 0.0))]
    refusals = []
    pixels = _find_pixels(feeds)
    if pixels is None:
        refusals.append(
            Refusal("jpeg", "The input does not consist of 8-bit pixels, so no image codec can carry it.")
        )
    else:
        name, images = pixels
        ways.append(_coded_input("uint8", name, images, feeds, whole))
        tried = [_try_media(codec, name, images, feeds, whole) for codec in (JPEG, WEBP)]
        ways += [one for one in tried if isinstance(one, UploadWay)]
        refusals += [one for one in tried if isinstance(one, Refusal)]
    series = None if pixels is not None else _find_series(feeds)
    if series is not None:
        name, codes = series
        ways.append(_coded_input("delta", name, codes, feeds, whole))
        if codes[0].shape[-1] >= _LEAST_AUDIO_SAMPLES and codes[0].size == codes[0].shape[-1]:
            one = _try_media(OPUS, name, _as_audio(name, feeds), feeds, whole)
            if isinstance(one, UploadWay):
                ways.append(one)
            else:
                refusals.append(one)
    return tuple(ways), tuple(refusals)


def _upload(
    name: str,
    coding: str,
    sizes: tuple[SentTensor, ...],
    whole: WholeModel,
    *,
    coded_s: tuple[float, float],
    media: dict[str, str] | None = None,
) -> UploadWay:
    upload = sum(one.sent_bytes for one in sizes) + MESSAGE_BYTES + TENSOR_BYTES * len(sizes)
    has_zstd = not media and any(one.sent_bytes < one.raw_bytes and one.coding != "uint8" for one in sizes)
    plan = OffloadPlan(
        name,
        PlanCosts(
            device_s=coded_s[0] * whole.device_slowdown,
            server_s=whole.server_s + coded_s[1] * whole.server_slowdown,
            upload_bytes=upload,
            download_bytes=whole.output_bytes + MESSAGE_BYTES + TENSOR_BYTES * whole.outputs,
        ),
        tail=f"{name}.tail",
        media=media or {},
        compression="zstd" if has_zstd else "identity",
    )
    return UploadWay(plan, sizes, coding, whole.server_s)


def _mean_sizes(feeds: Sequence[Feeds], coding: str) -> tuple[SentTensor, ...]:
    """Return what the inputs take as they are."""
    return tuple(
        SentTensor(name, coding, size := float(np.mean([one[name].nbytes for one in feeds])), size)
        for name in feeds[0]
    )


def _coded_input(
    coding: str, name: str, codes: Sequence[Array], feeds: Sequence[Feeds], whole: WholeModel
) -> UploadWay:
    """Return the way that sends one input in codes, the others raw."""
    size = float(np.mean([compressed_bytes(one) for one in codes]))
    spent_s = median_s(lambda: compressed_bytes(codes[0]))
    sizes = tuple(
        SentTensor(name, coding, one.raw_bytes, size) if one.name == name else one
        for one in _mean_sizes(feeds, "raw")
    )
    return _upload(coding, coding, sizes, whole, coded_s=(spent_s, spent_s))


def _try_media(
    codec: str, name: str, arrays: Sequence[Array], feeds: Sequence[Feeds], whole: WholeModel
) -> UploadWay | Refusal:
    try:
        return _media(codec, name, arrays, feeds, whole)
    except EdgekitError as cause:  # another shape, or a library that is not installed
        return Refusal(codec, f"{cause}.")


def _media(
    codec: str, name: str, arrays: Sequence[Array], feeds: Sequence[Feeds], whole: WholeModel
) -> UploadWay:
    """Return the way that sends one input as a media file; its tail is a model that decodes first."""
    from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media

    parsed = MediaCodec.parse(codec)
    if arrays[0].shape[0] != 1:
        raise CutError(f"{codec} carries one sample a request, the model takes {arrays[0].shape[0]} at once")
    encoded = [encode_media(parsed, one[0]) for one in arrays]
    encode_s = median_s(lambda: encode_media(parsed, arrays[0][0]))
    decode_s = median_s(lambda: decode_media(parsed, encoded[0], dtype=arrays[0].dtype.name))
    size = float(np.mean([len(one) for one in encoded]))
    sizes = tuple(
        SentTensor(name, codec, one.raw_bytes, size) if one.name == name else one
        for one in _mean_sizes(feeds, "raw")
    )
    return _upload(codec, "uint8", sizes, whole, coded_s=(encode_s, decode_s), media={name: codec})


def _find_pixels(feeds: Sequence[Feeds]) -> tuple[str, list[NDArray[np.uint8]]] | None:
    """Return the input that consists of 8-bit pixels, with the pixels uint8 [N, H, W, C], or None.

    Floats are pixels where the values of each channel lie on a lattice of at most 256 steps, as they do after
    scaling and normalising.
    """
    for name, first in feeds[0].items():
        if first.ndim != _IMAGE_RANK:
            continue
        channels_last = first.shape[-1] in _CHANNELS
        if not channels_last and first.shape[1] not in _CHANNELS:
            continue
        images = [one[name] if channels_last else one[name].transpose(0, 2, 3, 1) for one in feeds]
        if min(images[0].shape[1:3]) < _LEAST_PIXELS:
            continue
        if first.dtype == np.uint8:
            return name, [np.ascontiguousarray(one, np.uint8) for one in images]
        if first.dtype.kind != "f":
            continue
        lattices = [_find_lattice([one[..., c] for one in images]) for c in range(images[0].shape[-1])]
        known = [one for one in lattices if one is not None]
        if len(known) < len(lattices):
            continue
        low, step = np.array(known).T
        return name, [np.clip(np.rint((one - low) / step), 0, _CODES - 1).astype(np.uint8) for one in images]
    return None


def _find_lattice(arrays: Sequence[Array]) -> tuple[float, float] | None:
    """Return the smallest value and the step of values that have at most 256 equidistant levels."""
    values = np.unique(np.concatenate([np.unique(one) for one in arrays]).astype(np.float64))
    if len(values) == 1:
        return float(values[0]), 1.0
    spread = float(values[-1] - values[0])
    gaps = np.diff(values)
    real = gaps[gaps > spread / _CODES / 2]  # smaller gaps are rounding
    if not len(real):
        return None
    step = spread / max(round(spread / float(real.min())), 1)
    places = (values - values[0]) / step
    on_lattice = bool((np.abs(places - np.rint(places)) < _LATTICE_ERROR).all())
    return (float(values[0]), step) if on_lattice and places[-1] < _CODES else None


def _find_series(feeds: Sequence[Feeds]) -> tuple[str, list[NDArray[np.int16]]] | None:
    """Return the input that is a series, with int16 differences along its longest axis, or None."""
    for name, first in feeds[0].items():
        if first.ndim not in _SERIES_RANKS or first.dtype.kind != "f" or max(first.shape[1:]) < _LEAST_SERIES:
            continue
        axis = int(np.argmax(first.shape[1:])) + 1
        return name, [_differences(np.moveaxis(one[name], axis, -1)) for one in feeds]
    return None


def _differences(series: Array) -> NDArray[np.int16]:
    """Return int16 codes, each less the one before it, modulo 2^16."""
    scale = float(np.abs(series).max()) / np.iinfo(np.int16).max or 1.0
    codes = np.rint(series / scale).astype(np.int16)
    return np.diff(codes, axis=-1, prepend=np.zeros_like(codes[..., :1]))


def _as_audio(name: str, feeds: Sequence[Feeds]) -> list[NDArray[np.int16]]:
    """Return samples of speech, int16 [N, T]."""
    most = np.iinfo(np.int16).max
    return [
        np.clip(np.rint(one[name].reshape(one[name].shape[0], -1) * most), -most, most).astype(np.int16)
        for one in feeds
    ]
