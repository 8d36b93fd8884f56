"""A stream as the fleet states it: its source, the model that answers, where answers go."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, to_plain

STREAMS_FILE: Final = "streams.json"
"""In the agent's folder: the streams that the fleet wants, which the service follows."""

MAX_FLEET_STREAMS: Final = 16
MAX_FLEET_STREAMS_BYTES: Final = 8 << 10

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_LOGIN: Final = re.compile(r"(?<=://)\S*@")  # a password may hold slashes and more of @
_SECRET: Final = re.compile(r"(?i)((?:pw|pwd|pass|password|passwd|token|secret|key)=)[^&\s]+")  # of queries


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What a stream reads, which model answers, and where answers go; a part of `StreamOptions`.

    Attributes:
        model: name of the model that answers; it may be swapped while the stream runs.
        source: where frames or sound come from, such as `rtsp://user:password@camera/1`.
        sinks: where answers go, such as `mqtt://broker/yard`.
        every: only each N-th frame goes to the model.
        min_score: results with a lower `score` are left out of answers; None leaves all.
        max_fps: most frames in a second that go to the model; None for no limit.

    Raises:
        ValueError: model or source is empty.
    """

    model: str
    source: str
    sinks: tuple[str, ...] = ()
    every: Annotated[int, Range(1, 1_000_000)] = 1
    min_score: Annotated[float | None, Range(0, 1)] = None
    max_fps: Annotated[float | None, Range(0.001, 1000)] = None

    def __post_init__(self) -> None:
        if not self.model or not self.source:
            raise ValueError("model and source are needed")


def check_fleet_streams(streams: Mapping[str, StreamSettings]) -> None:
    """Check names, texts, number and size of the streams of one device.

    Raises:
        ValueError: they are beyond a limit.
    """
    for name, settings in streams.items():
        texts = (settings.model, settings.source, *settings.sinks)
        if not all(
            text.isprintable() for text in texts
        ):  # nor halves of a UTF-16 pair, which no device takes
            raise ValueError(f"streams.{name[:60]}: model, source or sinks hold what is not printable")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"streams: {name[:60]!r} is no name, expected up to 64 letters, digits, '.', '_', '-'"
            )
    if len(streams) > MAX_FLEET_STREAMS:
        raise ValueError(f"streams: {len(streams)} of them, at most {MAX_FLEET_STREAMS} are allowed")
    size_bytes = len(encode_json(to_plain(streams)))
    if size_bytes > MAX_FLEET_STREAMS_BYTES:
        raise ValueError(f"streams: {size_bytes} bytes, at most {MAX_FLEET_STREAMS_BYTES} are allowed")


def hide_password(text: str) -> str:
    """Return a text without the user names and passwords of addresses in it."""
    return _SECRET.sub(r"\1...", _LOGIN.sub("", text))
