"""Options of a stream, of the file with the fleet's streams, and of the live page."""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from edgekit_runtime.dataclass_json import Range

MAX_PIXELS: Final = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """One stream: the table `[streams.NAME]`.

    Attributes:
        model: name of the model that answers; it may be swapped while the stream runs.
        source: where frames or sound come from; `streams.source_kinds` lists the forms.
        sinks: where answers go; `streams.sinks` lists the forms.
        every: only each N-th frame goes to the model.
        min_score: results with a lower `score` are left out of answers; None leaves all.
        max_fps: most frames in a second that go to the model; None for no limit.
        repeats: whether a file or a folder begins again at its end.
        keeps_all: whether the source waits for the model, so that no frame is left out; None is true for
            pictures and WAV files. A camera cannot wait.
        stall_s: a source that sends nothing for so long is opened again.
        open_s: time limit for opening the source.
        max_pixels: most pixels of a frame; 0 for as many as `[media]` allows.
        window_s, hop_s: length of the sound that the model gets, and how much of it is new each time. None is
            half of it, or all of it for a model that keeps states between windows.
        rate: samples in a second that a microphone is asked for.
        max_queued: most answers that wait for one sink; then the oldest is dropped.
        max_file_bytes, max_files: a file of answers is followed by a new one at this size; so many are kept.

    Raises:
        ValueError: a field is empty or out of range.
    """

    model: str
    source: str
    sinks: tuple[str, ...] = ()
    every: Annotated[int, Range(1, 1_000_000)] = 1
    min_score: Annotated[float | None, Range(0, 1)] = None
    max_fps: Annotated[float | None, Range(0.001, 1000)] = None
    repeats: bool = False
    keeps_all: bool | None = None
    stall_s: Annotated[float, Range(0.1, 3600)] = 3.0
    open_s: Annotated[float, Range(0.1, 3600)] = 10.0
    max_pixels: Annotated[int, Range(0, MAX_PIXELS)] = 0
    window_s: Annotated[float, Range(0.001, 60)] = 1.0
    hop_s: Annotated[float | None, Range(0.001, 60)] = None
    rate: Annotated[int, Range(1000, 192_000)] = 16_000
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
        """The size limit of one frame, or of the sound of one window."""
        return 4 * max(self.max_pixels, math.ceil(self.window_s * 192_000))  # aligned for float32


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStreamOptions:
    """Whether the service runs the streams that the fleet wants.

    Attributes:
        file: the file that the agent writes; None for the one in the state folder where installed models are
            served, empty for none.
        allows_files: whether the fleet's streams may also use sinks `file:` and sources `gstreamer:`, which
            write any file that the user of the service may write.
    """

    file: str | None = None
    allows_files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """The page `/live`.

    Attributes:
        enabled: whether it is there; None is true unless the service can be reached from other machines.
        max_viewers: most clients that read pictures or answers at one time.
        max_fps: most pictures in a second.
        max_side: longer side of the pictures in pixels.
    """

    enabled: bool | None = None
    max_viewers: Annotated[int, Range(1, 1000)] = 8
    max_fps: Annotated[float, Range(0.1, 60)] = 15.0
    max_side: Annotated[int, Range(64, 4096)] = 960
