"""Finds uploads, in which the server runs the whole model. The input is sent raw or coded.

These are the candidates with which cuts must compete, for example JPEG for images, Opus for speech, and
differences for sensor data. If a model has several inputs, those that do not suit the codec of an upload are
sent raw. Sizes and the values of codes (`partition.calibrate`) are measured on samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.calibrate import SOUND, find_bytes, find_series, find_time_axis
from edgekit_offload.partition.coding import INTEGER_TYPES, INTEGERS, RAW, Coding, Lattice
from edgekit_offload.partition.opened_model import Feeds, median_s
from edgekit_offload.planning.coding_costs import compressed_bytes
from edgekit_offload.planning.costs import MESSAGE_BYTES, TENSOR_BYTES
from edgekit_offload.planning.result import Refusal, SentTensor
from edgekit_runtime.codecs.media import (
    DEFAULT_RATE_HZ,
    OPUS_RATES_HZ,
    MediaCodec,
    decode_media,
    encode_media,
)
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.tensors import Array

RAW_UPLOAD: Final = "raw"
JPEG: Final = "jpeg:90"
WEBP: Final = "webp:80"
OPUS: Final = "opus:24"
_LEAST_PIXELS: Final = 8  # pixels of a side
_CHANNELS: Final = (1, 3)
_LEAST_AUDIO_SAMPLES: Final = 4000
_LEAST_SERIES: Final = 8
_IMAGE_RANK: Final = 4
_MOST_SERIES_RANK: Final = 3
_MISSING: Final[Mapping[str, str]] = {
    "jpeg": "JPEG and WebP are not compared",
    "delta": "Differences (delta + zstd) are not compared",
    "opus": "Opus is not compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The measurements that all uploads have in common.

    Attributes:
        server_s: The time of the model on the server.
        output_bytes: The total size of the outputs of one request.
        outputs: The number of outputs of the model.
        device_slowdown, server_slowdown: The ratios of the device's and server's time to this machine's time.
    """

    server_s: float
    output_bytes: float
    outputs: int
    device_slowdown: float
    server_slowdown: float


@dataclass(frozen=True, slots=True)
class UploadCandidate:
    plan: OffloadPlan
    sent: tuple[SentTensor, ...]
    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class _CodedInput:
    """One input in codes.

    Attributes:
        name: name of the input; `sent` is the name of its codes.
        media: codec of a file, with its rate; empty if codes are sent as they are.
    """

    name: str
    sent: str
    coding: Coding
    codes: Sequence[Array]
    rounding: str = ""
    media: str = ""


def find_uploads(
    feeds: Sequence[Feeds], whole: WholeModel, sample_rate_hz: float | None = None
) -> tuple[tuple[UploadCandidate, ...], tuple[Refusal, ...]]:
    """Return an upload for each coding that suits the input, and refusals of the other codings.

    `feeds` are samples, one request each. `sample_rate_hz` is the sample rate of sound, or None.
    """
    inputs = _Inputs(feeds, whole)
    lattices = {
        name: find_bytes(_rows(feeds, name))
        for name, value in feeds[0].items()
        if value.dtype == np.float32 and value.ndim > 1
    }
    coded: dict[str, list[_CodedInput]] = {name: [] for name in ("uint8", JPEG, WEBP, "delta", OPUS)}
    obstacles: dict[str, list[str]] = {"jpeg": [], "delta": [], "opus": []}
    for name in feeds[0]:
        lattice = lattices.get(name)
        if lattice is not None:
            codes = [_code(sample[name], lattice, np.uint8) for sample in feeds]
            coded["uint8"].append(
                _CodedInput(
                    name=name, sent=f"{name}.codes", coding=Coding("uint8", {name: lattice}), codes=codes
                )
            )
        for kind, form in (
            ("jpeg", _find_pixels(name, feeds, lattice)),
            ("delta", _find_series(name, feeds)),
            ("opus", _find_sound(name, feeds, sample_rate_hz)),
        ):
            if isinstance(form, str):
                obstacles[kind].append(form)
            elif kind == "jpeg":
                for media in (JPEG, WEBP):
                    coded[media].append(replace(form, media=media))
            else:
                coded[OPUS if form.media else kind].append(form)
    tried = [inputs.try_upload(name, coded_inputs) for name, coded_inputs in coded.items() if coded_inputs]
    refusals = [
        Refusal(short, f"{_MISSING[short]}: {'; '.join(reasons)}.")
        for short, reasons in obstacles.items()
        if len(reasons) == len(feeds[0])
    ]
    refusals += [upload for upload in tried if isinstance(upload, Refusal)]
    candidates = [
        inputs.upload(RAW_UPLOAD, ()),
        *(upload for upload in tried if isinstance(upload, UploadCandidate)),
    ]
    return tuple(candidates), tuple(refusals)


class _Inputs:
    """The samples, and the facts that all candidates to send them have in common."""

    def __init__(self, feeds: Sequence[Feeds], whole: WholeModel) -> None:
        self._raw = {name: float(np.mean([sample[name].nbytes for sample in feeds])) for name in feeds[0]}
        self._whole = whole

    def try_upload(self, name: str, coded: Sequence[_CodedInput]) -> UploadCandidate | Refusal:
        """Return the candidate that sends some inputs in codes, or why there is none."""
        try:
            return self.upload(name, coded)
        except EdgekitError as cause:  # another shape, or a library that is not installed
            return Refusal(name, f"{cause}.")

    def upload(self, name: str, coded: Sequence[_CodedInput]) -> UploadCandidate:
        """Return the candidate that sends some inputs in codes, and the others raw.

        Raises:
            DataError: an input cannot become such a file.
            BackendError: the library is not installed.
            CutError: there are several samples in a request.
        """
        sizes = {
            name: SentTensor(name=name, coding="raw", raw_bytes=size, sent_bytes=size)
            for name, size in self._raw.items()
        }
        encode_s = decode_s = saved_bytes = 0.0
        for coded_input in coded:
            if coded_input.media:
                size, *spent_s = _measure_media(coded_input.media, coded_input.codes)
            else:
                size, spent_s = (
                    float(np.mean([compressed_bytes(codes) for codes in coded_input.codes])),
                    [0.0, 0.0],
                )
                if size < coded_input.codes[0].nbytes:
                    spent_s = [median_s(partial(compressed_bytes, coded_input.codes[0]))] * 2
                    saved_bytes += coded_input.codes[0].nbytes - size
            encode_s, decode_s = encode_s + spent_s[0], decode_s + spent_s[1]
            sizes[coded_input.name] = replace(
                sizes[coded_input.name], coding=name, sent_bytes=size, rounding=coded_input.rounding
            )
        whole, stem, coding = self._whole, name.replace(":", ""), _join_codings(coded)
        upload_bytes = (
            sum(tensor.sent_bytes for tensor in sizes.values()) + MESSAGE_BYTES + TENSOR_BYTES * len(sizes)
        )
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
            media={coded_input.sent: coded_input.media for coded_input in coded if coded_input.media},
            compression="zstd" if has_zstd else "identity",
        )
        return UploadCandidate(plan, tuple(sizes.values()), coding)


def _join_codings(coded: Sequence[_CodedInput]) -> Coding:
    """Return the coding of all inputs; inputs that are pixels already have none."""
    codings = [coded_input.coding for coded_input in coded if coded_input.coding.kind != "raw"]
    lattices = {name: lattice for coding in codings for name, lattice in coding.lattices.items()}
    return Coding(codings[0].kind, lattices) if codings else RAW


def _measure_media(codec: str, arrays: Sequence[Array]) -> tuple[float, float, float]:
    """Return the mean size of files, and the times to encode and to decode one on this machine."""
    parsed, first = MediaCodec.parse(codec), arrays[0][0]
    if arrays[0].shape[0] != 1:
        raise CutError(f"{codec} carries one sample a request, the model takes {arrays[0].shape[0]} at once")
    files = [encode_media(parsed, rows[0]) for rows in arrays]
    channels = 1 if first.shape[-1] == 1 else 3
    return (
        float(np.mean([len(file) for file in files])),
        median_s(lambda: encode_media(parsed, first)),
        median_s(lambda: decode_media(parsed, files[0], dtype=first.dtype.name, channels=channels)),
    )


def _find_pixels(name: str, feeds: Sequence[Feeds], lattice: Lattice | None) -> _CodedInput | str:
    """Return an input as pixels uint8 [N, H, W, C], or why it is no image.

    Floats are pixels if the values of each channel lie on a lattice of at most 256 steps, as after scaling
    and normalising.
    """
    first = feeds[0][name]
    is_channels_last = first.shape[-1:] in ((1,), (3,))
    sides = first.shape[1:3] if is_channels_last else first.shape[2:]
    is_image = first.ndim == _IMAGE_RANK and (is_channels_last or first.shape[1] in _CHANNELS)
    if not is_image or min(sides) < _LEAST_PIXELS:
        least = f"1 or 3 channels of 8-bit pixels, {_LEAST_PIXELS} x {_LEAST_PIXELS} at least"
        return f"'{name}' {list(first.shape)} is no image of {least}"
    if first.dtype == np.uint8 and is_channels_last:
        return _CodedInput(name=name, sent=name, coding=RAW, codes=[sample[name] for sample in feeds])
    if first.dtype != np.float32 or lattice is None:
        return f"'{name}' does not consist of 8-bit pixels"
    codes = [_code(sample[name], lattice, np.uint8) for sample in feeds]
    if not is_channels_last:
        codes = [np.ascontiguousarray(images.transpose(0, 2, 3, 1)) for images in codes]
    return _CodedInput(
        name=name, sent=f"{name}.pixels", coding=Coding("pixels", {name: lattice}), codes=codes
    )


def _find_series(name: str, feeds: Sequence[Feeds]) -> _CodedInput | str:
    """Return an input as differences of a series, or why it is no series."""
    first = feeds[0][name]
    is_integer = first.dtype.name in INTEGER_TYPES
    if not is_integer and first.dtype != np.float32:
        return f"'{name}' is {first.dtype}"
    if not 1 <= first.ndim <= _MOST_SERIES_RANK:
        return f"'{name}' has {first.ndim} dimensions, a series has 1 to {_MOST_SERIES_RANK}"
    rows = _rows(feeds, name)
    if not rows.size or max(rows.shape[1:]) < _LEAST_SERIES:
        return f"'{name}' {list(first.shape)} is no series of at least {_LEAST_SERIES} steps"
    samples = [sample[name] if first.ndim > 1 else sample[name][np.newaxis] for sample in feeds]
    if not is_integer:
        lattice = find_series(rows)
        codes = [_code(values, lattice, np.int32) for values in samples]
        differences = [values.astype(np.int16) for values in _subtract(codes, lattice.time_axis)]
        coding = Coding("delta", {name: lattice})
        return _CodedInput(
            name=name,
            sent=f"{name}.codes",
            coding=coding,
            codes=differences,
            rounding=_describe_rounding(lattice),
        )
    axis = find_time_axis(rows)
    differences = [codes.astype(first.dtype) for codes in _subtract(samples, axis)]  # modulo its range
    if sum(map(compressed_bytes, differences)) >= sum(map(compressed_bytes, samples)):
        return f"the differences of '{name}' take as much as its values"
    coding = Coding("delta", {name: replace(INTEGERS, time_axis=axis)})
    return _CodedInput(name=name, sent=f"{name}.codes", coding=coding, codes=differences)


def _find_sound(name: str, feeds: Sequence[Feeds], sample_rate_hz: float | None) -> _CodedInput | str:
    """Return an input as 16-bit samples of sound, or why it is no sound."""
    first = feeds[0][name]
    if first.size != max(first.shape, default=0) or first.size < _LEAST_AUDIO_SAMPLES:
        least = f"at least {_LEAST_AUDIO_SAMPLES} samples of one channel"
        return f"'{name}' {list(first.shape)} is no sound, which is {least}"
    if first.dtype not in (np.float32, np.int16):
        return f"'{name}' is {first.dtype}, Opus takes float32 and int16"
    if first.dtype == np.float32 and max(float(np.abs(sample[name]).max()) for sample in feeds) > 1:
        return f"'{name}' goes beyond -1..1, which is the range of sound"
    rate_hz = DEFAULT_RATE_HZ if sample_rate_hz is None else sample_rate_hz
    if rate_hz not in OPUS_RATES_HZ:
        rates = ", ".join(f"{rate / 1000:g}" for rate in OPUS_RATES_HZ)
        return f"'{name}' has {rate_hz / 1000:g} kHz, Opus takes {rates} kHz"
    samples = [sample[name].reshape(1, -1) for sample in feeds]
    lattice = SOUND if first.dtype == np.float32 else INTEGERS
    if first.dtype == np.float32:
        samples = [_code(values, SOUND, np.int16) for values in samples]
    how = f"at {rate_hz / 1000:g} kHz" + (
        ", assumed: --sample-rate states it" if sample_rate_hz is None else ""
    )
    coding = Coding("samples", {name: lattice})
    codec = OPUS if rate_hz == DEFAULT_RATE_HZ else f"{OPUS}@{rate_hz:.0f}"
    return _CodedInput(
        name=name, sent=f"{name}.samples", coding=coding, codes=samples, rounding=how, media=codec
    )


def _subtract(codes: Sequence[Array], axis: int) -> list[Array]:
    """Return each code minus the one before it along an axis; the first stays."""
    wide = [values.astype(np.int64) for values in codes]
    return [np.diff(values, axis=axis, prepend=values.take([0], axis) * 0) for values in wide]


def _describe_rounding(lattice: Lattice) -> str:
    """Return a description of how codes change the samples; empty if they do not."""
    if lattice.is_exact:
        return ""
    if lattice.is_grid:
        return "not exact in the last bits of float32"
    return f"not exact: rounded to steps of {lattice.step[0]:.2g}"


def _rows(feeds: Sequence[Feeds], name: str) -> NDArray[np.float32]:
    """Return an input of all samples, [samples, ...]; a sample without a batch axis is a row."""
    rows = [sample[name] if sample[name].ndim > 1 else sample[name][np.newaxis] for sample in feeds]
    return np.concatenate(rows).astype(np.float32, copy=False)


def _code(values: Array, lattice: Lattice, dtype: type[np.generic]) -> Array:
    """Return the codes of values, as the nodes of a head compute them."""
    per_axis = [1] * values.ndim
    per_axis[lattice.axis] = len(lattice.step)
    offset, step = (
        np.reshape(values, per_axis).astype(np.float32) for values in (lattice.offset, lattice.step)
    )
    codes = np.floor((values - offset) / step + np.float32(0.5))
    return np.asarray(np.clip(codes, lattice.lowest, lattice.highest), dtype)
