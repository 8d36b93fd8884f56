"""The capture process of a stream, which opens the source and writes its frames to shared memory.

The process sends JSON documents to the service: `opened`, `frame` with the number of its memory slot, `beat`
(a heartbeat) while frames are dropped, and finally `end` or `error`. It receives the numbers of free slots,
and the size of the pictures if the stream has viewers. If a decoder crashes, only this process ends.
The memory of the process is limited.
"""

import contextlib
import json
import os
import resource
import socket
import time
from typing import Any, Final

from numpy.typing import NDArray

from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.streams.frame_memory import PICTURE_BYTES, SLOTS, FrameMemory
from edgekit_runtime.service.streams.source_kinds import SOURCES, Capture, CaptureError, find_kind
from edgekit_runtime.system.child_process import open_channel

MAX_PACKET_BYTES: Final = 64 << 10
_MAX_DATA_BYTES: Final = 1 << 30  # of decoders: frames of 4K need a third of it
_MAX_LOG_BYTES: Final = 1 << 18  # decoders may complain about each frame for months
_BEAT_S: Final = 0.5
_LATE_S: Final = 1.0  # a file that lags this far behind its rate continues from here
_QUALITY: Final = 75


class _Capturer:
    def __init__(self, channel: socket.socket, memory: FrameMemory, options: StreamOptions) -> None:
        self._channel, self._memory, self._options = channel, memory, options
        self._kind = find_kind(SOURCES, options.source)
        self._waits = self._kind.keeps_all(options)
        self._free = set(range(SLOTS))
        self._max_side = 0  # of pictures; 0 while nobody looks
        self._model_due_s = self._beat_due_s = 0.0
        self._number = 0

    def run(self) -> None:
        """Read the source until its end, if it has one."""
        while True:
            capture = self._kind.open(self._options)
            self._send(kind="opened")
            has_frames = self._read_all(capture)
            if self._kind.is_endless or not (self._options.repeat and has_frames):
                break
        self._send(kind="end")

    def _read_all(self, capture: Capture) -> bool:
        """Send all frames of an open source. Return whether there were any."""
        interval_s = 0.0 if self._kind.is_endless or self._waits or not capture.fps else 1 / capture.fps
        due_s = time.monotonic()
        before = self._number
        while (frame := capture.read()) is not None:
            if interval_s:  # a file plays at its own rate, as a camera would
                due_s = max(due_s + interval_s, time.monotonic() - _LATE_S)
                self._sleep_until(due_s)
            self._number += 1
            if self._is_due():
                self._put(frame, capture.rate)
        return self._number > before

    def _is_due(self) -> bool:
        """Return whether the options allow sending the current frame to the model."""
        now_s, options = time.monotonic(), self._options
        is_due = (self._number - 1) % options.every == 0
        if is_due and options.max_fps is not None:
            interval_s = 1 / options.max_fps
            if self._waits:
                self._sleep_until(self._model_due_s)
                now_s = time.monotonic()
            # A frame may come a little early, so that 30 a second of a camera that has 30 are all of them.
            is_due = now_s >= self._model_due_s - interval_s / 10
            if is_due:
                self._model_due_s = max(self._model_due_s + interval_s, now_s - interval_s / 10)
        return is_due or self._beat(now_s)

    def _sleep_until(self, due_s: float) -> None:
        while (rest_s := due_s - time.monotonic()) > 0:
            self._beat(time.monotonic())
            time.sleep(min(rest_s, _BEAT_S))

    def _beat(self, now_s: float) -> bool:
        """Report that frames arrive. Return False."""
        if now_s >= self._beat_due_s:
            self._beat_due_s = now_s + _BEAT_S
            self._send(kind="beat", number=self._number)
        return False

    def _put(self, frame: NDArray[Any], rate: int) -> None:
        captured_at = time.time()
        self._receive(until_free=SLOTS if self._waits else 0)
        if not self._free:
            self._beat(time.monotonic())
            return
        slot = self._free.pop()
        shape = frame.shape if rate else (*frame.shape[:2], 3)
        if not rate and shape[0] * shape[1] > self._options.max_pixels:
            raise ValueError(f"frames have {shape[1]} x {shape[0]} pixels, over {self._options.max_pixels}")
        view = self._memory.frame(slot, shape)
        if rate:
            view[...] = frame
        else:
            self._convert(frame, view)
        picture_bytes = 0 if rate else self._draw_picture(frame, slot)
        self._send(
            kind="frame",
            number=self._number,
            slot=slot,
            shape=shape,
            rate=rate,
            at=captured_at,
            picture_bytes=picture_bytes,
        )

    def _convert(self, frame: NDArray[Any], view: NDArray[Any]) -> None:
        import cv2

        grey = frame.ndim == 2 or frame.shape[2] == 1
        cv2.cvtColor(frame, cv2.COLOR_GRAY2RGB if grey else cv2.COLOR_BGR2RGB, dst=view)

    def _draw_picture(self, frame: NDArray[Any], slot: int) -> int:
        """Write the JPEG of a frame if the stream has viewers. Return its size, or 0."""
        if not self._max_side:
            return 0
        import cv2

        scale = self._max_side / max(frame.shape[:2])
        if scale < 1:
            frame = cv2.resize(frame, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        _, encoded = cv2.imencode(".jpg", frame, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        if len(encoded) > PICTURE_BYTES:
            return 0
        self._memory.picture(slot, len(encoded))[:] = encoded.reshape(-1).data
        return len(encoded)

    def _send(self, **document: Any) -> None:
        self._channel.send(json.dumps(document).encode("ascii"))

    def _receive(self, until_free: int) -> None:
        """Handle the documents that have arrived, and wait until the given number of slots is free."""
        while True:
            flags = 0 if len(self._free) < until_free else socket.MSG_DONTWAIT
            try:
                data = self._channel.recv(MAX_PACKET_BYTES, flags)
            except BlockingIOError:
                return
            if not data:
                os._exit(0)  # the service has ended
            document = json.loads(data)
            if "free" in document:
                self._free.add(document["free"])
            else:
                self._max_side = document["max_side"]


def _confine() -> None:
    limits = {
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_DATA: _MAX_DATA_BYTES,
        resource.RLIMIT_FSIZE: _MAX_LOG_BYTES,  # of its standard error, the only file that it writes
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        with contextlib.suppress(OSError, ValueError):
            bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (bound, hard))


def main() -> None:
    """Read the source of one stream and send its frames, until the source or the service ends.

    The first argument is the descriptor of the channel to the service. The service sends the options and the
    memory for frames. Errors are sent as `error` documents.
    """
    channel = open_channel()
    data, descriptors, _, _ = socket.recv_fds(channel, MAX_PACKET_BYTES, 1)
    _confine()
    options = from_json(StreamOptions, data, "the stream")
    memory = FrameMemory(descriptors[0], options.frame_bytes)
    os.close(descriptors[0])
    try:
        _Capturer(channel, memory, options).run()
    except Exception as error:  # also of a decoder
        is_final = isinstance(error, CaptureError) or not find_kind(SOURCES, options.source).is_endless
        document = {"kind": "error", "text": str(error)[:2000] or repr(error), "is_final": is_final}
        channel.send(json.dumps(document).encode("ascii"))


if __name__ == "__main__":
    main()
