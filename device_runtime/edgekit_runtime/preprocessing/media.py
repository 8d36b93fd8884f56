"""Images and sound as received: bytes with a media type, which are decoded for the rules of a model.

    MediaType.parse("image/jpeg")                                       a JPEG, PNG, WebP or BMP file
    MediaType.parse("audio/wav")                                        a WAV file
    MediaType.parse("video/x-raw; format=RGB; width=640; height=480")   pixels of one frame, row by row
    MediaType.parse("audio/x-raw; format=S16LE; rate=16000; channels=1") samples with interleaved channels

Source of the raw formats: GStreamer's media types.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Final

import numpy as np

from edgekit_runtime.errors import RequestError
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from PIL import Image

    from edgekit_runtime.preprocessing.audio import AudioRules
    from edgekit_runtime.tensors import Array, Floats

_IMAGE_FILES: Final = ("image/jpeg", "image/png", "image/webp", "image/bmp")
_SOUND_FILES: Final = ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave")
_RAW_FRAME: Final = "video/x-raw"
_RAW_SOUND: Final = "audio/x-raw"
_CHANNELS: Final = {"RGB": 3, "BGR": 3, "GRAY8": 1}
_SOUND_DTYPES: Final = {"S16LE": "<i2", "F32LE": "<f4"}
_MAX_SIDE: Final = 1 << 16
_MAX_RATE: Final = 999_999


@dataclass(frozen=True, slots=True)
class MediaType:
    """A media type with its parameters. Parameter names are in lower case. Their values are unchanged.

    Raises:
        RequestError: The type is not supported (415).
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.name not in (*_IMAGE_FILES, *_SOUND_FILES, _RAW_FRAME, _RAW_SOUND):
            supported = ", ".join((*_IMAGE_FILES, _SOUND_FILES[0], _RAW_FRAME, _RAW_SOUND))
            raise RequestError(415, f"the media type is {self.name[:60]!r}, expected one of {supported}")

    @classmethod
    def parse(cls, text: str) -> "MediaType":
        """Parse the value of a `Content-Type` header.

        Raises:
            RequestError: The type is not supported (415).
        """
        name, *parts = (part.strip() for part in text.split(";"))
        pairs = (part.partition("=") for part in parts)
        return cls(
            name.lower(), {key.strip().lower(): value.strip().strip('"') for key, _, value in pairs if key}
        )

    @property
    def is_image(self) -> bool:
        return self.name in _IMAGE_FILES or self.name == _RAW_FRAME

    def read_image(self, data: "bytes | memoryview", max_pixels: int) -> "Image.Image":
        """Decode an image file or a raw frame.

        An image file gives RGB, rotated upright according to its EXIF data. A raw frame gives RGB or grey.

        Raises:
            DataError: The file is damaged, has another format or more than `max_pixels`, or Pillow is
                missing.
            RequestError: The raw frame does not have the stated size (400), or has more than `max_pixels`
                (413).
        """
        from edgekit_runtime.preprocessing.images import decode_image, take_image

        if self.name != _RAW_FRAME:
            return decode_image(bytes(data), max_pixels=max_pixels)
        form = self.parameters.get("format", "RGB")
        if form not in _CHANNELS:
            raise RequestError(400, f"video/x-raw: format is {form[:20]!r}, expected {', '.join(_CHANNELS)}")
        height, width = self._take_size("height"), self._take_size("width")
        if len(data) != height * width * _CHANNELS[form]:
            raise RequestError(
                400,
                f"{len(data)} bytes, expected {width} x {height} x {_CHANNELS[form]} for {form}",
            )
        if height * width > max_pixels:
            raise RequestError(413, f"{width} x {height} pixels are more than {max_pixels}, the limit here")
        pixels = np.frombuffer(data, np.uint8).reshape(height, width, -1)
        return take_image(pixels[:, :, ::-1].copy() if form == "BGR" else pixels)

    def read_sound(self, data: "bytes | memoryview", rules: "AudioRules") -> "Array":
        """Decode an audio file or raw samples and return the result of `rules.fit`.

        Raises:
            DataError: The file is damaged, contains a NaN, is too short, or has a rate that `rules` refuses.
            RequestError: The bytes are not samples in the stated format.
        """
        if self.name != _RAW_SOUND:
            return rules.load(bytes(data))
        return rules.fit(*self.read_amplitudes(data))

    def read_amplitudes(self, data: "bytes | memoryview") -> "tuple[Floats, int]":
        """Decode an audio file or raw samples, and average the channels.

        Returns:
            The amplitudes from -1 to 1, float32 [frames], and the sample rate in Hz.

        Raises:
            DataError: The file is damaged or empty, or contains NaN or infinity.
            RequestError: The bytes are not samples in the stated format.
        """
        from edgekit_runtime.preprocessing.wav import average_channels, read_wav

        if self.name != _RAW_SOUND:
            return read_wav(bytes(data))
        form = self.parameters.get("format", "S16LE")
        if form not in _SOUND_DTYPES:
            raise RequestError(
                400, f"audio/x-raw: format is {form[:20]!r}, expected {', '.join(_SOUND_DTYPES)}"
            )
        rate = self._take_size("rate", _MAX_RATE)
        channels = self._take_size("channels", 64) if "channels" in self.parameters else 1
        dtype = np.dtype(_SOUND_DTYPES[form])
        if not len(data) or len(data) % (dtype.itemsize * channels):
            raise RequestError(400, f"{len(data)} bytes, expected samples of {channels} x {dtype.itemsize}")
        samples = np.frombuffer(data, dtype).astype(np.float32)
        if form == "S16LE":
            samples /= 32768
        return average_channels(samples, channels), rate

    def _take_size(self, name: str, most: int = _MAX_SIDE) -> int:
        text = self.parameters.get(name, "")
        if not text.isdecimal() or not 1 <= len(text) <= 6 or not 1 <= int(text) <= most:
            raise RequestError(400, f"{self.name}: {name} is {text[:20]!r}, expected 1 to {most}")
        return int(text)
