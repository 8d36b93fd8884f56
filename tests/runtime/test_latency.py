import numpy as np
import pytest

from edgekit_runtime.sessions.latency import Latency, LatencyLimits, find_tied, measure_latency

RNG = np.random.default_rng(0)


class FakeClock:
    """A clock that only sessions move."""

    def __init__(self):
        self.now_s = 0.0
        self.calls = []

    def __call__(self):
        return self.now_s

    def session(self, name, *durations_s):
        """A session that takes the given times in turn, and the last one from then on."""
        left = list(durations_s)

        def run():
            self.calls.append(name)
            self.now_s += left.pop(0) if len(left) > 1 else left[0]

        return run


def measure(sessions, clock, **limits):
    return measure_latency(sessions, LatencyLimits(**limits), clock=clock)


def test_warm_up_is_not_counted():
    clock = FakeClock()
    result = measure({"a": clock.session("a", 9, 9, 1)}, clock, warmup_rounds=2, min_rounds=3, max_rounds=3)
    assert result["a"].seconds == (1, 1, 1)


def test_median_and_quartiles_are_those_of_the_rounds():
    clock = FakeClock()
    session = clock.session("a", 5, 1, 2, 4, 3)
    latency = measure({"a": session}, clock, warmup_rounds=0, min_rounds=5, max_rounds=5)["a"]
    assert latency.median_s == 3
    assert latency.quartiles_s == (2, 4)


def test_each_round_runs_every_session_once_in_changing_orders():
    clock = FakeClock()
    sessions = {name: clock.session(name, 1) for name in "abc"}
    measure(sessions, clock, warmup_rounds=0, min_rounds=30, max_rounds=30, time_limit_s=1000)
    rounds = [tuple(clock.calls[start : start + 3]) for start in range(0, 90, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) == 6


def test_short_inference_is_repeated_in_a_row_after_one_that_refills_the_caches():
    clock = FakeClock()
    slow_first = [8, 1, 1, 1, 1]  # others have emptied its caches
    # The first inference of all allocates, the second says how many make a batch.
    sessions = {"a": clock.session("a", 9, 1, *slow_first, *slow_first, 1), "b": clock.session("b", 10)}
    limits = {"warmup_rounds": 1, "min_rounds": 2, "max_rounds": 2, "time_limit_s": 1000, "batch_s": 4}
    result = measure(sessions, clock, **limits)
    assert (result["a"].seconds, result["b"].seconds) == ((1, 1), (10, 10))
    assert (clock.calls.count("a"), clock.calls.count("b")) == (2 + 2 * 5, 2 + 2)


def test_time_limit_ends_the_rounds():
    clock = FakeClock()
    session = clock.session("a", *([1, 2] * 50))
    latency = measure({"a": session}, clock, warmup_rounds=1, min_rounds=2, max_rounds=99, time_limit_s=10)
    assert len(latency["a"].seconds) == 6  # 1 s of warm-up, then rounds start at 1, 3, 4, 6, 7 and 9 s


def test_fewest_rounds_run_whatever_the_time():
    clock = FakeClock()
    latency = measure({"a": clock.session("a", 100)}, clock, min_rounds=4, time_limit_s=1, precision=0)
    assert len(latency["a"].seconds) == 4


def test_steady_latency_ends_the_rounds_early():
    clock = FakeClock()
    latency = measure({"a": clock.session("a", 1)}, clock, min_rounds=2, time_limit_s=1e6, max_rounds=500)
    # The 95 % interval lies between order statistics from 8 rounds on.
    assert len(latency["a"].seconds) == 8


def test_one_unsteady_session_keeps_all_of_them_running():
    clock = FakeClock()
    unsteady = clock.session("b", *([1, 3] * 100))
    result = measure({"a": clock.session("a", 1), "b": unsteady}, clock, max_rounds=50, time_limit_s=1e6)
    assert len(result["a"].seconds) == len(result["b"].seconds) == 50


def test_ratio_is_taken_round_by_round():
    # The machine is ten times slower in half of the rounds; the ratio does not see it.
    reference = Latency((1, 10, 1, 10, 1, 10))
    assert Latency((2, 20, 2, 20, 2, 20)).ratio_to(reference) == 2


def test_ratio_of_different_measurements_is_refused():
    with pytest.raises(ValueError, match="zip"):
        Latency((1, 2)).ratio_to(Latency((1,)))


def noisy(median_s, count=100):
    return Latency(tuple((median_s * RNG.uniform(0.95, 1.05, count)).tolist()))


def test_the_fastest_is_tied_with_nobody_who_is_slower():
    assert find_tied({"a": noisy(2.0), "b": noisy(1.0), "c": noisy(1.5)}) == ["b"]


def test_those_within_two_percent_are_tied_in_the_given_order():
    assert find_tied({"a": noisy(1.01), "b": noisy(1.0), "c": noisy(1.5)}) == ["a", "b"]


def test_a_difference_within_chance_is_a_tie():
    slower = Latency((1.3, 0.8, 1.3, 0.8, 1.3, 0.8, 1.3, 0.8, 1.3))
    assert find_tied({"a": slower, "b": Latency((1.0,) * 9)}) == ["a", "b"]


def test_a_load_that_strikes_all_alike_hides_no_victory():
    load = RNG.uniform(1, 20, 100)
    assert find_tied({"a": Latency(tuple(load * 1.1)), "b": Latency(tuple(load))}) == ["b"]


def test_what_settles_a_session_is_not_timed():
    clock = FakeClock()
    settled = []

    def before_each(name):
        settled.append(name)
        clock.now_s += 100

    limits = LatencyLimits(warmup_rounds=1, min_rounds=4, max_rounds=4, time_limit_s=1e6)
    sessions = {"a": clock.session("a", 1), "b": clock.session("b", 2)}
    result = measure_latency(sessions, limits, clock=clock, before_each=before_each)
    assert (result["a"].seconds, result["b"].seconds) == ((1,) * 4, (2,) * 4)
    assert sorted(settled) == ["a"] * 5 + ["b"] * 5


@pytest.mark.parametrize(
    "limits",
    [
        {"min_rounds": 0},
        {"min_rounds": 9, "max_rounds": 8},
        {"time_limit_s": 0},
        {"batch_s": -1},
        {"batch_s": float("nan")},
    ],
)
def test_impossible_latency_limits_are_refused(limits):
    with pytest.raises(ValueError, match="expected"):
        LatencyLimits(**limits)
