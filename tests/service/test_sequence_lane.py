"""The lane of sequences over a lane that answers when the test says so."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edgekit_runtime.errors import BackendError, EdgekitError, OverloadedError, RequestError
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.sequence_lane import SequenceLane, SequenceLimits
from edgekit_runtime.tensors import TensorSpec

INPUTS = (TensorSpec("x", "float32", ("N", 1)), TensorSpec("h", "float32", ("N", 1)))
STATE_BYTES = 4


class Sums(Lane):
    """Answers hn = y = h + x, at once or when `answer` is called.

    Attributes:
        calls: those without an answer.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.waits, self.calls = waits, list[Call]()
        self.error: EdgekitError | None = None

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        if not self.waits:
            self.answer()

    def answer(self) -> None:
        """Answer the oldest call."""
        call = self.calls.pop(0)
        total = call.inputs["h"] + call.inputs["x"]
        call.reply(self.error or {"y": total, "hn": total})

    def attempt(self, inputs: Mapping[str, Any]) -> Answer:
        return {"y": inputs["h"] + inputs["x"]}


class Bench:
    """A lane of sequences, its clock, and the answers that clients got."""

    def __init__(self, *, waits: bool = False, **limits: Any) -> None:
        self.now_s = 0.0
        self.sums, self.metrics = Sums(waits=waits), LaneMetrics("sums", "1")
        stated = {
            "max_sequences": 8,
            "max_bytes": 8 * STATE_BYTES,
            "idle_s": 60.0,
            "max_waiting": 4,
            **limits,
        }
        self.lane = SequenceLane(
            *(self.sums, [RecurrentState("hn", "h")], INPUTS, SequenceLimits(**stated)),
            metrics=self.metrics,
            clock=lambda: self.now_s,
        )
        self.answers: list[Answer] = []

    def send(self, value: float, sequence_id: int | str, *, rows: int = 1, **flags: bool) -> None:
        inputs = {"x": np.full((rows, 1), value, np.float32)}
        step = SequenceStep(sequence_id, **flags)
        self.lane.submit(Call(inputs, self.answers.append, sequence=step))

    @property
    def values(self) -> list[float | type[EdgekitError]]:
        return [
            type(answer) if isinstance(answer, EdgekitError) else float(answer["y"][0, 0])
            for answer in self.answers
        ]


def test_requests_of_a_sequence_run_in_order_and_those_of_others_beside_them() -> None:
    bench = Bench(waits=True)
    bench.send(1, "a", start=True)
    bench.send(2, "a")
    bench.send(10, "b", start=True)
    assert [float(call.inputs["x"][0, 0]) for call in bench.sums.calls] == [1, 10]
    for _ in range(3):
        bench.sums.answer()
    assert bench.values == [1, 10, 3]


def test_a_second_start_begins_again() -> None:
    bench = Bench()
    bench.send(1, 7, start=True)
    bench.send(2, 7, start=True)
    bench.send(3, 7)
    assert bench.values == [1, 2, 5]


def test_a_start_behind_an_end_begins_again() -> None:
    bench = Bench(waits=True)
    bench.send(1, 7, start=True, end=True)
    bench.send(2, 7, start=True)
    bench.send(3, 7)
    for _ in range(3):
        bench.sums.answer()
    assert bench.values == [1, 2, 5]


def test_a_request_behind_an_end_is_refused() -> None:
    bench = Bench(waits=True)
    bench.send(1, 7, start=True, end=True)
    bench.send(2, 7)
    bench.sums.answer()
    assert bench.values == [1, RequestError]
    assert bench.lane.to_json()["active"] == 0


def test_a_request_that_fails_leaves_the_states_as_they_were() -> None:
    bench = Bench()
    bench.send(1, 7, start=True)
    bench.sums.error = BackendError("out of memory")
    bench.send(2, 7)
    bench.sums.error = None
    bench.send(3, 7)
    assert bench.values == [1, BackendError, 4]


def test_a_first_request_that_fails_begins_no_sequence() -> None:
    bench = Bench(waits=True)
    bench.sums.error = BackendError("out of memory")
    bench.send(1, 7, start=True)
    bench.send(2, 7)
    bench.sums.answer()
    assert bench.values == [BackendError, RequestError]
    assert bench.lane.to_json() == {"active": 0, "held_bytes": 0, "started": 1, "expired": 0}


def test_a_backend_that_returns_no_state_is_an_error_of_the_call() -> None:
    bench = Bench(waits=True)
    bench.send(1, 7, start=True)
    bench.sums.calls.pop().reply({"y": np.ones((1, 1), np.float32)})
    bench.send(2, 7)
    assert bench.values == [BackendError, RequestError]


def test_an_unknown_sequence_is_told_to_start() -> None:
    bench = Bench()
    bench.send(1, "seven")
    assert "must set sequence_start" in str(bench.answers[0])
    assert bench.metrics.refused == 1


def test_a_sequence_beyond_the_limit_is_refused_until_one_ends() -> None:
    bench = Bench(max_sequences=2)
    for name in "abc":
        bench.send(1, name, start=True)
    refusal = bench.answers[2]
    assert isinstance(refusal, OverloadedError)
    assert "max_sequences is 2" in str(refusal)
    assert refusal.retry_after_s == 60
    bench.send(1, "a", end=True)
    bench.send(1, "c", start=True)
    assert bench.values == [1, 1, OverloadedError, 2, 1]


def test_an_idle_sequence_makes_room_and_is_unknown_then() -> None:
    bench = Bench(max_sequences=2)
    bench.send(1, "a", start=True)
    bench.now_s = 30.0
    bench.send(1, "b", start=True)
    bench.now_s = 60.5
    bench.send(1, "c", start=True)
    bench.send(1, "a")
    bench.send(1, "b")
    assert bench.values == [1, 1, 1, RequestError, 2]
    assert bench.lane.to_json()["expired"] == 1


def test_a_sequence_that_was_idle_for_too_long_is_unknown_without_another() -> None:
    bench = Bench()
    bench.send(1, "a", start=True)
    bench.now_s = 60.5
    bench.send(1, "a")
    assert bench.values == [1, RequestError]


def test_figures_count_no_sequence_that_was_idle_for_too_long() -> None:
    bench = Bench()
    bench.send(1, "a", start=True)
    bench.now_s = 60.5
    assert bench.lane.to_json() == {"active": 0, "held_bytes": 0, "started": 1, "expired": 1}


def test_sequences_without_an_end_hold_no_more_than_the_limit() -> None:
    bench = Bench(max_sequences=16, max_bytes=16 * STATE_BYTES)
    for number in range(1, 10_001):
        bench.send(1, number, start=True)
    assert bench.values.count(OverloadedError) == 10_000 - 16
    assert bench.lane.to_json()["held_bytes"] == 16 * STATE_BYTES
    bench.now_s = 61.0
    for number in range(1, 17):
        bench.send(1, f"new {number}", start=True)
    assert bench.values[-16:] == [1] * 16
    assert bench.lane.to_json()["active"] == 16


def test_sequences_of_many_rows_count_by_the_bytes_of_their_states() -> None:
    bench = Bench(max_bytes=3 * STATE_BYTES)
    bench.send(1, "a", start=True, rows=2)
    bench.send(1, "b", start=True, rows=2)
    bench.send(1, "c", start=True)
    assert bench.values == [1, OverloadedError, 1]
    assert bench.lane.to_json()["active"] == 2


def test_rows_that_the_sequence_does_not_have_are_refused() -> None:
    bench = Bench()
    bench.send(1, 7, start=True, rows=2)
    bench.send(1, 7, rows=3)
    bench.send(1, 7, rows=2)
    assert "shape [2, 1], and these inputs need [3, 1]" in str(bench.answers[1])
    assert float(bench.answers[2]["y"][1, 0]) == 2  # type: ignore[index]  # no error


def test_calls_that_wait_in_sequences_are_bounded() -> None:
    bench = Bench(waits=True)
    bench.send(1, 7, start=True)
    for _ in range(6):
        bench.send(1, 7)
    assert bench.values == [OverloadedError] * 2
    assert bench.metrics.shed == 2


def test_a_thousand_calls_that_wait_are_refused_together() -> None:
    bench = Bench(waits=True, max_waiting=1000)
    bench.send(1, 7, start=True)
    for _ in range(1000):
        bench.send(1, 7)
    bench.sums.waits = False  # as a lane that is drained: it answers at once
    bench.sums.error = BackendError("unloaded")
    bench.sums.answer()
    assert bench.values == [BackendError, *[RequestError] * 1000]


def test_a_stored_state_holds_no_batch_in_memory() -> None:
    bench = Bench(waits=True)
    bench.send(1, 7, start=True)
    batch = np.ones((64, 1), np.float32)
    bench.sums.calls.pop().reply({"y": batch[:1], "hn": batch[:1]})
    bench.send(1, 7)
    assert bench.sums.calls[0].inputs["h"].base is None


@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_of_its_own_begins_with_zeros(rows: int) -> None:
    bench = Bench()
    inputs = {"x": np.ones((rows, 1), np.float32)}
    attempted = bench.lane.attempt(inputs)
    assert isinstance(attempted, Mapping)
    assert attempted["y"].tolist() == inputs["x"].tolist()
    bench.lane.submit(Call(inputs, bench.answers.append))
    assert bench.values == [1]
