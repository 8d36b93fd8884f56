"""Features of sound: log-mel spectrograms, and their cepstral coefficients (MFCC).

The results match TensorFlow's `tf.signal` (stft, linear_to_mel_weight_matrix and
mfccs_from_log_mel_spectrograms), which the keyword spotting of MLPerf Tiny uses:

    samples [16000] -> frames [49, 480] -> spectrum [49, 257] -> mel bands [49, 40] -> MFCC [49, 10]
"""

import functools
from typing import Annotated, Final, Literal, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array, Floats

Factor: TypeAlias = Annotated[float, Range(-1e30, 1e30)]

_BLOCK: Final = 256  # frames whose spectra are in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRules:
    """The parameters of sound features.

    Attributes:
        kind: `log-mel` for the logarithms of the mel bands, or `mfcc` for their cepstral coefficients.
        frame: The length of a frame in samples. Samples at the end that do not fill a frame are ignored.
        hop: The number of samples between the starts of two frames.
        mel_bins: The number of mel bands (HTK scale) between `low_hz` and `high_hz`.
        coefficients: The number of MFCC coefficients, counted from coefficient 0.
        power: 1 for the magnitude spectrum, 2 for the power spectrum.
        floor: A constant that is added before the logarithm.
    """

    kind: Literal["log-mel", "mfcc"]
    frame: Annotated[int, Range(16, 1 << 15)]
    hop: Annotated[int, Range(16, 1 << 15)]
    mel_bins: Annotated[int, Range(1, 512)] = 40
    low_hz: Annotated[float, Range(0, 1 << 20)] = 20.0
    high_hz: Annotated[float, Range(1, 1 << 20)] = 4000.0
    coefficients: Annotated[int, Range(1, 512)] = 13
    power: Annotated[int, Range(1, 2)] = 1
    floor: Annotated[float, Range(1e-12, 1)] = 1e-6

    def __post_init__(self) -> None:
        if self.low_hz >= self.high_hz:
            raise ValueError(f"low_hz is {self.low_hz:g}, expected less than high_hz, {self.high_hz:g}")
        if self.kind == "mfcc" and self.coefficients > self.mel_bins:
            raise ValueError(f"coefficients is {self.coefficients}, expected at most mel_bins")

    @property
    def width(self) -> int:
        """The number of values in a frame."""
        return self.coefficients if self.kind == "mfcc" else self.mel_bins

    def count_frames(self, samples: int) -> int:
        return max(0, (samples - self.frame) // self.hop + 1)

    def compute(self, amplitudes: Floats, sample_rate: int) -> Floats:
        """Return the features of the amplitudes, float32 [frames, width].

        Raises:
            DataError: The recording is shorter than a frame.
        """
        count = self.count_frames(len(amplitudes))
        if not count:
            raise DataError(f"the sound has {len(amplitudes)} samples, a frame of the features {self.frame}")
        frames = sliding_window_view(amplitudes, self.frame)[:: self.hop]
        window, bands, cosines = _make_tables(self, sample_rate)
        features = np.empty((count, self.width), np.float32)
        for start in range(0, count, _BLOCK):
            block = slice(start, start + _BLOCK)
            spectrum: Array = np.abs(np.fft.rfft(frames[block] * window, _fft_size(self.frame)))
            logarithms = np.log(spectrum**self.power @ bands + self.floor)
            features[block] = logarithms if cosines is None else logarithms @ cosines
        return features


def _fft_size(frame: int) -> int:
    return 1 << (frame - 1).bit_length()


@functools.lru_cache(16)
def _make_tables(rules: FeatureRules, sample_rate: int) -> "tuple[Array, Array, Array | None]":
    """Return Hann's window [frame], weights of mel bands [bins, mel_bins], and cosines of an MFCC."""
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(rules.frame) / rules.frame)
    frequencies = np.linspace(0, sample_rate / 2, _fft_size(rules.frame) // 2 + 1)
    mels = 1127 * np.log1p(frequencies[:, None] / 700)
    low_mel, high_mel = (1127 * np.log1p(limit / 700) for limit in (rules.low_hz, rules.high_hz))
    edges = np.linspace(low_mel, high_mel, rules.mel_bins + 2)
    lower, centre, upper = edges[:-2], edges[1:-1], edges[2:]
    bands = np.minimum((mels - lower) / (centre - lower), (upper - mels) / (upper - centre)).clip(0)
    bands[0] = 0  # as TensorFlow does: the mean of the samples belongs to no band
    if rules.kind == "log-mel":
        return window, bands, None
    positions = (np.arange(rules.mel_bins) + 0.5) * (np.pi / rules.mel_bins)
    cosines = np.cos(positions[:, None] * np.arange(rules.coefficients)) * np.sqrt(2 / rules.mel_bins)
    return window, bands, cosines
