"""Reads WAV files with integers of 8 to 32 bits or floats, in the plain or the extensible format.

    read_wav(path)                       # the whole file
    WavFile(file, "door.wav").read(512)  # the next 512 frames of a long file

Source: "Multiple Channel Audio Data and WAVE Files" (Microsoft), and RFC 2361 for the format tags.
"""

import contextlib
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np

from edgekit_runtime.errors import DataError
from edgekit_runtime.tensors import Floats

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_WIDTHS: Final = {_INTEGERS: (1, 2, 3, 4), _FLOATS: (4, 8)}  # bytes of a number
_MAX_CHUNKS: Final = 1000
_MAX_CHANNELS: Final = 64
_MAX_AMPLITUDE: Final = 1 << 31  # some write whole numbers as floating-point ones
_MIN_UNKNOWN_BYTES: Final = 0x7FFF_F000
"""Programs that write to a pipe state this size or more. The sound then lasts to the file's end."""


class _Format(NamedTuple):
    tag: int
    channels: int
    rate: int
    width: int


def read_wav(source: Path | bytes, max_s: float | None = None) -> tuple[Floats, int]:
    """Read a WAV file and average its channels.

    Args:
        source: The path or the content of the file.
        max_s: How many seconds to read, or None to read the whole file.

    Returns:
        The amplitudes from -1 to 1, float32 [frames], and the sample rate in Hz.

    Raises:
        DataError: The file is not a WAV file, has an unsupported encoding, or is damaged or empty.
    """
    name = str(source) if isinstance(source, Path) else "the recording"
    with _naming(name):
        file = source.open("rb") if isinstance(source, Path) else io.BytesIO(source)
    with file:
        wav = WavFile(file, name)
        amplitudes = wav.read(None if max_s is None else int(max_s * wav.rate) + 1)
    if not len(amplitudes):
        raise DataError(f"{name}: holds no sound")
    return amplitudes, wav.rate


def write_wav(amplitudes: Floats, rate: int) -> bytes:
    """Return a 16-bit WAV file with one channel. Amplitudes are clipped to -1..1, and NaN becomes 0."""
    sound = np.rint(np.clip(np.nan_to_num(amplitudes), -1, 1) * 32767).astype("<i2").tobytes()
    return pack_wav(sound, rate)


def pack_wav(sound: bytes, rate: int, channels: int = 1, *, is_float: bool = False) -> bytes:
    """Return a WAV file of interleaved samples, which are int16, or float32 with `is_float`."""
    tag, width = (_FLOATS, 4) if is_float else (_INTEGERS, 2)
    frame_bytes = channels * width
    form = struct.pack("<HHIIHH", tag, channels, rate, rate * frame_bytes, frame_bytes, 8 * width)
    parts = (b"WAVEfmt ", struct.pack("<I", len(form)), form, b"data", struct.pack("<I", len(sound)), sound)
    content = b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(content)) + content


class WavFile:
    """A WAV file that is read in pieces.

    Attributes:
        rate: The sample rate in Hz.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the head of an open file, which the caller must close. `name` is used in error messages.

        Raises:
            DataError: The file is not a WAV file, has an unsupported encoding, or is damaged.
        """
        self._file, self._name = file, name
        with _naming(name):
            self._format, size = _read_head(file)
        self.rate = self._format.rate
        self._frame_bytes = self._format.width * self._format.channels
        self._frames_left = size // self._frame_bytes
        self._states_size = size < _MIN_UNKNOWN_BYTES

    def read(self, frames: int | None = None) -> Floats:
        """Return the next frames, averaged over the channels, float32 [frames].

        At the end of the file there may be fewer frames. If `frames` is None, the rest of the file is read.

        Raises:
            DataError: The file is truncated, or contains NaN, infinity or huge numbers.
        """
        form = self._format
        frames = self._frames_left if frames is None else min(frames, self._frames_left)
        with _naming(self._name):
            raw = self._file.read(frames * self._frame_bytes)
            if len(raw) < frames * self._frame_bytes:
                if self._states_size:
                    raise DataError("is cut short; copy it again")
                raw = raw[: len(raw) // self._frame_bytes * self._frame_bytes]
            self._frames_left -= frames
            if not raw:
                return np.zeros(0, np.float32)
            if form.tag == _INTEGERS:
                return average_channels(_read_integers(raw, form.width), form.channels)
            with np.errstate(over="ignore"):
                amplitudes = np.frombuffer(raw, f"<f{form.width}").astype(np.float32)
            return average_channels(amplitudes, form.channels)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or error}") from error


def _read_head(file: BinaryIO) -> tuple[_Format, int]:
    """Return the coding and the bytes of the sound, which comes next in the file."""
    head = file.read(12)
    if head[:4] != b"RIFF" or head[8:] != b"WAVE":
        raise DataError("is no WAV file; convert it, for example: ffmpeg -i in -c:a pcm_s16le out.wav")
    form = None
    for _ in range(_MAX_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        size = int.from_bytes(head[4:], "little")
        if head[:4] == b"data" and form is not None:
            return form, size
        content = file.read(min(size, 40)) if head[:4] == b"fmt " else b""
        form = _parse_format(content) if content else form
        file.seek(size + size % 2 - len(content), io.SEEK_CUR)
    raise DataError("is no WAV file that holds sound, or is damaged")


def _parse_format(content: bytes) -> _Format:
    if len(content) < 16:
        raise DataError("is a damaged WAV file: its format is cut short")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", content)
    if tag == _EXTENSIBLE and len(content) >= 26:
        tag = int.from_bytes(content[24:26], "little")
    if tag not in _WIDTHS or bits not in [8 * width for width in _WIDTHS[tag]]:
        raise DataError(
            f"is coded in the format {tag} with {bits} bits, expected whole numbers of 8 to 32 or floating-"
            "point numbers of 32 or 64 bits; convert it, for example: ffmpeg -i in.wav -c:a pcm_s16le out.wav"
        )
    if not 1 <= channels <= _MAX_CHANNELS or not rate:
        raise DataError(f"is a damaged WAV file: it states {channels} channels and {rate} Hz")
    return _Format(tag, channels, rate, bits // 8)


def average_channels(samples: Floats, channels: int) -> Floats:
    """Average interleaved samples [frames * channels] over the channels, float32 [frames].

    Raises:
        DataError: A sample is NaN, infinite, or so large that later steps could overflow.
    """
    if not (samples.min() >= -_MAX_AMPLITUDE and samples.max() <= _MAX_AMPLITUDE):  # NaN compares false
        raise DataError(f"holds a NaN or an amplitude that is infinite or over {_MAX_AMPLITUDE}")
    mono: Floats = samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    return mono


def _read_integers(raw: bytes, width: int) -> Floats:
    """Return numbers of 1 to 4 bytes as float32, -1..1; those of 8 bits are unsigned."""
    if width == 1:
        unsigned: Floats = np.frombuffer(raw, np.uint8).astype(np.float32)
        unsigned /= 128
        unsigned -= 1
        return unsigned
    # Each number goes to the upper bytes of an int32, so that one division fits all widths.
    wide = np.zeros((len(raw) // width, 4), np.uint8)
    wide[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)
    amplitudes: Floats = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    return amplitudes
