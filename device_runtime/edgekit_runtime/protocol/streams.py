"""The settings of a stream: its source, its model and the destinations of its answers."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Final

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, to_plain
from edgekit_runtime.records import dataclass

STREAMS_FILE: Final = "streams.json"
"""The file in the agent's folder with the streams of the fleet, which the service runs."""

MAX_PIXELS: Final = 1 << 27
MAX_RATE: Final = 192_000
MAX_FLEET_STREAMS: Final = 16
MAX_FLEET_STREAMS_BYTES: Final = 8 << 10

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_LOGIN: Final = re.compile(r"(?<=://)\S*@")  # a password may hold slashes and more of @
_SECRET: Final = re.compile(r"(?i)((?:pw|pwd|pass|password|passwd|token|secret|key)=)[^&\s]+")  # of queries


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """One stream, as set in the table `[streams.NAME]`, on a command line or by a fleet.

    Attributes:
        model: name of the model that answers, which may be replaced while the stream runs
        source: camera (0 or /dev/videoN), rtsp:// or http:// address, video file, folder of images, WAV file,
            `microphone[:NAME]`, or `gstreamer:PIPELINE ! appsink`
        sinks: destinations of the answers: `mqtt://HOST/TOPIC`, `http://…`, `file:PATH`, `stdout`
        every: send only every N-th frame to the model
        min_score: lowest score of the results in an answer, by default any score
        max_fps: maximum number of frames per second that are sent to the model, by default no limit
        seconds: duration of the stream, by default until its source ends
        repeat: start a file or a folder again at its end
        all_frames: make the source wait for the model, so that no frame is skipped. Default for images and
            WAV files, not possible for a camera
        stall_s: time without a frame after which the source is opened again. A slow source gets three times
            its usual interval between frames
        open_s: longest wait for the first frame. When a source is opened again, the first wait is at least
            3 s, and the wait grows after repeated failures, up to `open_s`
        max_pixels: maximum number of pixels of a frame, or 0 for the limit in `[media]`. A larger image in a
            folder ends the stream
        window_s: length of the sound that the model gets each time
        hop_s: length of the new sound in each window, by default half of the window, or all of it for a model
            with states
        rate: sample rate that is requested from a microphone, in Hz
        max_queued: maximum number of answers that wait for a sink. Beyond it, the oldest is dropped
        max_file_bytes: size at which a new file of answers is started
        max_files: number of files of answers that are kept

    Raises:
        ValueError: A field is empty, or `hop_s` is larger than `window_s`.
    """

    model: str
    source: str
    sinks: tuple[str, ...] = ()
    every: Annotated[int, Range(1, 1_000_000)] = 1
    min_score: Annotated[float | None, Range(0, 1)] = None
    max_fps: Annotated[float | None, Range(0.001, 1000)] = None
    seconds: Annotated[float | None, Range(0.001, 10**9)] = None
    repeat: bool = False
    all_frames: bool | None = None
    stall_s: Annotated[float, Range(0.1, 3600)] = 1.5
    open_s: Annotated[float, Range(0.1, 3600)] = 10.0
    max_pixels: Annotated[int, Range(0, MAX_PIXELS)] = 0
    window_s: Annotated[float, Range(0.001, 60)] = 1.0
    hop_s: Annotated[float | None, Range(0.001, 60)] = None
    rate: Annotated[int, Range(1000, MAX_RATE)] = 16_000
    max_queued: Annotated[int, Range(1, 1 << 20)] = 256
    max_file_bytes: Annotated[int, Range(1024, 1 << 40)] = 64 << 20
    max_files: Annotated[int, Range(1, 1000)] = 5

    def __post_init__(self) -> None:
        if not self.model or not self.source:
            raise ValueError("model and source are needed")
        if self.hop_s is not None and self.hop_s > self.window_s:
            raise ValueError(f"hop_s is {self.hop_s:g}, expected at most window_s, {self.window_s:g}")

    @property
    def frame_bytes(self) -> int:
        """The size limit of one frame, or of the sound of one window, in bytes."""
        return 4 * max(self.max_pixels, math.ceil(self.window_s * MAX_RATE))  # aligned for float32

    def to_json(self) -> dict[str, Any]:
        """Return a dict of the settings that differ from their defaults."""
        plain: dict[str, Any] = to_plain(self)
        return {
            field.name: plain[field.name]
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


def check_fleet_streams(streams: Mapping[str, StreamOptions]) -> None:
    """Check the names, texts, number and size of the streams of one device.

    Raises:
        ValueError: A text contains invalid characters, or a limit `MAX_FLEET_STREAMS*` is exceeded.
    """
    for name, options in streams.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"streams: {name[:60]!r} is no name, expected up to 64 letters, digits, '.', '_', '-'"
            )
        # Nor halves of a UTF-16 pair, which no device takes.
        if not all(text.isprintable() for text in (options.model, options.source, *options.sinks)):
            raise ValueError(f"streams.{name}: model, source or sinks hold unprintable characters")
    size_bytes = len(encode_json({name: options.to_json() for name, options in streams.items()}))
    if len(streams) > MAX_FLEET_STREAMS or size_bytes > MAX_FLEET_STREAMS_BYTES:
        raise ValueError(
            f"streams: {len(streams)} of {size_bytes} bytes, at most {MAX_FLEET_STREAMS} of at most"
            f" {MAX_FLEET_STREAMS_BYTES} bytes are allowed"
        )


def hide_password(text: str) -> str:
    """Remove logins from the URLs in a text, and replace passwords and tokens in queries with `...`."""
    return _SECRET.sub(r"\1...", _LOGIN.sub("", text))
