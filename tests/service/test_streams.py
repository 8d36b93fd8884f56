"""One stream: the newest frame, one at a time; answers to sinks and viewers."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.service.stream_parts import ManualModel

from edgekit_runtime.errors import ConfigError, RequestError, UnavailableError
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.options.http import LiveOptions
from edgekit_runtime.service.streams import source as source_module
from edgekit_runtime.service.streams.stream import Stream, View, drop_low_scores
from edgekit_runtime.service.streams.streams import MAX_STREAMS, Streams
from edgekit_runtime.service.streams.viewers import Viewer


@pytest.fixture(autouse=True)
def rogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MODULE", "tests.service.rogue_capture")


class Reader:
    """A client that reads what a viewer gets, until the streams end."""

    sockets: ClassVar[list[socket.socket]] = []

    def __init__(self, streams: Streams, stream: Stream, view: View = "lines") -> None:
        self.socket, server = socket.socketpair()
        self.sockets.append(self.socket)
        self.socket.setblocking(False)
        self._data = b""
        streams.view(stream, server, b"", view=view)

    async def read(self, count: int) -> bytes:
        """Return so many bytes, or more."""
        while len(self._data) < count:
            loop = asyncio.get_running_loop()
            self._data += await asyncio.wait_for(loop.sock_recv(self.socket, 1 << 20), 60)
        return self._data

    async def next(self) -> Any:
        while b"\n" not in self._data:
            loop = asyncio.get_running_loop()
            data = await asyncio.wait_for(loop.sock_recv(self.socket, 65536), 60)
            if not data:
                return None
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)

    async def next_answer(self) -> Any:
        while (document := await self.next()) is not None and "frame" not in document:
            pass
        return document


@contextlib.asynccontextmanager
async def running(
    behaviour: str = "frames", **options: Any
) -> AsyncIterator[tuple[Streams, Stream, ManualModel]]:
    model = ManualModel()
    streams = Streams(asyncio.get_running_loop(), model, LiveOptions(max_viewers=2))
    stated = {"model": "m", "source": f"rtsp://me:secret@rogue/{behaviour}", "max_pixels": 200_000, **options}
    stream = streams.add("yard", StreamOptions(**stated))
    try:
        yield streams, stream, model
    finally:
        await streams.close()
        while Reader.sockets:
            Reader.sockets.pop().close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


def test_model_gets_one_frame_at_a_time_and_then_the_newest() -> None:
    async def work() -> None:
        async with running() as (_, stream, model):
            first, reply = await model.next()
            await until(lambda: stream.counts["replaced"] > 20)
            assert model.submitted.empty()
            assert np.unique(first).tolist() == [1]
            reply({"detections": []})
            second, _ = await model.next()
            assert second[0, 0, 0] > 20
            assert stream.counts["answered"] == 1

    run(work)


def test_answer_goes_to_viewers_and_sinks_with_its_frame(tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "answers.jsonl"
        async with running(min_score=0.5, sinks=(f"file:{path}",)) as (streams, stream, model):
            reader = Reader(streams, stream)
            _, reply = await model.next()
            found = [{"label": "cat", "score": 0.9}, {"label": "dog", "score": 0.1}]
            reply({"detections": found, "model_version": "2", "times_ms": {"infer": 1.5}})
            answer = await reader.next_answer()
            assert answer["detections"] == found[:1]
            assert (answer["stream"], answer["frame"], answer["width"], answer["height"]) == ("yard", 1, 6, 4)
            assert answer["times_ms"]["infer"] == 1.5
            assert answer["times_ms"]["total"] >= 0
        assert json.loads(path.read_text()) == answer

    run(work)


def test_error_of_the_model_is_stated_once_and_the_stream_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running() as (streams, stream, model):
            reader = Reader(streams, stream)
            for error in (UnavailableError("being swapped", 1.0), UnavailableError("being swapped", 1.0)):
                (await model.next())[1](error)
            (await model.next())[1]({"classes": float("nan")})
            _, reply = await model.next()
            states = [await reader.next() for _ in range(4)]
            assert [state.get("error") for state in states[:3]] == [None, None, "being swapped"]
            messages = [record.getMessage() for record in caplog.records]
            assert messages.count("stream yard: running: being swapped") == 1
            assert "no JSON" in states[3]["error"]
            stream.on_opened()  # a file begins again
            assert "no JSON" in stream.error
            assert stream.counts["failed"] == 3
            reply({"classes": []})
            assert (await reader.next_answer())["classes"] == []
            (entry,) = streams.to_json()
            assert (entry["error"], "no JSON" in entry["last_error"]) == ("", True)

    run(work)


def test_source_that_can_wait_loses_no_frame_while_its_model_is_loaded() -> None:
    async def work() -> None:
        async with running(source="/rogue/patient", all_frames=True) as (streams, stream, model):
            reader = Reader(streams, stream)
            first, reply = await model.next()
            reply(RequestError(503, "being loaded", retry_after_s=1.0))
            again, reply = await model.next()
            assert again is first
            reply({})
            assert (await reader.next_answer())["frame"] == 1
            assert stream.counts["failed"] == 0
            (await model.next())[1](RequestError(400, "no picture"))
            await until(lambda: stream.counts["failed"] == 1)

    run(work)


def test_model_that_refuses_frames_is_asked_again_with_later_ones() -> None:
    async def work() -> None:
        async with running() as (_, stream, model):
            model.refusal = UnavailableError("no model", 1.0)
            await until(lambda: stream.counts["failed"] > 2)
            model.refusal = None
            await model.next()

    run(work)


def test_stream_ends_with_its_file_after_the_last_answer() -> None:
    async def work() -> None:
        async with running(source="/rogue/ten") as (streams, stream, model):
            reader = Reader(streams, stream)
            _, reply = await model.next()
            await until(lambda: stream.state == "ended")
            reply({})
            last, reply = await model.next()
            reply({})
            numbers = []
            while (document := await reader.next()) is not None:
                numbers.append(document.get("frame", document.get("state")))
            assert numbers[-3:] == ["ended", 1, int(last[0, 0, 0])]

    run(work)


def test_source_that_fails_shows_in_the_list_without_its_password() -> None:
    async def work() -> None:
        async with running("crash") as (streams, stream, _):
            await until(lambda: stream.counts["restarts"] > 0)
            (entry,) = streams.to_json()
            assert "codec: broken" in entry["last_error"]
            assert entry["source"] == "rtsp://rogue/crash"
            assert entry["state"] in ("waiting", "running")
            families = {family.name: family.series for family in streams.families()}
            assert families["edgekit_stream_restarts_total"][0][1] >= 1

    run(work)


def test_viewer_of_pictures_gets_them_with_their_answers() -> None:
    async def work() -> None:
        async with running("pictures") as (streams, stream, model):
            reader = Reader(streams, stream, view="pictures")
            (await model.next())[1]({})
            head = (await reader.read(200_000)).partition(b"\r\n\r\n")[0]
            assert b"Content-Type: image/jpeg" in head
            assert b"Content-Length: 200000" in head
            assert json.loads(head.split(b"Edgekit-Answer: ")[1])["frame"] == 1

    run(work)


async def answer_until_trial(model: ManualModel) -> Callable[[Any], None]:
    """Answer for the version in use until the one on trial is asked; return what takes its answer."""
    while True:
        _, reply = await model.next()
        if model.calls[-1 - model.submitted.qsize()].version is not None:
            return reply
        reply({"detections": []})


def read_part(data: bytes) -> Any:
    return json.loads(data.partition(b"\r\n\r\n")[0].split(b"Edgekit-Answer: ")[1])


def test_version_on_trial_answers_only_while_somebody_looks_and_delays_nothing() -> None:
    async def work() -> None:
        async with running("pictures") as (streams, stream, model):
            model.trial = "2"
            for _ in range(3):
                (await model.next())[1]({"detections": []})
            reader = Reader(streams, stream, view="trial")
            assert {call.version for call in model.calls} == {None}
            reply = await answer_until_trial(model)
            answered = stream.counts["answered"]
            for _ in range(3):  # while the version on trial takes its time
                (await model.next())[1]({"detections": []})
            assert [call.version for call in model.calls].count("2") == 1
            reply({"detections": [{"label": "cat", "score": 0.9}]})
            answer = read_part(await reader.read(200_000))
            assert (answer["frame"] <= stream.counts["read"], answer["detections"]) == (True, [])
            cat = {"label": "cat", "score": 0.9}
            assert answer["trial"] == {"model_version": "2", "detections": [cat]}
            assert stream.counts["answered"] == answered + 3

    run(work)


def test_trial_that_fails_is_shown_with_its_error() -> None:
    async def work() -> None:
        async with running("pictures") as (streams, stream, model):
            model.trial = "2"
            reader = Reader(streams, stream, view="trial")
            (await answer_until_trial(model))(UnavailableError("gone"))
            assert read_part(await reader.read(200_000))["trial"] == {"model_version": "2", "error": "gone"}

    run(work)


def test_viewer_of_a_trial_gets_pictures_where_there_is_none() -> None:
    async def work() -> None:
        async with running("pictures") as (streams, stream, model):
            reader = Reader(streams, stream, view="trial")
            (await model.next())[1]({})
            assert "trial" not in read_part(await reader.read(200_000))

    run(work)


def test_slow_viewer_gets_the_newest_chunk_and_no_queue() -> None:
    async def work() -> None:
        reader, server = socket.socketpair()
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()
        viewer = Viewer(loop, server, max_queued=1, timeout_s=60, on_close=lambda _: closed.set())
        for number in range(100):
            viewer.put(b"%03d " % number * 50_000)
        viewer.finish()
        reader.setblocking(False)
        data = b""
        while part := await loop.sock_recv(reader, 1 << 20):
            data += part
        assert len(data) % 200_000 == 0  # whole chunks
        numbers = [int(data[at : at + 3]) for at in range(0, len(data), 200_000)]
        assert numbers == sorted(numbers)
        assert numbers[-1] == 99
        assert len(numbers) < 20  # of a socket's buffer
        assert closed.is_set()
        reader.close()

    run(work)


def test_viewer_that_has_gone_before_its_first_byte_is_forgotten() -> None:
    async def work() -> None:
        async with running() as (streams, stream, _):
            client, server = socket.socketpair()
            client.close()
            streams.view(stream, server, b"head", view="pictures")
            assert stream.to_json()["viewers"] == 0
            streams.check_room()

    run(work)


def test_viewer_that_reads_nothing_is_disconnected() -> None:
    async def work() -> None:
        reader, server = socket.socketpair()
        closed = asyncio.Event()
        viewer = Viewer(
            asyncio.get_running_loop(), server, max_queued=1, timeout_s=0.05, on_close=lambda _: closed.set()
        )
        viewer.put(b"x" * (4 << 20))
        await asyncio.wait_for(closed.wait(), 60)
        viewer.put(b"more")
        reader.close()

    run(work)


def test_states_go_on_with_the_next_frame_unless_something_failed() -> None:
    async def work() -> None:
        async with running() as (_, _, model):
            for answer in ({}, {}, UnavailableError("busy"), {}, {}):
                _, reply = await model.next()
                reply(answer)
            await model.next()
            steps = [call.sequence for call in model.calls]
            assert [step.start for step in steps] == [True, False, False, True, False, False]
            assert len({step.id for step in steps}) == 1

    run(work)


def test_states_begin_again_where_sound_was_left_out() -> None:
    async def work() -> None:
        async with running("skips") as (_, _, model):
            for _ in range(4):
                _, reply = await model.next()
                reply({})
            assert [call.sequence.start for call in model.calls] == [True, False, True, False]

    run(work)


def test_last_line_says_what_each_sink_got(tmp_path: Path) -> None:
    async def work() -> None:
        async with running("ten", sinks=("mqtt://127.0.0.1:1/x", f"file:{tmp_path}/a")) as (
            streams,
            stream,
            model,
        ):
            reader = Reader(streams, stream)
            _, reply = await model.next()
            reply({})
            await reader.next_answer()
            streams.remove("yard")
            lines = []
            while (line := await reader.next()) is not None:
                lines.append(line)
            lost, written = lines[-1]["sinks"]
            assert (lost["written"], lost["waiting"] + lost["dropped"]) == (0, 1)
            assert (written["written"], written["waiting"] + written["dropped"]) == (1, 0)

    run(work)


def test_the_client_that_started_a_stream_is_no_viewer() -> None:
    async def work() -> None:
        async with running() as (streams, stream, _):
            for _ in range(2):
                owner, server = socket.socketpair()
                Reader.sockets.append(owner)
                streams.view(stream, server, b"", on_close=lambda: None)
            streams.check_room()

    run(work)


def test_viewers_beyond_the_limit_are_refused_until_one_goes() -> None:
    async def work() -> None:
        async with running() as (streams, stream, _):
            readers = [Reader(streams, stream) for _ in range(2)]
            with pytest.raises(Exception, match="2 clients"):
                streams.check_room()
            readers[0].socket.close()
            await until(lambda: len(stream.to_json()["sinks"]) == 0 and stream.to_json()["viewers"] == 1)
            streams.check_room()

    run(work)


def test_names_that_are_taken_and_too_many_streams_are_refused() -> None:
    async def work() -> None:
        async with running("silent") as (streams, _, _model):
            options = StreamOptions(model="m", source="rtsp://rogue/silent")
            for name in ("yard", "", "a/b", "a\nb"):
                with pytest.raises(ConfigError):
                    streams.add(name, options)
            with pytest.raises(ConfigError, match="sink"):
                streams.add("other", StreamOptions(model="m", source="0", sinks=("file:/tmp/a", "odd")))
            assert [entry["name"] for entry in streams.to_json()] == ["yard"]
            assert MAX_STREAMS == 64

    run(work)


def test_scores_below_the_limit_are_left_out_of_every_list() -> None:
    answer = {
        "classes": [{"score": 0.2}, {"score": 0.7}],
        "text": "a",
        "values": [1, 2],
        "odd": [{"score": None}],
    }
    assert drop_low_scores(answer, 0.5) == {**answer, "classes": [{"score": 0.7}]}
    assert drop_low_scores(answer, None) == answer


@pytest.mark.parametrize(
    "options",
    [{"model": ""}, {"source": ""}, {"hop_s": 2.0}],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        StreamOptions(**{"model": "m", "source": "0", **options})
