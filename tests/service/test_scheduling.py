"""Decisions of a lane, on a clock that stands still until a test moves it."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.service.scheduling_parts import Bench, FakeSession

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import (
    BackendError,
    ConfigError,
    DataError,
    DeadlineError,
    OverloadedError,
    UnavailableError,
)
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.options.model import SchedulingLimits
from edgekit_runtime.service.scheduling.call import Answer, Call, Run
from edgekit_runtime.tensors import find_shapes

SHORT = {"short_s": 200e-6}


def teach(bench: Bench, seconds: float, times: int = 3) -> None:
    for _ in range(times):
        bench.lane.learn(((1, 2),), seconds)


def test_a_short_model_is_answered_before_submit_returns() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    bench.submit(1)
    assert np.array_equal(bench.client.value(1), [[2, 2]])
    assert not bench.threads.jobs


def test_a_model_that_was_never_measured_goes_to_the_threads_first() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    for value in range(1, 4):
        bench.submit(value)
        assert len(bench.threads.jobs) == 1
        bench.finish()
    bench.submit(4)
    assert not bench.threads.jobs
    assert bench.client.value(4)[0, 0] == 8


def test_a_model_whose_time_grows_moves_to_the_threads() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    bench.session.seconds = 5e-3
    on_loop = 0
    for value in range(20):
        bench.submit(value)
        on_loop += not bench.threads.jobs
        bench.finish()
    assert 1 <= on_loop <= 5


def count_away(bench: Bench, most: int) -> int:
    """Return how many calls in a row run on the threads from now on."""
    for away in range(most):
        bench.submit(1)
        if not bench.threads.jobs:
            return away
        bench.finish()
    return most


def freeze(bench: Bench, seconds: float) -> None:
    """Let one run on the loop take so long."""
    bench.session.seconds = seconds
    bench.submit(1)
    assert not bench.threads.jobs
    bench.session.seconds = 50e-6


def test_one_hiccup_of_the_machine_moves_no_model() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    for value, seconds in enumerate((50e-6, 8e-3, 50e-6, 50e-6)):
        bench.session.seconds = seconds
        bench.submit(value)
        assert not bench.threads.jobs


def test_one_run_that_froze_the_loop_moves_the_model_for_as_long_as_it_cost() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    freeze(bench, 20e-3)
    assert count_away(bench, 10_000) == 500  # at 40 us each


def test_a_model_that_freezes_the_loop_again_stays_away_longer_each_time() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    away = []
    for _ in range(6):
        freeze(bench, 20e-3)
        away.append(count_away(bench, 10_000))
    assert away == [500, 1000, 2000, 4000, 4000, 4000]


def test_a_model_that_is_now_and_then_long_hardly_ever_freezes_the_loop() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    frozen = 0
    for value in range(1, 10_000):
        bench.session.seconds = 50e-6 if value % 500 else 0.6
        bench.submit(1)
        frozen += bench.session.seconds > 0.1 and not bench.threads.jobs
        bench.finish()
    assert frozen == 1


def test_a_batch_that_was_taken_apart_and_froze_the_loop_moves_the_model() -> None:
    bench = Bench(seconds=50e-6, max_batch=2, max_delay_s=1e-3, **SHORT)
    on_loop = []
    for seconds, second in [(50e-6, 2)] * 8 + [(20e-3, -1)] * 4:
        bench.session.seconds = seconds
        bench.submit(1)
        bench.submit(second)
        on_loop.append(not bench.threads.jobs)
        bench.finish()
    assert on_loop[4:] == [True] * 5 + [False] * 3


def test_a_stall_on_the_threads_costs_a_model_no_more_than_its_own_time() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    freeze(bench, 1.0)
    assert count_away(bench, 24_990) == 24_990
    bench.session.seconds = 20e-3
    bench.submit(1)
    bench.finish()
    bench.session.seconds = 50e-6
    assert count_away(bench, 10_000) == 500


def test_a_model_of_a_high_limit_may_take_eight_times_that_on_the_loop() -> None:
    bench = Bench(seconds=5e-3, short_s=10e-3)
    teach(bench, 5e-3)
    for value, seconds in enumerate((5e-3, 70e-3, 5e-3)):
        bench.session.seconds = seconds
        bench.submit(value)
        assert not bench.threads.jobs


def test_a_model_near_the_limit_does_not_come_and_go() -> None:
    bench = Bench(seconds=220e-6, **SHORT)
    teach(bench, 190e-6)
    for value in range(50):
        bench.submit(value)
        assert not bench.threads.jobs  # over the limit, but under where it leaves


def test_a_larger_input_is_measured_for_itself() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    bench.submit(1, rows=1000)
    assert len(bench.threads.jobs) == 1


def test_short_model_with_as_many_values_in_another_shape_is_not_on_the_loop() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    bench.lane.submit(bench.client.call(1, rows=1, width=2))
    assert not bench.threads.jobs
    bench.lane.submit(bench.client.call(2, rows=2, width=1))
    assert len(bench.threads.jobs) == 1


def test_order_in_which_a_client_sends_its_inputs_says_nothing_of_their_shapes() -> None:
    first, second = np.ones((1, 9)), np.ones((9, 1))
    assert find_shapes({"a": first, "b": second}) == find_shapes({"b": second, "a": first})
    assert find_shapes({"a": first, "b": second}) != find_shapes({"a": second, "b": first})


def test_shapes_that_never_end_are_forgotten_and_learnt_again() -> None:
    bench = Bench(seconds=50e-6, **SHORT)
    teach(bench, 50e-6)
    for width in range(3, 300):
        bench.lane.learn(((1, width),), 50e-6)
    bench.submit(1)
    bench.finish()
    assert len(bench.client.answers[1]) == 1


def test_short_s_of_0_runs_nothing_on_the_loop() -> None:
    bench = Bench(seconds=1e-6)
    teach(bench, 1e-6)
    bench.submit(1)
    assert len(bench.threads.jobs) == 1


BLANK = {"x": np.zeros((1, 2), np.float32)}


def test_work_of_a_call_surrounds_its_run_on_the_thread() -> None:
    bench = Bench(seconds=1e-3)
    assert bench.lane.takes_work(BLANK)

    def work(run: Run) -> Answer:
        bench.loop.now_s += 2e-3
        return run({"x": np.full((1, 2), 3, np.float32)})

    bench.submit(0, work=work)
    assert not bench.session.runs
    bench.finish()
    assert bench.session.runs == [[3]]
    assert bench.client.value(0)[0, 0] == 6
    (run,) = bench.metrics.runs.values()
    assert run.merge_s == pytest.approx(2e-3)


def test_work_that_comes_to_no_run_is_refused_and_teaches_nothing() -> None:
    bench = Bench(seconds=1e-3, **SHORT)
    for value in range(5):
        bench.submit(value, work=lambda _: DataError("no picture"))
        assert len(bench.threads.jobs) == 1
        bench.finish()
        assert str(bench.client.error(value)) == "no picture"
    assert (bench.metrics.refused, bench.metrics.failed) == (5, 0)
    assert bench.lane.takes_work(BLANK)


def test_work_that_is_stopped_before_its_run_teaches_nothing() -> None:
    bench = Bench(seconds=1e-3, **SHORT)
    gone: set[int] = set()

    def work(run: Run) -> Answer:
        gone.add(len(gone))
        bench.loop.pass_s(0.3)  # the pool looks after its runs
        return run(BLANK)

    for number in range(5):
        bench.submit(number, work=work, is_unwanted=lambda number=number: number in gone)
        bench.finish()
        assert "the client went" in str(bench.client.error(number))
    assert not bench.session.runs
    assert bench.lane.takes_work(BLANK)  # it is not taken for a model that is done at once


def test_only_a_free_lane_takes_work() -> None:
    bench = Bench()
    bench.submit(1)
    assert not bench.lane.takes_work(BLANK)  # as its instance is busy
    bench.finish()
    assert bench.lane.takes_work(BLANK)
    assert not Bench(max_batch=8).lane.takes_work(BLANK)  # which merges inputs
    short = Bench(seconds=50e-6, **SHORT)
    teach(short, 50e-6)
    assert not short.lane.takes_work(BLANK)  # which runs on the loop


def test_a_lone_call_does_not_wait_for_others() -> None:
    bench = Bench(max_batch=8)
    bench.submit(1)
    assert len(bench.threads.jobs) == 1


def test_calls_that_came_meanwhile_share_a_batch_in_their_order() -> None:
    bench = Bench(max_batch=4)
    for value in range(1, 8):
        bench.submit(value)
    bench.finish()
    assert bench.session.runs == [[1], [2, 3, 4, 5], [6, 7]]
    assert all(bench.client.value(value).tolist() == [[2 * value] * 2] for value in range(1, 8))


def test_without_batching_each_call_runs_alone() -> None:
    bench = Bench()
    for value in range(1, 4):
        bench.submit(value)
    bench.finish()
    assert bench.session.runs == [[1], [2], [3]]


def test_a_model_whose_rows_are_not_free_is_not_batched() -> None:
    bench = Bench()
    fixed = FakeSession(rows=1)
    lane = bench.add_lane((fixed,), bench.metrics, max_batch=8)
    for value in range(3):
        lane.submit(bench.client.call(value))
    bench.finish()
    assert fixed.runs == [[0], [1], [2]]


def test_calls_of_several_rows_share_a_batch_as_far_as_they_fit() -> None:
    bench = Bench(max_batch=4)
    bench.submit(0)
    for value, rows in ((1, 2), (2, 3), (3, 2)):
        bench.submit(value, rows=rows)
    bench.finish()
    assert bench.session.runs == [[0], [1, 1, 3, 3], [2, 2, 2]]
    assert bench.client.value(3).tolist() == [[6, 6], [6, 6]]


def test_a_call_of_more_rows_than_a_batch_runs_alone() -> None:
    bench = Bench(max_batch=2)
    bench.submit(0)
    bench.submit(1, rows=5)
    bench.submit(2)
    bench.finish()
    assert bench.session.runs == [[0], [1] * 5, [2]]


def test_calls_share_a_batch_as_far_as_its_memory_goes() -> None:
    bench = Bench(max_batch=8, max_batch_bytes=16)  # of two calls
    for value in range(1, 5):
        bench.submit(value)
    bench.submit(5, rows=3)
    bench.finish()
    assert bench.session.runs == [[1], [2, 3], [4], [5, 5, 5]]


def test_calls_of_other_sizes_go_in_another_batch() -> None:
    bench = Bench(max_batch=8)
    bench.submit(0)
    for value, width in ((1, 2), (2, 3), (3, 2), (4, 3)):
        bench.submit(value, width=width)
    bench.finish()
    assert bench.session.runs == [[0], [1, 3], [2, 4]]


def test_answers_of_a_batch_are_views_of_one_array() -> None:
    bench = Bench(max_batch=4)
    for value in (0, 1, 2):
        bench.submit(value)
    bench.finish()
    assert bench.client.value(1).base is bench.client.value(2).base is not None


def test_an_input_that_does_not_fit_fails_its_own_call_only() -> None:
    bench = Bench(max_batch=4)
    bench.submit(0)
    bench.submit(1)
    answers: list[Any] = []
    bench.lane.submit(Call({"x": np.zeros((1, 2), np.float64)}, answers.append))
    bench.lane.submit(Call({"z": np.zeros((1, 2), np.float32)}, answers.append))
    bench.finish()
    assert [type(answer) for answer in answers] == [DataError, DataError]
    assert bench.client.value(1)[0, 0] == 2
    assert bench.metrics.refused == 2


def test_a_call_that_the_engine_refuses_fails_no_other_of_its_batch() -> None:
    bench = Bench(max_batch=4)
    for value in (0, 1, -1, 3):
        bench.submit(value)
    bench.finish()
    assert str(bench.client.error(-1)) == "minus one"
    assert [bench.client.value(value)[0, 0] for value in (0, 1, 3)] == [0, 2, 6]
    assert (bench.metrics.succeeded, bench.metrics.failed) == (3, 1)


class Averaging(FakeSession):
    """States free rows, and returns one row whatever it gets."""

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": super().run(inputs)["y"].mean(0, keepdims=True)}


def test_outputs_without_the_rows_of_the_inputs_end_batching(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    session = Averaging()
    lane = bench.add_lane((session,), LaneMetrics("mean", "1"), max_batch=4)
    for value in range(6):
        lane.submit(bench.client.call(value))
    with caplog.at_level(logging.WARNING):
        bench.finish()
    assert [bench.client.value(value)[0, 0] for value in range(6)] == [0, 2, 4, 6, 8, 10]
    assert session.runs == [[0], [1, 2, 3, 4], [1], [2], [3], [4], [5]]
    assert "batching is off" in caplog.text


def test_with_a_delay_calls_wait_until_the_batch_is_full() -> None:
    bench = Bench(max_batch=3, max_delay_s=1.0)
    bench.submit(1)
    bench.submit(2)
    assert not bench.threads.jobs
    bench.submit(3)
    bench.finish()
    assert bench.session.runs == [[1, 2, 3]]


@pytest.mark.parametrize("delay_s", [5e-3, 4e-4])
def test_with_a_delay_an_incomplete_batch_begins_when_it_is_over(delay_s: float) -> None:
    bench = Bench(max_batch=3, max_delay_s=delay_s)
    bench.submit(1)
    bench.loop.pass_s(delay_s / 2)
    bench.submit(2)
    bench.loop.pass_s(delay_s / 2 - 1e-4)
    assert not bench.threads.jobs
    bench.loop.pass_s(2e-4)
    bench.finish()
    assert bench.session.runs == [[1, 2]]


def test_a_short_model_with_a_delay_runs_its_batch_on_the_loop() -> None:
    bench = Bench(max_batch=2, max_delay_s=1.0, seconds=10e-6, **SHORT)
    for _ in range(3):
        bench.lane.learn(((2, 2),), 10e-6)
    bench.submit(1)
    assert bench.client.answers[1] == []
    bench.submit(2)
    assert bench.session.runs == [[1, 2]]
    assert not bench.threads.jobs


def test_a_delay_that_ends_between_two_looks_at_the_clock_is_not_forgotten() -> None:
    for tick_s in np.linspace(1e-6, 1e-4, 200):
        bench = Bench(max_batch=3, max_delay_s=2e-4, tick_s=float(tick_s))
        bench.submit(1)
        bench.submit(2)
        bench.loop.pass_s(1e-3)
        bench.finish()
        assert [value for run in bench.session.runs for value in run] == [1, 2]


def test_a_deadline_cuts_the_delay_so_that_the_call_begins_in_time() -> None:
    bench = Bench(max_batch=8, max_delay_s=1.0)
    bench.submit(1, deadline_s=bench.loop.now_s + 0.02)
    bench.loop.pass_s(0.025)
    bench.finish()
    assert bench.session.runs == [[1]]


def test_a_waiting_loop_does_nothing_while_the_threads_are_busy() -> None:
    bench = Bench(max_batch=2, max_delay_s=1e-3, threads=1)
    other = bench.add_lane((FakeSession(),), LaneMetrics("other", "1"))
    other.submit(bench.client.call(50))
    bench.submit(1)
    bench.loop.pass_s(0.1)
    assert not bench.loop.is_busy
    bench.finish()
    assert bench.session.runs == [[1]]


def test_a_call_that_is_late_on_arrival_is_refused() -> None:
    for bench in (Bench(), Bench(seconds=1e-6, **SHORT)):
        teach(bench, 1e-6)
        bench.submit(1, deadline_s=bench.loop.now_s)
        assert isinstance(bench.client.error(1), DeadlineError)
        assert bench.session.runs == []
        assert bench.metrics.late == 1


def test_a_call_whose_deadline_comes_while_it_waits_is_told_then_and_never_run() -> None:
    bench = Bench()
    bench.submit(1)
    bench.submit(2, deadline_s=bench.loop.now_s + 0.01)
    bench.submit(3)
    bench.loop.pass_s(0.02)
    assert isinstance(bench.client.error(2), DeadlineError)
    bench.finish()
    assert bench.session.runs == [[1], [3]]


def test_a_deadline_that_comes_unnoticed_still_stops_the_run() -> None:
    bench = Bench()
    bench.submit(1)
    bench.submit(2, deadline_s=bench.loop.now_s + 0.01)
    bench.loop.now_s += 0.02  # the loop was busy: its timer has not gone off
    bench.threads.end()
    assert not bench.threads.jobs
    bench.loop.turn()
    assert isinstance(bench.client.error(2), DeadlineError)


def test_a_late_call_is_not_run_when_its_batch_is_taken_apart() -> None:
    bench = Bench(max_batch=4, seconds=0.01)
    bench.submit(0)
    bench.submit(-1)
    bench.submit(2, deadline_s=bench.loop.now_s + 0.015)
    bench.finish()
    assert isinstance(bench.client.error(2), DeadlineError)
    assert (bench.metrics.late, bench.metrics.failed) == (1, 1)


def test_higher_levels_go_first_and_equals_in_their_order() -> None:
    bench = Bench(levels=3, default_level=2)
    for value, priority in ((0, 0), (1, 3), (2, 0), (3, 2), (4, 1), (5, 9)):
        bench.submit(value, priority=priority)
    bench.finish()
    assert bench.session.runs == [[0], [4], [2], [3], [1], [5]]


def test_a_low_level_is_passed_over_only_so_often() -> None:
    bench = Bench(max_passes=2)
    bench.submit(0)
    bench.submit(100, priority=3)
    for value in range(1, 6):
        bench.submit(value, priority=1)
    bench.finish()
    assert bench.session.runs == [[0], [1], [2], [100], [3], [4], [5]]


def test_a_low_level_is_not_starved_by_others_of_its_level_that_ride_along() -> None:
    bench = Bench(max_passes=2, max_batch=2)
    bench.submit(0)
    bench.submit(100, priority=3, width=5)
    for value in range(1, 4):
        bench.submit(value, priority=1)
        bench.submit(value + 10, priority=3)
    for _ in range(4):
        bench.threads.end()
    assert [100] in bench.session.runs


def test_a_full_queue_sheds_with_the_time_that_it_will_take() -> None:
    bench = Bench(max_waiting=2, seconds=0.5)
    bench.submit(0)
    bench.finish()
    for value in (1, 2, 3, 4):
        bench.submit(value)
    error = bench.client.error(4)
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == pytest.approx(2 * 0.5)
    assert bench.metrics.shed == 1
    bench.finish()
    assert bench.session.runs == [[0], [1], [2], [3]]


def test_a_full_queue_sheds_the_youngest_of_the_lowest_level() -> None:
    bench = Bench(max_waiting=3)
    bench.submit(0)
    for value, priority in ((1, 3), (2, 3), (3, 2), (4, 1), (5, 3)):
        bench.submit(value, priority=priority)
    assert isinstance(bench.client.error(2), OverloadedError)
    assert isinstance(bench.client.error(5), OverloadedError)
    bench.finish()
    assert bench.session.runs == [[0], [4], [3], [1]]


def test_as_many_run_at_once_as_there_are_instances() -> None:
    bench = Bench(threads=4, instances=2)
    for value in range(5):
        bench.submit(value)
    assert len(bench.threads.jobs) == 2
    bench.threads.end()
    assert len(bench.threads.jobs) == 2


def test_models_share_the_threads_by_time() -> None:
    bench = Bench(threads=1, seconds=0.03)
    short = FakeSession(bench.loop, 0.01)
    lane = bench.add_lane((short,), LaneMetrics("short", "1"))
    for value in range(40):
        bench.submit(value)
        lane.submit(bench.client.call(1000 + value))
    for _ in range(40):
        bench.threads.end()
    assert len(short.runs) == pytest.approx(30, abs=2)
    assert len(bench.session.runs) == pytest.approx(10, abs=2)


def test_a_model_that_was_idle_saves_up_no_time() -> None:
    bench = Bench(threads=1, seconds=0.01)
    late = FakeSession(bench.loop, 0.01)
    lane = bench.add_lane((late,), LaneMetrics("late", "1"))
    for value in range(40):
        bench.submit(value)
    for _ in range(20):
        bench.threads.end()
    for value in range(20):
        lane.submit(bench.client.call(1000 + value))
    for _ in range(11):
        bench.threads.end()
    assert len(late.runs) == pytest.approx(5, abs=1)


def test_draining_runs_what_waits_without_delay_and_takes_no_more() -> None:
    bench = Bench(max_batch=8, max_delay_s=10.0)
    bench.submit(1)
    bench.submit(2)
    ended: list[bool] = []
    bench.lane.drain(lambda: ended.append(True))
    bench.submit(3)
    assert isinstance(bench.client.error(3), UnavailableError)
    assert not ended
    bench.finish()
    assert ended == [True]
    assert bench.session.runs == [[1, 2]]


def test_draining_an_idle_lane_is_done_at_once() -> None:
    ended: list[bool] = []
    Bench().lane.drain(lambda: ended.append(True))
    assert ended == [True]


def test_draining_ends_after_the_last_answer() -> None:
    bench = Bench()
    order: list[str] = []
    bench.lane.submit(Call({"x": np.zeros((1, 2), np.float32)}, lambda _: order.append("answer")))
    bench.lane.drain(lambda: order.append("drained"))
    bench.finish()
    assert order == ["answer", "drained"]


def test_an_answer_that_cannot_be_delivered_keeps_no_other_from_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(answer: object) -> None:
        raise RuntimeError("the socket is gone")

    bench = Bench(max_batch=4)
    bench.submit(0)
    bench.lane.submit(Call({"x": np.zeros((1, 2), np.float32)}, fail))
    bench.submit(1)
    with caplog.at_level(logging.ERROR):
        bench.finish()
    assert bench.client.value(1)[0, 0] == 2
    assert "the socket is gone" in caplog.text


def test_an_error_of_a_foreign_backend_is_told_as_ours() -> None:
    class Broken(FakeSession):
        def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError("by nought")

    bench = Bench()
    lane = bench.add_lane((Broken(),), bench.metrics)
    lane.submit(bench.client.call(1))
    bench.finish()
    assert isinstance(bench.client.error(1), BackendError)
    assert "ZeroDivisionError: by nought" in str(bench.client.error(1))


def test_a_reply_may_submit_again() -> None:
    bench = Bench()
    again = Call({"x": np.ones((1, 2), np.float32)}, lambda _: bench.submit(7))
    bench.lane.submit(again)
    bench.finish()
    assert bench.client.value(7)[0, 0] == 14


@pytest.mark.parametrize("delay_s", [0.0, 1e-3])
def test_answers_that_each_submit_another_call_do_not_nest(delay_s: float) -> None:
    bench = Bench(seconds=1e-6, max_batch=2, max_delay_s=delay_s, max_waiting=10_000, **SHORT)
    for rows in (1, 2):
        for _ in range(3):
            bench.lane.learn(((rows, 2),), 1e-6)
    left = [5000]

    def again(_: object) -> None:
        if left[0]:
            left[0] -= 1
            bench.lane.submit(Call({"x": np.ones((1, 2), np.float32)}, again))

    again(None)
    for _ in range(20_000):
        bench.loop.now_s += 1e-3
        bench.loop.turn()
    assert left == [0]
    assert bench.metrics.succeeded == 5000


def test_a_long_queue_of_a_model_that_became_short_does_not_nest() -> None:
    bench = Bench(seconds=1e-6, max_waiting=10_000, **SHORT)
    for value in range(5000):
        bench.submit(value)
    bench.finish()
    for _ in range(10_000):
        bench.loop.turn()
    assert bench.metrics.succeeded == 5000


def test_times_and_counts_are_those_of_the_clock() -> None:
    bench = Bench(max_batch=4, seconds=0.5)
    for value in (1, 2, 3):
        bench.submit(value)
    bench.finish()
    metrics = bench.metrics
    assert (metrics.succeeded, metrics.waiting) == (3, 0)
    assert {kind: run.count for kind, run in metrics.runs.items()} == {(1, 1): 1, (2, 2): 1}
    assert metrics.queue.total == pytest.approx(2 * 0.5)
    assert metrics.compute.total == pytest.approx(3 * 0.5)
    assert metrics.total.total == pytest.approx(0.5 + 2 * 1.0)


@pytest.mark.parametrize(
    "fields",
    [{"max_batch": 0}, {"default_level": 4}, {"max_delay_s": -1.0}, {"short_s": float("nan")}],
)
def test_limits_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        from_plain(SchedulingLimits, fields)
