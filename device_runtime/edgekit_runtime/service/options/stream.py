"""Options of the file with the fleet's streams, and of the live page."""

from typing import Annotated

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass


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
