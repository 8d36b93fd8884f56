"""Reads recordings in WAV files and brings them into a model's form.

It does not resample, and it computes no features: a file of another sample rate is refused.
"""

import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import DTYPES

SUFFIXES: Final = frozenset({".wav"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRules:
    """The preprocessing of a recording.

    Attributes:
        sample_rate: sample rate in Hz, which each file must have.
        samples: length of the result; a longer recording is cut at its end, a shorter one gets zeros there.
            None leaves the length.
        scale, mean, std: an amplitude -1..1 becomes (amplitude * scale - mean) / std.
        channel_axis: position of an axis of size 1 in the result, or None for [samples].
    """

    sample_rate: int
    samples: int | None
    scale: float
    mean: float
    std: float
    channel_axis: int | None
    dtype: str

    @property
    def duration_s(self) -> float | None:
        """Length of each result; None if it is free."""
        return None if self.samples is None else self.samples / self.sample_rate

    def load(self, file: Path | bytes) -> NDArray[np.float32]:
        """Return the amplitudes of a WAV file, float32 [samples], -1..1; channels are averaged.

        Args:
            file: its path or content.

        Raises:
            DataError: no WAV file with integers, damaged, empty, or of another sample rate.
        """
        return self.fit(_read(file, self.sample_rate, self.samples))

    def fit(self, amplitudes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return amplitudes [samples] cut, or with zeros at their end, to the stated length."""
        if self.samples is None:
            return amplitudes
        amplitudes = amplitudes[: self.samples]
        return np.pad(amplitudes, (0, self.samples - len(amplitudes)))

    def finish(self, loaded: NDArray[Any]) -> NDArray[Any]:
        """Return the sample for the amplitudes from `load`."""
        exact = (loaded.astype(np.float64) * self.scale - self.mean) / self.std
        values: NDArray[Any] = exact.astype(DTYPES[self.dtype])
        return values if self.channel_axis is None else np.expand_dims(values, self.channel_axis)


def _read(source: Path | bytes, sample_rate: int, most: int | None) -> NDArray[np.float32]:
    path = source if isinstance(source, Path) else "the recording"
    try:
        with wave.open(str(source) if isinstance(source, Path) else io.BytesIO(source), "rb") as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            if rate != sample_rate:
                raise DataError(
                    f"{path}: has {rate} Hz, expected {sample_rate} (sample_rate of the preprocessing);"
                    f" resample it, for example: ffmpeg -i in.wav -ar {sample_rate} out.wav"
                )
            frames = file.getnframes() if most is None else min(file.getnframes(), most)
            raw = file.readframes(frames)
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{path}: is no WAV file with whole numbers, or damaged ({error or 'it ends early'}); convert it,"
            " for example: ffmpeg -i in.wav -c:a pcm_s16le out.wav"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not raw:
        raise DataError(f"{path}: holds no sound")
    if len(raw) < frames * width * channels:
        raise DataError(f"{path}: is cut short; copy it again")
    mono: NDArray[np.float32] = _amplitudes(raw, width).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mono


def _amplitudes(raw: bytes, width: int) -> NDArray[np.float32]:
    """Return samples of 1 to 4 bytes as float32, -1..1. Source: the WAV format; 8 bits are unsigned."""
    if width == 1:
        unsigned: NDArray[np.float32] = np.frombuffer(raw, np.uint8).astype(np.float32)
        unsigned /= 128
        unsigned -= 1
        return unsigned
    # Each number goes to the upper bytes of an int32, so that one division fits all widths.
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    amplitudes: NDArray[np.float32] = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return amplitudes
