from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.canary_fakes import Client, FakeLane, double, fail, inputs
from tests.service.scheduling_parts import FakeLoop

from edgekit_runtime.errors import DeadlineError, EdgekitError, OverloadedError
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.resources import CacheLimits
from edgekit_runtime.service.scheduling.call import Call
from edgekit_runtime.service.scheduling.response_cache import CacheLane, ResponseCache

LOOP = FakeLoop()  # where no call has a deadline, nothing happens on it


def outputs(client: Client) -> list[Any]:
    return [mine[0]["y"].tolist() for mine in client.answers]  # type: ignore[call-overload,index]


def test_equal_inputs_are_computed_once() -> None:
    lane, client = FakeLane(), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    for _ in range(3):
        cached.submit(client.call(inputs(1, 2)))
    assert outputs(client) == [[[2, 4]]] * 3
    assert len(lane.calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.float32([[1, 3]])},
        {"x": np.float32([1, 2])},
        {"x": np.int32([[1065353216, 1073741824]])},  # the same bytes
        {"z": np.float32([[1, 2]])},
        {"x": np.float32([[1, 2]]), "z": np.float32([])},
    ],
)
def test_other_inputs_are_computed(other: dict[str, Any]) -> None:
    lane, client = FakeLane(compute=lambda _given: {"y": np.float32([[0]])}), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    cached.submit(client.call(inputs(1, 2)))
    cached.submit(client.call(other))
    assert len(lane.calls) == 2


def test_the_order_and_layout_of_inputs_do_not_matter() -> None:
    lane, client = FakeLane(compute=lambda _given: {"y": np.float32([[0]])}), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    square = np.arange(6, dtype=np.float32).reshape(2, 3)
    cached.submit(client.call({"a": square, "b": square}))
    cached.submit(client.call({"b": square.copy(), "a": np.asfortranarray(square)}))
    assert len(lane.calls) == 1


def test_equal_calls_under_way_are_computed_once() -> None:
    lane, client = FakeLane(held=True), Client()
    cache = ResponseCache()
    cached = CacheLane(cache, lane, LOOP)
    for _ in range(5):
        cached.submit(client.call(inputs(1, 2)))
    lane.release()
    assert outputs(client) == [[[2, 4]]] * 5
    assert (len(lane.calls), cache.joined, cache.misses) == (1, 4, 1)


def test_call_that_others_wait_for_is_wanted_though_its_client_has_gone() -> None:
    lane, client = FakeLane(held=True), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    gone = {0, 2}
    for index in range(3):
        call = client.call(inputs(1, 2))
        call.is_unwanted = lambda index=index: index in gone  # type: ignore[misc]
        cached.submit(call)
    (asked,) = lane.calls
    assert not asked.is_unwanted()
    gone.add(1)
    assert asked.is_unwanted()
    lane.release()


def test_a_call_of_another_priority_does_not_wait_for_the_first() -> None:
    lane, client = FakeLane(held=True), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    cached.submit(client.call(inputs(1, 2)))
    urgent = client.call(inputs(1, 2))
    urgent.priority = 1
    cached.submit(urgent)
    lane.release(1)
    assert [len(mine) for mine in client.answers] == [0, 1]
    lane.release()


def test_an_error_is_not_kept_and_waiting_calls_are_tried_themselves() -> None:
    lane, client = FakeLane(held=True, compute=fail), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    for _ in range(3):
        cached.submit(client.call(inputs(1, 2)))
    lane.release()
    lane.compute = double
    lane.release()
    lane.release()
    assert client.failures == 1
    assert [len(mine) for mine in client.answers] == [1, 1, 1]


class Joining:
    """A cache in front of a lane that has answered nothing yet, with everything fake around it."""

    def __init__(self, **limits: int) -> None:
        self.loop, self.behind, self.client = FakeLoop(), FakeLane(held=True), Client()
        self.metrics = LaneMetrics("model", "1")
        self.lane: CacheLane = CacheLane(
            ResponseCache(), self.behind, self.loop, metrics=self.metrics, clock=self.loop.clock, **limits
        )

    def submit(self, value: float = 1, after_s: float | None = None) -> None:
        deadline_s = None if after_s is None else self.loop.now_s + after_s
        self.lane.submit(self.client.call(inputs(value), deadline_s))

    def found(self) -> list[str]:
        """What each call was answered; an empty text where it waits."""
        return [type(mine[0]).__name__ if mine else "" for mine in self.client.answers]


def test_a_call_that_waits_for_an_equal_one_keeps_its_own_deadline() -> None:
    bench = Joining()
    for after_s in (None, 0.05, None, 0.2, 0.05):
        bench.submit(after_s=after_s)
    bench.loop.pass_s(0.06)
    assert bench.found() == ["", "DeadlineError", "", "", "DeadlineError"]
    bench.loop.pass_s(0.2)
    assert bench.found() == ["", "DeadlineError", "", "DeadlineError", "DeadlineError"]
    bench.behind.release()
    assert bench.client.failures == 3
    assert [len(mine) for mine in bench.client.answers] == [1] * 5
    assert (bench.metrics.late, bench.metrics.cache_hits) == (3, 1)


def test_a_deadline_that_has_come_is_not_waited_with() -> None:
    bench = Joining()
    bench.submit()
    bench.submit(after_s=0.0)
    assert isinstance(bench.client.answers[1][0], DeadlineError)


def test_calls_that_wait_for_equal_ones_are_bounded() -> None:
    bench = Joining(max_waiting=2)
    for value in (1, 2, 1, 2, 1, 3):
        bench.submit(value)
    assert isinstance(bench.client.answers[4][0], OverloadedError)
    assert bench.metrics.shed == 1
    assert len(bench.behind.calls) == 3
    for _ in range(3):
        bench.behind.release()
    bench.submit(4)
    bench.submit(4)  # there is room again
    bench.behind.release()
    assert bench.client.failures == 1


def test_calls_that_were_answered_leave_no_timer() -> None:
    bench = Joining()
    bench.submit()
    bench.submit(after_s=0.05)
    bench.behind.release()
    bench.loop.pass_s(0.1)
    assert bench.client.failures == 0
    assert (bench.metrics.late, bench.metrics.cache_hits) == (0, 1)


def test_answers_from_the_cache_are_counted_with_their_time() -> None:
    bench = Joining()
    bench.submit()
    bench.loop.now_s += 0.25
    bench.submit()
    bench.loop.now_s += 0.5
    bench.behind.release()
    bench.submit()
    assert (bench.metrics.cache_hits, bench.metrics.cache_misses, bench.metrics.answered) == (2, 1, 2)
    assert bench.metrics.answer_histogram().total == 0.5
    assert bench.metrics.last_s == bench.loop.now_s


def test_two_versions_do_not_share_answers() -> None:
    cache, client = ResponseCache(), Client()
    old, new = FakeLane(), FakeLane(compute=lambda given: {"y": given["x"] * 3})
    first, second = CacheLane(cache, old, LOOP), CacheLane(cache, new, LOOP)
    for lane in (first, second, first, second):
        lane.submit(client.call(inputs(1)))
    assert outputs(client) == [[[2]], [[3]], [[2]], [[3]]]


def test_a_closed_version_leaves_nothing_behind() -> None:
    cache, client, lane = ResponseCache(), Client(), FakeLane()
    cached = CacheLane(cache, lane, LOOP)
    cached.submit(client.call(inputs(1)))
    lane.held = True
    cached.submit(client.call(inputs(2)))
    cached.close()
    lane.release()  # after the switch
    assert (cache.held_bytes, cache.to_json()["answers"]) == (0, 0)
    assert all(len(mine) == 1 for mine in client.answers)


def test_the_least_recently_used_answer_goes_first() -> None:
    cache, client, lane = ResponseCache(CacheLimits(max_bytes=2 * (512 + 4))), Client(), FakeLane()
    cached = CacheLane(cache, lane, LOOP)
    for value in (1, 2, 1, 3, 1, 2):
        cached.submit(client.call(inputs(value)))
    assert [float(call.inputs["x"][0, 0]) for call in lane.calls] == [1, 2, 3, 2]
    assert cache.held_bytes == 2 * (512 + 4)


def test_large_inputs_and_answers_pass_by() -> None:
    cache = ResponseCache(CacheLimits(max_bytes=600, max_input_bytes=100))
    client, lane = Client(), FakeLane()
    cached = CacheLane(cache, lane, LOOP)
    for _ in range(2):
        cached.submit(client.call(inputs(*range(26))))  # 104 bytes in
        cached.submit(client.call(inputs(*range(25))))  # 100 bytes in, 100 + 512 out
    assert len(lane.calls) == 4
    assert cache.held_bytes == 0


def test_readers_cannot_change_an_answer() -> None:
    client, lane = Client(), FakeLane()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    for _ in range(2):
        cached.submit(client.call(inputs(1)))
    for (answer,) in client.answers:
        assert not isinstance(answer, EdgekitError)
        with pytest.raises(ValueError, match="read-only"):
            answer["y"][0, 0] = 7
        with pytest.raises(TypeError):
            answer["y"] = answer["y"]  # type: ignore[index]


def test_inputs_that_change_after_the_hash_poison_nothing() -> None:
    client, lane = Client(), FakeLane(held=True)
    cached = CacheLane(ResponseCache(), lane, LOOP)
    shared = bytearray(np.float32([[1]]).tobytes())
    cached.submit(client.call({"x": np.frombuffer(shared, np.float32).reshape(1, 1)}))
    shared[:] = np.float32([[5]]).tobytes()
    lane.release()
    lane.held = False
    cached.submit(client.call(inputs(1)))
    assert outputs(client) == [[[2]], [[2]]]


def test_real_sessions_answer_the_same_from_the_cache() -> None:
    pytest.importorskip("onnxruntime")
    from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

    folder = Path(__file__).parents[2] / "models" / "tiny"
    session = OrtSession(folder / "digits_cnn.onnx", OrtOptions(threads=1))
    image = np.random.default_rng(0).random((1, 1, 8, 8), np.float32)
    lane, client = FakeLane(compute=session.run), Client()
    cached = CacheLane(ResponseCache(), lane, LOOP)
    for _ in range(2):
        cached.submit(client.call({session.inputs[0].name: image}))
    assert len(lane.calls) == 1
    name = session.outputs[0].name
    first, second = (mine[0][name] for mine in client.answers)  # type: ignore[index]
    np.testing.assert_array_equal(first, session.run({session.inputs[0].name: image})[name])
    assert first is second


STEP = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 3)),
    st.sampled_from(["release", "release_last", "hold", "go", "break", "mend", "close"]),
)


@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
@given(steps=st.lists(STEP, max_size=60), max_bytes=st.sampled_from([1, 600, 1200, 1 << 20]))
def test_every_call_is_answered_exactly_once_and_rightly(steps: list[Any], max_bytes: int) -> None:
    cache, client, lane = ResponseCache(CacheLimits(max_bytes=max_bytes)), Client(), FakeLane()
    cached, sent = CacheLane(cache, lane, LOOP), []
    for step in steps:
        match step:
            case ("send", int(value)):
                sent.append(value)
                call: Call = client.call(inputs(value))
                cached.submit(call)
            case "release" | "release_last" if lane.waiting:
                lane.release(0 if step == "release" else -1)
            case "hold" | "go":
                lane.held = step == "hold"
            case "break" | "mend":
                lane.compute = fail if step == "break" else double
            case "close":
                cached.close()
                cached = CacheLane(cache, lane, LOOP)
    lane.held = False
    while lane.waiting:
        lane.release()
    assert [len(mine) for mine in client.answers] == [1] * len(sent)
    for value, (answer,) in zip(sent, client.answers, strict=True):
        assert isinstance(answer, EdgekitError) or answer["y"].tolist() == [[2.0 * value]]
    assert 0 <= cache.held_bytes <= max_bytes
