"""Converts recordings to the sample rate, length, features and values that a model needs."""

from pathlib import Path
from typing import Annotated, Final

import numpy as np

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.features import Factor, FeatureRules
from edgekit_runtime.preprocessing.resampling import resample
from edgekit_runtime.preprocessing.wav import read_wav
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array, Floats

SUFFIXES: Final = frozenset({".wav"})
_MARGIN_S: Final = 0.05  # more sound than is asked for, which the filter of a resampling reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRules:
    """The preprocessing of a recording.

    Attributes:
        sample_rate: The sample rate in Hz. Recordings must have this rate, unless `resample` is set.
        samples: The length in samples. Longer recordings are cut at the end, shorter ones are padded with
            zeros. None keeps the length.
        hop: The number of new samples in each step of a sequence. The other samples are from earlier steps,
            or are zeros in the first step. None means that all samples are new.
        scale, mean, std: Each value becomes (value * scale - mean) / std. A value is an amplitude from -1 to
            1, or a feature.
        channel_axis: The position of an additional axis of size 1, or None.
        resample: Whether to resample recordings with other rates.
        features: The features to compute, or None to use the amplitudes.
        is_transposed: Whether features have the shape [values, frames] instead of [frames, values].
        is_flat: Whether features are flattened to one axis, frame by frame.
    """

    sample_rate: Annotated[int, Range(1, 1 << 20)]
    samples: Annotated[int | None, Range(1, 1 << 28)] = None
    scale: Factor = 1.0
    mean: Factor = 0.0
    std: Factor = 1.0
    channel_axis: int | None
    dtype: str
    hop: Annotated[int | None, Range(1, 1 << 28)] = None
    resample: bool = False
    features: FeatureRules | None = None
    is_transposed: bool = False
    is_flat: bool = False

    def __post_init__(self) -> None:
        if not self.std:
            raise ValueError("std is 0, by which values are divided")
        if self.features is not None and self.features.high_hz > self.sample_rate / 2:
            raise ValueError(
                f"features.high_hz is {self.features.high_hz:g}, expected at most half of the sample rate"
                f" {self.sample_rate}"
            )
        if self.hop is not None and self.samples is None:
            raise ValueError(f"hop is {self.hop}, but samples, the length of a step, is missing")
        if self.hop is not None and self.samples is not None and not 1 <= self.hop <= self.samples:
            raise ValueError(f"hop is {self.hop}, expected a whole number from 1 to samples, {self.samples}")

    @property
    def duration_s(self) -> float | None:
        """The duration of each result in seconds, or None for any duration."""
        return None if self.samples is None else self.samples / self.sample_rate

    @property
    def _needed_s(self) -> float | None:
        return None if self.duration_s is None else self.duration_s + _MARGIN_S

    def load(self, file: Path | bytes) -> Floats:
        """Read a WAV file, average its channels, and return the result of `fit`.

        Raises:
            DataError: The file is not a WAV file, or is damaged, empty or too short for features, or its rate
                is not `sample_rate` and `resample` is not set.
        """
        amplitudes, rate = read_wav(file, self._needed_s)
        try:
            return self.fit(amplitudes, rate)
        except DataError as error:
            raise DataError(f"{file if isinstance(file, Path) else 'the recording'}: {error}") from error

    def fit(self, amplitudes: Floats, rate: int) -> Floats:
        """Resample the sound and adjust its length, then compute the features if there are any.

        Args:
            amplitudes: The amplitudes from -1 to 1, float32 [samples].
            rate: The sample rate of `amplitudes` in Hz.

        Returns:
            The amplitudes, float32 [samples], or the features, float32 [frames, values].

        Raises:
            DataError: `rate` is not `sample_rate` and `resample` is not set, or the sound is too short for
                features.
        """
        if rate != self.sample_rate:
            if not self.resample:
                raise DataError(
                    f"has {rate} Hz, expected {self.sample_rate} (sample_rate of the preprocessing); set"
                    " 'resample' there to true, or resample it, for example:"
                    f" ffmpeg -i in.wav -ar {self.sample_rate} out.wav"
                )
            if self._needed_s is not None:
                amplitudes = amplitudes[: int(self._needed_s * rate) + 1]
            amplitudes = resample(amplitudes, rate, self.sample_rate)
        if self.samples is not None:
            amplitudes = amplitudes[: self.samples]
            amplitudes = np.pad(amplitudes, (0, self.samples - len(amplitudes)))
        return amplitudes if self.features is None else self.features.compute(amplitudes, self.sample_rate)

    def finish(self, loaded: Array) -> Array:
        """Convert a result of `load` or `fit` to the input of the model, and round and clip integers."""
        exact = (loaded.astype(np.float64) * self.scale - self.mean) / self.std
        dtype = DTYPES[self.dtype]
        if dtype.kind != "f":
            limits = np.iinfo(dtype)
            exact = np.rint(exact).clip(limits.min, limits.max)
        values: Array = exact.astype(dtype)
        values = values.T if self.is_transposed else values.ravel() if self.is_flat else values
        return values if self.channel_axis is None else np.expand_dims(values, self.channel_axis)
