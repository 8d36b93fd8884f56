"""Runs the capture process of a stream, and restarts it after failures.

If a source fails, stalls or sends invalid data, its process is ended and a new one is started. The delay
before the restart and the time limit for the first frame depend on the number of consecutive failures:

    consecutive failures         0    1    2     3     4     5     6     7    8    9    10   ...  14
    delay before restart, s           0    0.25  0.4   0.6   0.8   1.3   1.9  2.8  4.3  6.4       30
    limit for first frame, s     3    3    3     3     3     4.5   6.8   10 (`open_s`)
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.streams.capture import MAX_PACKET_BYTES
from edgekit_runtime.service.streams.frame_memory import FrameMemory, create_frame_file
from edgekit_runtime.service.streams.source_kinds import SOURCES, find_kind
from edgekit_runtime.system.child_process import ChildProcess

MODULE: Final = "edgekit_runtime.service.streams.capture"
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 30.0
_GROWTH: Final = 1.5
_OPEN_S: Final = 3.0
_PROVEN_S: Final = 2.0  # of frames, after which earlier failures no longer count
_STALL_INTERVALS: Final = 3
_MAX_PACKETS: Final = 16  # per turn of the loop
_VARIABLES: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OPENCV_LOG_LEVEL": "ERROR",
    # Over UDP frames arrive torn on a busy device.
    "OPENCV_FFMPEG_CAPTURE_OPTIONS": "rtsp_transport;tcp",
}

_logger = logging.getLogger(__name__)


def find_pause_s(failures: int, most_s: float = _MAX_PAUSE_S) -> float:
    """Return the delay in seconds after a number of consecutive failures.

    The delay is 0 after the first failure, and at most `most_s`.
    """
    return min(most_s, _FIRST_PAUSE_S * _GROWTH ** min(failures - 2, 99)) if failures > 1 else 0.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Frame:
    """A frame or a window of sound. The capture process can reuse its memory slot after `release`.

    Attributes:
        number: The number of the frame in this source, from 1. Dropped frames are counted too.
        captured_at: The time of capture in seconds since 1970.
        array: The frame as uint8 [height, width, 3] in RGB, or the sound as float32 [samples].
        rate: The number of sound samples per second, or 0 for a picture.
        picture: The frame as JPEG if the stream has viewers, else empty.
        release: Frees the slot. Call it once, after the last use of `array`.
    """

    number: int
    captured_at: float
    array: NDArray[Any]
    rate: int
    picture: bytes
    release: Callable[[], None]


class SourceOwner(Protocol):
    """The callbacks of a source. They are called on the event loop."""

    def on_opened(self) -> None: ...

    def on_frame(self, frame: Frame) -> None:
        """Receive a frame. The owner must call its `release`."""

    def on_read(self, number: int) -> None:
        """Called with the number of the latest frame while frames are dropped."""

    def on_failure(self, reason: str, retry_s: float | None) -> None:
        """Called when the source failed. It is reopened after `retry_s`, or never if `retry_s` is None."""

    def on_end(self) -> None:
        """Called at the end of a file."""


class FrameSource:
    """A source that is read by a capture process. The process is restarted after failures.

    Attributes:
        options: The options for the next start of the process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: StreamOptions, owner: SourceOwner) -> None:
        self._loop, self.options, self._owner = loop, options, owner
        self._failures = 0  # in a row
        self._opening_s = 0.0  # that the last opening took; 0 before the first
        self._process: _CaptureProcess | None = None
        self._ending: set[_CaptureProcess] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._max_side = 0
        self._has_stopped = False

    @property
    def pid(self) -> int:
        """The process id of the capture process, or 0."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start a capture process. Failures are reported to `on_failure` of the owner."""
        self._retry = None
        try:
            self._process = _CaptureProcess(self._loop, self.options, self, self._find_open_s())
        except OSError as cause:
            self.fail(f"the capture process cannot be started: {cause}")
            return
        self._process.send({"max_side": self._max_side})

    def _find_open_s(self) -> float:
        """Return the time limit of the next process for its first frame, in seconds."""
        if not self._opening_s:
            return self.options.open_s
        least_s = max(_OPEN_S, 2 * self._opening_s)
        return min(self.options.open_s, least_s * _GROWTH ** min(max(self._failures - 4, 0), 99))

    def want_pictures(self, max_side: int) -> None:
        """Set the maximum width and height of the JPEG pictures in pixels. 0 means no pictures."""
        self._max_side = max_side
        if self._process is not None:
            self._process.send({"max_side": max_side})

    def end(self) -> None:
        """End the capture process without a restart."""
        self._has_stopped = True
        if self._retry is not None:
            self._retry.cancel()
        self._drop()

    async def stop(self) -> None:
        """End the capture process without a restart, and wait up to 2 s until it has ended."""
        self.end()
        if self._ending:
            await asyncio.wait([process.ended for process in self._ending], timeout=2.0)

    # What the capture process reports

    def on_document(self, document: Mapping[str, Any]) -> None:
        """Handle a JSON document from the capture process.

        Raises:
            ValueError, KeyError, TypeError: The document is malformed.
        """
        process = self._process
        assert process is not None  # noqa: S101  # for the type checker
        match document["kind"]:
            case "opened":
                self._owner.on_opened()
            case "frame":
                frame = process.take(document)
                self._opening_s = process.opening_s
                if process.age_s > self._opening_s + _PROVEN_S:
                    self._failures = 0
                self._owner.on_frame(frame)
            case "beat":
                process.note(int(document["number"]))
                self._owner.on_read(int(document["number"]))
            case "end" if process.is_finite:
                self._drop()
                self._owner.on_end()
            case "end":
                self.fail("the source has ended")
            case "error":
                self.fail(str(document["text"])[:2000], is_final=bool(document["is_final"]))
            case kind:
                raise ValueError(f"a document of the kind {kind!r:.40}")

    def fail(self, reason: str, *, is_final: bool = False) -> None:
        """End a faulty capture process. Restart it after a delay unless `is_final` is True."""
        self._drop()
        self._failures += 1
        delay_s = None if is_final else find_pause_s(self._failures)
        if delay_s is not None and not self._has_stopped:
            self._retry = self._loop.call_later(delay_s, self.start)
        self._owner.on_failure(reason, delay_s)

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._ending.add(process)
            process.ended.add_done_callback(lambda _: self._ending.discard(process))
            process.end()


class _CaptureProcess:
    """A capture process with its channel and its slots.

    Attributes:
        opening_s: The seconds until the first frame, or 0 before it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: StreamOptions, source: FrameSource, open_s: float
    ) -> None:
        """Start the process. `open_s` is the time limit for its first frame in seconds."""
        self._loop, self._options, self._source = loop, options, source
        self._began_s, self.opening_s = loop.time(), 0.0
        self.is_finite = not find_kind(SOURCES, options.source).is_endless
        self.ended: asyncio.Future[None] = loop.create_future()
        self._held_slots: set[int] = set()
        self._is_open = True
        with contextlib.ExitStack() as undo:
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(near.close)
            with far:
                descriptor = create_frame_file(options.frame_bytes)
                try:
                    self._memory = FrameMemory(descriptor, options.frame_bytes)
                    variables = {name: os.environ.get(name, value) for name, value in _VARIABLES.items()} | {
                        "OPENCV_IO_MAX_IMAGE_PIXELS": str(options.max_pixels)
                    }
                    self._child = ChildProcess(MODULE, channel=far, own_session=True, variables=variables)
                    undo.callback(self._child.close)
                    order = json.dumps(to_plain(options)).encode("ascii")
                    socket.send_fds(near, [order], [descriptor])
                finally:
                    os.close(descriptor)
            undo.pop_all()
        near.setblocking(False)
        self._near, self.pid = near, self._child.pid
        self._limit_s = open_s
        self._timer = loop.call_later(open_s, self._look)
        self._number, self._noted_s, self._interval_s = 0, 0.0, 0.0
        loop.add_reader(near.fileno(), self._on_readable)

    def send(self, document: Mapping[str, Any]) -> None:
        """Send a document. A process that does not read it is ended like one that stalls."""
        with contextlib.suppress(OSError):
            self._near.send(json.dumps(document).encode("ascii"))

    def end(self) -> None:
        """Kill the process. `ended` is done when the process has ended and its resources are freed."""
        self._is_open = False
        self._timer.cancel()
        self._loop.remove_reader(self._near.fileno())
        self._near.close()
        self._child.kill()
        self._child.call_at_end(self._loop, lambda _code: self._bury())

    def _bury(self) -> None:
        self._child.close()
        del self._memory  # and with it a descriptor, unless a frame is still in use
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def age_s(self) -> float:
        return self._loop.time() - self._began_s

    def note(self, number: int) -> None:
        """Count frames that were read. The next frames must follow at about the same rate."""
        age_s = self.age_s
        self.opening_s = self.opening_s or age_s
        if self._number and number > self._number:
            interval_s = (age_s - self._noted_s) / (number - self._number)
            self._interval_s += (interval_s - self._interval_s) * (0.2 if self._interval_s else 1.0)
            self._limit_s = max(self._options.stall_s, _STALL_INTERVALS * self._interval_s)
        self._number, self._noted_s = number, age_s
        self._wait()

    def _wait(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(self._limit_s, self._look)

    def take(self, document: Mapping[str, Any]) -> Frame:
        """Return the frame in a slot.

        Raises:
            ValueError, KeyError, TypeError: The document is malformed.
        """
        slot, shape, size_bytes = document["slot"], document["shape"], document["picture_bytes"]
        rate = int(document["rate"])
        is_frame = len(shape) == 1 if rate > 0 else len(shape) == 3 and shape[2] == 3
        if not is_frame or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"a frame of the shape {str(shape)[:60]} and the rate {rate}")
        array = self._memory.frame(slot, shape)
        if slot in self._held_slots:
            raise ValueError(f"slot {slot} is in use")
        array.flags.writeable = False
        picture = bytes(self._memory.picture(slot, size_bytes)) if size_bytes else b""
        self.note(int(document["number"]))
        self._held_slots.add(slot)
        return Frame(
            number=int(document["number"]),
            captured_at=float(document["at"]),
            array=array,
            rate=rate,
            picture=picture,
            release=lambda: self._release(slot),
        )

    def _release(self, slot: int) -> None:
        self._held_slots.discard(slot)
        if self._is_open:
            self._wait()
            self.send({"free": slot})

    def _on_readable(self) -> None:
        for _ in range(_MAX_PACKETS):
            if not self._is_open:
                return
            try:
                data = self._near.recv(MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue  # it ended without reading everything; what it sent before is still there
            if not data:
                self._limit_s = self._options.stall_s
                self._wait()
                self._loop.remove_reader(self._near.fileno())
                self._child.call_at_end(self._loop, lambda _code: self._report_end())  # else it stalls
                return
            try:
                self._source.on_document(json.loads(data))
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as cause:
                self._source.fail(f"the capture process sent garbage: {cause!r:.200}")

    def _report_end(self) -> None:
        if self._is_open:
            self._source.fail(f"the capture process ended {self._child.explain_end()}")

    def _look(self) -> None:
        """End a process that was silent for too long, unless it waits for a free slot."""
        if self._held_slots:
            self._wait()
            return
        self._source.fail(f"no frame for {self._limit_s:.3g} s")
