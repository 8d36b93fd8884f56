"""All streams of the service, from its configuration and from clients."""

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from edgekit_runtime.errors import ConfigError, RequestError
from edgekit_runtime.protocol.streams import MAX_PIXELS, StreamOptions
from edgekit_runtime.service.observability.prometheus import MetricFamily
from edgekit_runtime.service.options.http import LiveOptions
from edgekit_runtime.service.options.resources import MediaLimits
from edgekit_runtime.service.streams.sinks import open_sink
from edgekit_runtime.service.streams.source_kinds import SOURCES, find_kind
from edgekit_runtime.service.streams.stream import Calls, Stream, View, fit_windows
from edgekit_runtime.service.streams.viewers import Viewer

MAX_STREAMS: Final = 64
_VIEWER_TIMEOUT_S: Final = 10.0
_MAX_LINES: Final = 256  # of answers that wait for one client

_logger = logging.getLogger(__name__)


class Streams:
    """The streams by name. The object is used on the event loop.

    Attributes:
        max_pixels: The maximum number of pixels of a frame, for streams that do not set a limit.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: Calls,
        live: LiveOptions,
        media: MediaLimits | None = None,
    ) -> None:
        """Create the object without streams. `media` limits the inputs of models, and `live` the viewers."""
        self.max_pixels = min((media or MediaLimits()).max_pixels, MAX_PIXELS)
        self._loop, self._calls, self._live = loop, calls, live
        self._streams: dict[str, Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._viewers = 0
        self._is_closed = False

    def add(self, name: str, options: StreamOptions) -> Stream:
        """Start a stream.

        Raises:
            ConfigError: The source, a sink or the name is invalid, the name is in use, or the number of
                streams is at its limit.
        """
        if name in self._streams or not name or "/" in name or not name.isprintable():
            raise ConfigError(f"streams: the name {name[:60]!r} is taken, or holds a slash or nothing")
        if self._is_closed or len(self._streams) >= MAX_STREAMS:
            raise ConfigError(f"streams: there are {MAX_STREAMS} already, the limit, or the service stops")
        find_kind(SOURCES, options.source)  # before a sink begins
        options = dataclasses.replace(options, max_pixels=options.max_pixels or self.max_pixels)
        sinks = []
        try:
            for text in options.sinks:
                sinks.append(open_sink(text, name, options))  # noqa: PERF401  # those before one that fails end
        except ConfigError:
            for sink in sinks:
                sink.stop()
            raise
        stream = Stream(name, options, loop=self._loop, calls=self._calls, sinks=sinks, live=self._live)
        self._streams[name] = stream
        stream.start()
        return stream

    def add_all(self, options: Mapping[str, StreamOptions]) -> None:
        """Start the streams of the configuration.

        Raises:
            ConfigError: As in `add`. The message includes the name of the stream.
        """
        for name, stream_options in options.items():
            try:
                self.add(name, stream_options)
            except ConfigError as cause:  # noqa: PERF203
                raise ConfigError(f"streams.{name}: {cause}") from cause

    def remove(self, name: str) -> None:
        """Stop the stream `name` if it exists, without waiting. The name can be used again at once."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            task = self._loop.create_task(stream.stop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Stop all streams, and wait until they have ended."""
        self._is_closed = True
        for name in list(self._streams):
            self.remove(name)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._calls.close()

    def has(self, name: str) -> bool:
        return name in self._streams

    def find(self, name: str) -> Stream:
        """Return the stream `name`.

        Raises:
            RequestError: The stream does not exist.
        """
        stream = self._streams.get(name)
        if stream is None:
            names = ", ".join(sorted(self._streams)[:20]) or "none"
            raise RequestError(404, f"stream '{name[:60]}' is unknown, there are: {names}")
        return stream

    def check_model(self, options: StreamOptions) -> None:
        """Check that the options of a stream suit its model. If the model is not loaded, nothing is checked.

        Raises:
            RequestError: See `fit_windows`.
        """
        fit_windows(options, self._calls)

    def check_room(self) -> None:
        """Check that another viewer is allowed.

        Raises:
            RequestError: The maximum number of viewers is reached (503).
        """
        if self._viewers >= self._live.max_viewers:
            raise RequestError(503, f"{self._viewers} clients look at streams, the limit", retry_after_s=5)

    def view(
        self,
        stream: Stream,
        connected: socket.socket,
        head: bytes,
        *,
        view: View = "lines",
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Send the pictures or answers of a stream to a client until it disconnects.

        Args:
            stream: The stream.
            connected: The socket of the client. This object closes it.
            head: The head of the HTTP response, including the empty line. It is sent first.
            view: `lines` sends answers, and `pictures` sends pictures with answers. `trial` also adds the
                answers of the version on trial.
            on_close: Called when the client has disconnected. Set this for the client that started the
                stream. Such a client is not counted as a viewer.
        """
        counted = int(on_close is None)

        def forget(viewer: Viewer) -> None:
            self._viewers -= counted
            stream.remove_viewer(viewer)
            if on_close is not None:
                on_close()

        self._viewers += counted
        viewer = Viewer(
            self._loop,
            connected,
            # A late picture is worth nothing.
            max_queued=_MAX_LINES if view == "lines" else 1,
            timeout_s=_VIEWER_TIMEOUT_S,
            on_close=forget,
        )
        viewer.put(head)
        if viewer.is_open:  # the client may have gone before the head
            stream.add_viewer(viewer, view)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the list of streams with their statistics."""
        return [self._streams[name].to_json() for name in sorted(self._streams)]

    def families(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all streams."""
        stated = self.to_json()

        def gather(read: Callable[[Mapping[str, Any]], float]) -> tuple[tuple[dict[str, str], float], ...]:
            return tuple(
                ({"stream": entry["name"], "model": entry["model"]}, read(entry)) for entry in stated
            )

        frames = tuple(
            ({"stream": entry["name"], "outcome": outcome}, float(count))
            for entry in stated
            for outcome, count in entry["frames"].items()
        )
        dropped = tuple(
            ({"stream": entry["name"], "sink": sink["sink"]}, float(sink["dropped"]))
            for entry in stated
            for sink in entry["sinks"]
        )
        up = gather(lambda entry: float(entry["state"] == "running"))
        fps = gather(lambda entry: entry["fps"])
        seconds = gather(lambda entry: entry["times_ms"].get("total", 0.0) / 1000)
        restarts = gather(lambda entry: float(entry["restarts"]))
        yield MetricFamily("edgekit_stream_up", "gauge", "1 while frames come.", up)
        yield MetricFamily("edgekit_stream_answers_per_second", "gauge", "Answers in a second, of late.", fps)
        yield MetricFamily(
            "edgekit_stream_latency_seconds",
            "gauge",
            "From a frame's capture to its answer, of late.",
            seconds,
        )
        yield MetricFamily("edgekit_stream_frames_total", "counter", "Frames by what became of them.", frames)
        yield MetricFamily(
            "edgekit_stream_restarts_total", "counter", "How often a source was opened again.", restarts
        )
        yield MetricFamily(
            "edgekit_stream_dropped_answers_total", "counter", "Answers that a sink never got.", dropped
        )
