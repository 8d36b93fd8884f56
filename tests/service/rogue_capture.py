"""A capture process without a decoder, which does what the last word of its source says."""

import functools
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.system.child_process import end_with_parent

if TYPE_CHECKING:
    from edgekit_runtime.service.streams.frame_memory import FrameMemory


class Rogue:
    def __init__(self) -> None:
        end_with_parent()
        self.channel = socket.socket(fileno=int(sys.argv[1]))
        data, self.descriptors, _, _ = socket.recv_fds(self.channel, 1 << 16, 1)
        self.options = from_json(StreamOptions, data, "options")
        self.number = 0
        self.behaviour = self.options.source.rsplit("/", 1)[-1]

    # Without frames it needs no numpy, which takes most of its start.

    @functools.cached_property
    def memory(self) -> "FrameMemory":
        from edgekit_runtime.service.streams.frame_memory import FrameMemory

        return FrameMemory(self.descriptors[0], self.options.frame_bytes)

    @functools.cached_property
    def slots(self) -> int:
        from edgekit_runtime.service.streams.frame_memory import SLOTS

        return SLOTS

    @functools.cached_property
    def free(self) -> set[int]:
        return set(range(self.slots))

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"kind": kind, **fields}).encode())

    def send_frame(self, shape: tuple[int, ...] = (4, 6, 3)) -> None:
        """Send a frame whose pixels are its number; wait for a slot."""
        self.receive(wait=not self.free)
        slot = self.free.pop()
        self.number += 1
        self.memory.frame(slot, shape)[...] = self.number % 256
        fields = {"number": self.number, "slot": slot, "shape": shape, "rate": 0, "at": time.time()}
        self.send("frame", **fields, picture_bytes=0)

    def receive(self, *, wait: bool) -> None:
        """Take in free slots, all that are there."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                document = json.loads(self.channel.recv(1 << 16, flags))
            except BlockingIOError:
                return
            if "free" in document:
                self.free.add(document["free"])
                flags = socket.MSG_DONTWAIT

    def run(self) -> None:
        self.send("opened")
        getattr(self, self.behaviour)()
        time.sleep(600)

    def frames(self) -> None:
        while True:
            self.send_frame()

    def pictures(self) -> None:
        """Send frames with pictures of 200 kB, which are no JPEG."""
        while True:
            self.receive(wait=not self.free)
            slot = self.free.pop()
            self.number += 1
            self.memory.frame(slot, (4, 6, 3))[...] = 0
            fields = {"number": self.number, "slot": slot, "shape": [4, 6, 3], "rate": 0, "at": time.time()}
            self.send("frame", **fields, picture_bytes=200_000)

    def patient(self) -> None:
        while True:
            self.send_frame()
            while len(self.free) < self.slots:
                self.receive(wait=True)

    def skips(self) -> None:
        """Send windows of sound, the third of which is left out."""
        for number in (1, 2, 4, 5):
            slot = self.free.pop()
            self.memory.frame(slot, (8,))[...] = 0
            fields = {"number": number, "slot": slot, "shape": [8], "rate": 1000, "at": time.time()}
            self.send("frame", **fields, picture_bytes=0)
            while len(self.free) < self.slots:
                self.receive(wait=True)

    def ten(self) -> None:
        for _ in range(10):
            self.send_frame()
        self.send("end")

    def crash(self) -> None:
        self.send_frame()
        print("codec: broken", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)

    def silent(self) -> None:
        pass

    def stalls(self) -> None:
        for _ in range(self.slots):
            self.send_frame()

    def slow(self) -> None:
        """Send a frame each half second."""
        while True:
            self.send_frame()
            time.sleep(0.5)

    def closes(self) -> None:
        self.channel.close()

    def garbage(self) -> None:
        self.channel.send(b"\xff\x00 no JSON")

    def list_instead(self) -> None:
        self.channel.send(b"[]")

    def unknown(self) -> None:
        self.send("teapot")

    def deep(self) -> None:
        self.channel.send(b"[" * 60_000)

    def huge_shape(self) -> None:
        self._lie(shape=[100_000, 100_000, 3])

    def overflowing_shape(self) -> None:
        self._lie(shape=[1 << 40, 1 << 40, 3])

    def no_pixels(self) -> None:
        self._lie(shape=[0, 4, 3])

    def foreign_slot(self) -> None:
        self._lie(slot=7)

    def huge_picture(self) -> None:
        self._lie(picture_bytes=1 << 40)

    def slot_in_use(self) -> None:
        self._lie()
        self._lie()

    def text_as_shape(self) -> None:
        self._lie(shape="abc")

    def _lie(self, **changes: Any) -> None:
        fields = {"number": 1, "slot": 0, "shape": [4, 6, 3], "rate": 0, "at": 0.0, "picture_bytes": 0}
        self.send("frame", **{**fields, **changes})

    def resizes(self) -> None:
        for size in (4, 40, 400, 40, 4):
            self.send_frame((size, size + 2, 3))


if __name__ == "__main__":
    Rogue().run()
