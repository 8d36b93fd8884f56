"""Encodes and decodes photographs as JPEG or WebP, and sound as Opus, for tensors that a device sends.

A codec is named by a string: `jpeg:90` or `webp:80` with the quality 1 to 100, or `opus:24@16000` with the
bit rate in kbit/s and the sample rate in Hz. Files to decode may be hostile, so the size is checked before
memory is allocated. The decoders are C libraries, so a server that is open to strangers should isolate models
that use them.
"""

import importlib
import io
import re
import struct
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.install_hint import install_command
from edgekit_runtime.tensors import Array

MediaName: TypeAlias = Literal["jpeg", "webp", "opus"]

_CODEC: Final = re.compile(r"(?P<name>jpeg|webp|opus)(?::(?P<quality>\d{1,3}))?(?:@(?P<rate>\d{4,5}))?")
_QUALITY: Final = {"jpeg": 90, "webp": 80, "opus": 24}
OPUS_RATES_HZ: Final = (8000, 12000, 16000, 24000, 48000)
DEFAULT_RATE_HZ: Final = 16_000
_OPUS_KBIT_S: Final = (6, 256)  # one channel in libsndfile, whose `compression_level` runs from high to low
_MAX_SCANS: Final = 64  # scans of a progressive JPEG, each a pass over all pixels. Encoders write 10
_START_OF_SCAN: Final = b"\xff\xda"
_MODES: Final = {1: "L", 3: "RGB"}  # Pillow's mode by number of channels
_MAX_DATA_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class MediaCodec:
    """A codec with its quality.

    Attributes:
        quality: quality of a photograph, 1 to 100, or bit rate of sound, 6 to 256 kbit/s.
        rate_hz: sample rate of sound, in Hz.

    Raises:
        DataError: a value is out of range.
    """

    name: MediaName
    quality: int
    rate_hz: int = DEFAULT_RATE_HZ

    def __post_init__(self) -> None:
        low, high = _OPUS_KBIT_S if self.name == "opus" else (1, 100)
        if not low <= self.quality <= high:
            raise DataError(f"codec {self.name}: quality is {self.quality}, expected {low} to {high}")
        if self.rate_hz not in OPUS_RATES_HZ:
            raise DataError(f"codec {self.name}: {self.rate_hz} Hz, expected one of {OPUS_RATES_HZ}")

    @classmethod
    def parse(cls, text: str) -> "MediaCodec":
        """Parse the name of a codec, such as `jpeg:90` or `opus:24@16000`.

        The defaults are `jpeg:90`, `webp:80` and `opus:24@16000`.

        Raises:
            DataError: `text` is not the name of a codec.
        """
        match = _CODEC.fullmatch(text)
        if match is None or (match["rate"] and match["name"] != "opus"):
            raise DataError(f"codec {text[:32]!r}: expected jpeg:90, webp:80 or opus:24@16000")
        name: Any = match["name"]
        return cls(name, int(match["quality"] or _QUALITY[name]), int(match["rate"] or DEFAULT_RATE_HZ))

    @property
    def rank(self) -> int:
        """The number of dimensions of the arrays: 3 for a photograph, 1 for sound."""
        return 1 if self.name == "opus" else 3

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("int16", "float32") if self.name == "opus" else ("uint8",)


def encode_media(codec: MediaCodec, array: Array) -> bytes:
    """Encode a photograph or sound, and return the content of the file.

    Args:
        codec: codec of the file.
        array: a photograph as uint8 [H, W, 3] in RGB or [H, W, 1] in grey, or mono sound as int16 [T] or
            float32 [T] in -1..1.

    Raises:
        DataError: the array has another dtype or shape.
        BackendError: the library is not installed, or cannot encode the array.
    """
    if codec.name == "opus":
        return _encode_sound(codec, array)
    if array.dtype != np.uint8 or array.ndim != codec.rank or array.shape[2] not in _MODES or not array.size:
        raise DataError(f"{codec.name}: got {array.dtype} {list(array.shape)}, expected uint8 [H, W, 3 or 1]")
    image_type: Any = _need_pillow("Image")
    file = io.BytesIO()
    try:
        image = image_type.fromarray(np.ascontiguousarray(array if array.shape[2] > 1 else array[:, :, 0]))
        # Without subsampling of colours only the quality decides; method 0 of WebP is the fast one.
        options = {"subsampling": 0} if codec.name == "jpeg" else {"method": 0}
        image.save(file, codec.name.upper(), quality=codec.quality, **options)
    except (OSError, ValueError) as cause:
        raise BackendError(f"{codec.name}: {list(array.shape)} cannot be written: {cause}") from cause
    return file.getvalue()


def decode_media(
    codec: MediaCodec,
    data: "bytes | memoryview",
    *,
    dtype: str,
    max_bytes: int = _MAX_DATA_BYTES,
    channels: int = 3,
) -> Array:
    """Decode a photograph to [H, W, channels], or sound to [T].

    Args:
        codec: codec of the file. Its quality is ignored.
        data: the whole file.
        dtype: `uint8` for a photograph, `int16` or `float32` for sound.
        max_bytes: maximum size of the array, and of the file.
        channels: channels of a photograph: 3 for RGB, or 1 for grey.

    Raises:
        DataError: the file is malformed, truncated, larger than `max_bytes`, in another format or not in RGB
            or grey, or the codec does not support `dtype`.
        BackendError: the library is not installed.
    """
    if len(data) > max_bytes + (1 << 16):
        raise DataError(f"{codec.name}: the file has {len(data)} bytes, the limit is {max_bytes}")
    if dtype not in codec.dtypes:
        raise DataError(f"{codec.name}: cannot be decoded to {dtype}, only to {' or '.join(codec.dtypes)}")
    if codec.name == "opus":
        return _decode_sound(data, dtype, max_bytes)
    return _decode_photograph(codec, bytes(data), max_bytes, channels)


def _decode_photograph(codec: MediaCodec, data: bytes, max_bytes: int, channels: int) -> Array:
    where = codec.name
    # Not by Image.open, which has its own size limit and would try other formats.
    plugins: Any = _need_pillow("JpegImagePlugin" if codec.name == "jpeg" else "WebPImagePlugin")
    try:
        if codec.name == "jpeg":
            if data.count(_START_OF_SCAN) > _MAX_SCANS:
                raise DataError(f"{where}: more than {_MAX_SCANS} scans")
            image = plugins.JpegImageFile(io.BytesIO(data))
        else:
            _check_size(
                (*_read_webp_size(data), channels), max_bytes, where
            )  # WebP's reader takes the memory at once
            image = plugins.WebPImageFile(io.BytesIO(data))
        _check_size((*image.size, channels), max_bytes, where)
        if image.mode not in ("RGB", "L"):
            raise DataError(f"{where}: the photograph is {image.mode}, expected RGB")
        pixels = np.array(image.convert(_MODES[channels]))
        return pixels if channels > 1 else pixels[:, :, None]
    except (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, struct.error) as cause:
        # Readers raise all of these for malformed files, SyntaxError for other formats.
        raise DataError(f"{where}: the photograph cannot be read: {cause}") from cause


def _check_size(size: tuple[int, int, int], max_bytes: int, where: str) -> None:
    width, height, channels = size
    if width * height * channels > max_bytes:
        raise DataError(f"{where}: {width} x {height} pixels are more than {max_bytes} bytes, the limit")


def _read_webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height as the first chunk of a WebP states them.

    Raises:
        DataError: the data is no WebP.

    Source: RFC 9649, sections 2.5 to 2.7.
    """
    kind = data[12:16]
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        raise DataError("webp: the file is no WebP")
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _encode_sound(codec: MediaCodec, array: Array) -> bytes:
    if array.dtype not in (np.int16, np.float32) or array.ndim != 1 or not array.size:
        raise DataError(f"opus: got {array.dtype} {list(array.shape)}, expected int16 or float32 [T]")
    soundfile = _need_soundfile()
    low, high = _OPUS_KBIT_S
    level = (high - codec.quality) / (high - low)
    file = io.BytesIO()
    try:
        soundfile.write(file, array, codec.rate_hz, format="OGG", subtype="OPUS", compression_level=level)
    except (soundfile.SoundFileError, OSError) as cause:
        raise BackendError(f"opus: {array.size} samples cannot be written: {cause}") from cause
    return file.getvalue()


def _decode_sound(data: "bytes | memoryview", dtype: str, max_bytes: int) -> Array:
    soundfile = _need_soundfile()
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if (file.format, file.subtype, file.channels) != ("OGG", "OPUS", 1):
                description = f"{file.format} {file.subtype}, channels: {file.channels}"
                raise DataError(f"opus: the sound is {description}, expected OGG OPUS with one channel")
            if not 0 <= file.frames <= max_bytes // np.dtype(dtype).itemsize:
                raise DataError(f"opus: {file.frames} samples are more than {max_bytes} bytes, the limit")
            stated = file.frames
            sound: Array = file.read(stated, dtype=dtype)
    except (soundfile.SoundFileError, OSError, RuntimeError) as cause:
        raise DataError(f"opus: the sound cannot be read: {cause}") from cause
    if len(sound) != stated:
        raise DataError(f"opus: the sound has {len(sound)} samples, and states {stated}")
    return sound


def _need_pillow(module: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as cause:
        raise BackendError(f"photographs need the package pillow; {install_command('offload')}") from cause


def _need_soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as cause:  # OSError: libsndfile is missing
        raise BackendError(f"Opus needs the package soundfile; {install_command('offload-audio')}") from cause
    return soundfile
