"""Sources of streams in their processes: what fails costs that process alone, and comes back."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.descriptor_parts import count_descriptors
from tests.waiting import bounded, is_running, wait_for

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.streams import source as source_module
from edgekit_runtime.service.streams.source import Frame, FrameSource, find_pause_s
from edgekit_runtime.service.streams.source_kinds import SOURCES, find_kind
from edgekit_runtime.system.child_process import child_environment


class Owner:
    """Notes what its source reports."""

    source: FrameSource
    releases = True

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def on_opened(self) -> None:
        self.events.put_nowait(("opened", self.source.pid))

    def on_frame(self, frame: Frame) -> None:
        self.events.put_nowait(("frame", frame))

    def on_read(self, number: int) -> None:
        self.events.put_nowait(("read", number))

    def on_failure(self, reason: str, retry_s: float | None) -> None:
        self.events.put_nowait(("failure", (reason, retry_s)))

    def on_end(self) -> None:
        self.events.put_nowait(("end", None))

    async def next(self, kind: str) -> Any:
        """Return the next event of a kind; frames before it are released."""
        while True:
            name, value = await asyncio.wait_for(self.events.get(), 60)
            if name == kind:
                return value
            assert name != "failure", value
            if name == "frame" and self.releases:
                value.release()

    async def next_failure(self) -> Any:
        """Return the next failure; frames before it are released."""
        while (event := await asyncio.wait_for(self.events.get(), 60))[0] != "failure":
            if event[0] == "frame":
                event[1].release()
        return event[1]


@pytest.fixture(autouse=True)
def rogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MODULE", "tests.service.rogue_capture")


@contextlib.asynccontextmanager
async def opened(behaviour: str, **options: Any) -> AsyncIterator[tuple[FrameSource, Owner]]:
    owner = Owner()
    stated = StreamOptions(model="m", source=f"rtsp://rogue/{behaviour}", max_pixels=200_000, **options)
    source = owner.source = FrameSource(asyncio.get_running_loop(), stated, owner)
    source.start()
    try:
        yield source, owner
    finally:
        await source.stop()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_frame_stays_as_it_is_until_it_is_released() -> None:
    async def work() -> None:
        async with opened("frames") as (_, owner):
            first = await owner.next("frame")
            second = await owner.next("frame")
            for _ in range(20):
                third = await owner.next("frame")
                third.release()
            assert np.unique(first.array).tolist() == [first.number]
            assert np.unique(second.array).tolist() == [second.number]
            assert third.number >= 22
            assert not first.array.flags.writeable

    run(work)


def test_no_further_frame_comes_while_all_slots_are_in_use() -> None:
    async def work() -> None:
        async with opened("frames") as (_, owner):
            frames = [await owner.next("frame") for _ in range(3)]
            assert owner.events.empty()
            frames[0].release()
            assert (await owner.next("frame")).number == 4

    run(work)


def test_frames_may_change_their_size() -> None:
    async def work() -> None:
        async with opened("resizes") as (_, owner):
            sizes = []
            for _ in range(5):
                frame = await owner.next("frame")
                sizes.append(frame.array.shape)
                frame.release()
            assert sizes == [(size, size + 2, 3) for size in (4, 40, 400, 40, 4)]

    run(work)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("crash", "SIGSEGV: codec: broken"),
        ("stalls", "no frame for 0.3 s"),
        ("closes", "no frame for 0.3 s"),
        ("garbage", "garbage"),
        ("list_instead", "garbage"),
        ("unknown", "'teapot'"),
        ("deep", "garbage"),
        ("huge_shape", "beyond"),
        ("overflowing_shape", "beyond"),
        ("no_pixels", "shape"),
        ("foreign_slot", "slot 7"),
        ("huge_picture", "beyond"),
        ("slot_in_use", "in use"),
        ("text_as_shape", "shape"),
    ],
)
def test_failing_process_is_ended_and_followed_by_another(behaviour: str, reason: str) -> None:
    async def work() -> None:
        async with opened(behaviour, stall_s=0.3) as (_, owner):
            owner.releases = behaviour == "stalls"
            pid = await owner.next("opened")
            stated, retry_s = await owner.next("failure")
            assert reason in stated
            assert retry_s == 0.0
            assert await owner.next("opened") != pid
            assert not Path(f"/proc/{pid}").exists()  # neither running nor a zombie

    run(work)


def test_killed_process_is_followed_by_one_with_frames() -> None:
    async def work() -> None:
        async with opened("frames") as (source, owner):
            (await owner.next("frame")).release()
            os.kill(source.pid, signal.SIGKILL)
            assert (await owner.next("failure"))[0].startswith("the capture process ended by SIGKILL")
            await owner.next("opened")
            assert (await owner.next("frame")).number == 1

    run(work)


def test_starts_and_ends_leave_no_descriptor_and_no_process() -> None:
    async def work() -> None:
        pids = []
        for turn in range(6):
            async with opened("frames") as (source, owner):
                frame = await owner.next("frame")
                pids.append(source.pid)
            del frame, source, owner
            gc.collect()  # owner and source know each other, and the owner has frames
            if turn == 0:
                before = count_descriptors()
        assert count_descriptors() == before
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    run(work)


def test_source_that_was_stopped_does_not_come_back() -> None:
    async def work() -> None:
        async with opened("garbage") as (source, owner):
            await owner.next("failure")
            await source.stop()
            assert source.pid == 0
            assert owner.events.empty()

    run(work)


def test_first_attempt_is_at_once_and_later_pauses_grow_up_to_half_a_minute() -> None:
    pauses = [find_pause_s(failures) for failures in range(1, 15)]
    assert pauses[:4] == [0, 0.25, 0.375, 0.5625]
    assert sum(pauses[:6]) < 3.5
    assert pauses[-1] == find_pause_s(10**9) == 30
    assert find_pause_s(99, 4.0) == 4


def test_source_without_a_first_frame_is_replaced_at_its_deadline_and_later_ones_get_more_time() -> None:
    async def work() -> None:
        async with opened("silent", open_s=2) as (_, owner):
            for _ in range(2):  # nothing has ever come, so each attempt has all of `open_s`
                assert "no frame for 2 s" in (await owner.next_failure())[0]

    run(work)


def test_source_that_fails_again_and_again_is_opened_less_and_less_often() -> None:
    async def work() -> None:
        async with opened("crash") as (_, owner):
            pauses = [(await owner.next_failure())[1] for _ in range(4)]
            assert pauses == [0, 0.25, 0.375, 0.5625]

    run(work)


def test_slow_source_has_three_of_its_own_intervals() -> None:
    async def work() -> None:
        async with opened("slow", stall_s=0.1) as (_, owner):
            numbers = [(await owner.next("frame")).release() for _ in range(5)]
            assert len(numbers) == 5

    run(work)


def test_end_of_a_file_is_no_failure() -> None:
    async def work() -> None:
        owner = Owner()
        options = StreamOptions(model="m", source="/a/ten")
        source = owner.source = FrameSource(asyncio.get_running_loop(), options, owner)
        source.start()
        await owner.next("end")
        assert source.pid == 0
        await source.stop()

    run(work)


async def hold_source() -> None:
    """Print the pid of a capture process, and wait until this process is killed."""
    source_module.MODULE = "tests.service.rogue_capture"  # type: ignore[misc]
    async with opened("frames") as (source, owner):
        await owner.next("frame")
        print(source.pid, flush=True)
        await asyncio.sleep(600)


def test_capture_process_ends_with_a_service_that_is_killed() -> None:
    program = (
        "import asyncio; from tests.service.test_stream_sources import hold_source as f; asyncio.run(f())"
    )
    service = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=child_environment()
    )
    with bounded(service):
        assert service.stdout is not None
        capture = int(service.stdout.readline())
        service.kill()
    wait_for(lambda: not is_running(capture), "the end of the capture process")


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("0", "camera"),
        ("/dev/video2", "camera"),
        ("rtsp://user:secret@camera/1", "network"),
        ("http://camera/video", "network"),
        ("gstreamer:videotestsrc ! appsink", "gstreamer"),
        ("microphone", "microphone"),
        ("microphone:USB", "microphone"),
        ("sound.WAV", "WAV"),
        ("/", "folder"),
        ("yard.mp4", "video file"),
    ],
)
def test_text_of_a_source_says_its_kind(source: str, form: str) -> None:
    assert form in find_kind(SOURCES, source).form


def test_source_of_no_kind_is_refused_with_all_forms() -> None:
    with pytest.raises(ConfigError, match="expected one of") as caught:
        find_kind(SOURCES, "gopher://camera")
    assert all(kind.form in str(caught.value) for kind in SOURCES)
