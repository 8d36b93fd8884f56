import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.canary_fakes import Client, Clock, FakeLane, FakePairs, double, fail, inputs, nan
from tests.service.scheduling_parts import FakeLoop

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.errors import (
    BackendError,
    ConfigError,
    DataError,
    EdgekitError,
    ManifestError,
    RefusedInputError,
)
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.service.rollout.canary_lane import CanaryLane
from edgekit_runtime.service.rollout.comparison import choose_comparison, same_class, similarity
from edgekit_runtime.service.rollout.gates import Promote, Rollback
from edgekit_runtime.service.rollout.observer import Observer
from edgekit_runtime.service.rollout.shadow_lane import ShadowLane
from edgekit_runtime.service.scheduling.drift_lane import DriftLane
from edgekit_runtime.service.scheduling.response_cache import CacheLane, ResponseCache
from edgekit_runtime.tensors import TensorSpec

LOOP = FakeLoop()  # where no call has a deadline, nothing happens on it
# Gates that fake latencies pass and a few answers are enough for.
QUICK = Gates(min_samples=10, max_p99_ratio=0, max_extra_errors=0.4, alpha=0.4)


class Bench:
    """A current version, a candidate, a watch, and a clock."""

    def __init__(self, gates: Gates = QUICK) -> None:
        self.clock = Clock()
        self.current = FakeLane(clock=self.clock, latency_s=0.001)
        self.candidate = FakeLane(clock=self.clock, latency_s=0.001)
        self.verdicts: list[Promote | Rollback] = []
        self.watch = Observer(gates, self.verdicts.append, defer=self.clock.defer, clock=self.clock)
        self.client = Client()
        self.pairs = FakePairs(self.current, self.candidate, self.clock, similarity)

    def canary(self, share: float = 0.5, *, retry: bool = True, compared_share: float = 0.25) -> CanaryLane:
        return CanaryLane(
            *(self.current, self.candidate, self.watch, self.pairs),
            options=CanaryOptions(share=share, compared_share=compared_share, retry=retry),
            clock=self.clock,
        )

    def shadow(self, **options: Any) -> ShadowLane:
        stated = ShadowOptions(**{"share": 1.0, **options})
        return ShadowLane(
            *(self.current, self.candidate, self.watch, self.pairs),
            options=stated,
            defer=self.clock.defer,
            clock=self.clock,
        )

    def send(self, lane: Any, count: int, pause_s: float = 0.01) -> None:
        for number in range(count):
            lane.submit(self.client.call(inputs(1.0, float(number))))
            self.clock.advance(pause_s)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 1.0])
def test_the_candidate_gets_its_share(share: float) -> None:
    bench = Bench(Gates())
    bench.send(bench.canary(share), 1000, 0)
    assert abs(len(bench.candidate.calls) - share * 1000) <= 3
    assert len(bench.current.calls) + len(bench.candidate.calls) == 1000


def test_clients_that_take_turns_get_the_same_share() -> None:
    bench = Bench(Gates())
    lane = bench.canary(0.25)
    of_first = 0
    for number in range(1000):
        before = len(bench.candidate.calls)
        lane.submit(bench.client.call(inputs(1.0)))
        of_first += (number % 2 == 0) and len(bench.candidate.calls) > before
    assert 100 < of_first < 150  # of about 250, half


@pytest.mark.parametrize("fault", [fail, nan])
def test_a_failed_answer_of_the_candidate_is_made_good(fault: Any) -> None:
    bench = Bench(Gates())
    bench.candidate.compute = fault
    bench.send(bench.canary(1.0), 50)
    assert bench.client.failures == 0
    for mine in bench.client.answers:
        (answer,) = mine
        assert not isinstance(answer, EdgekitError)
        assert np.isfinite(answer["y"]).all()


def test_nan_rolls_back_with_the_first_answer() -> None:
    bench = Bench(Gates())
    bench.candidate.compute = nan
    bench.send(bench.canary(1.0), 20)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "not_finite"
    assert len(bench.candidate.calls) == 1
    assert len(bench.current.calls) == 20


def test_a_burst_of_errors_rolls_back() -> None:
    bench = Bench(Gates(error_burst=3))
    bench.candidate.compute = fail
    bench.send(bench.canary(1.0), 20)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "error_burst"
    assert len(bench.candidate.calls) == 3


@pytest.mark.parametrize("fault", [fail, nan])
def test_a_failure_of_both_versions_is_not_the_candidates(fault: Any) -> None:
    bench = Bench(Gates(error_burst=3))
    bench.candidate.compute = bench.current.compute = fault
    bench.send(bench.canary(0.5), 40)
    assert not bench.verdicts


def test_without_retry_the_failed_answer_is_the_clients() -> None:
    bench = Bench(Gates(error_burst=3))
    bench.candidate.compute = fail
    bench.send(bench.canary(1.0, retry=False), 3)
    assert bench.client.failures == 3
    assert bench.verdicts


@pytest.mark.parametrize(
    ("retry", "refusal"),
    [
        (True, EdgekitError("the queue is full")),
        (False, DataError("wrong shape")),
        (False, RefusedInputError("an index beyond the end")),
    ],
)
def test_faults_of_queues_and_clients_are_no_burst(retry: bool, refusal: EdgekitError) -> None:
    bench = Bench(Gates(error_burst=3))
    lane = bench.canary(1.0, retry=retry)
    bench.candidate.compute = lambda _given: refusal
    bench.send(lane, 20)
    assert not bench.verdicts
    assert bench.watch.observed.candidate.failed == 20


def test_after_the_deadline_there_is_no_retry() -> None:
    bench = Bench(Gates())
    bench.candidate.compute = fail
    bench.canary(1.0).submit(bench.client.call(inputs(1.0), deadline_s=bench.clock.now_s + 0.0005))
    assert bench.client.failures == 1
    assert not bench.current.calls


def test_calls_under_way_are_answered_when_the_candidate_is_closed() -> None:
    bench = Bench(Gates())
    bench.candidate.held = True
    lane = bench.canary(1.0)
    bench.send(lane, 5)
    bench.candidate.refuse_all()
    bench.clock.advance(1)
    assert [len(mine) for mine in bench.client.answers] == [1] * 5
    assert bench.client.failures == 0


def test_a_good_canary_is_promoted_once() -> None:
    bench = Bench()
    bench.send(bench.canary(0.5), 1000)
    assert bench.verdicts == [Promote()]


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_canary_with_wrong_answers_is_rolled_back_within_a_hundred_of_them(on_thread: bool) -> None:
    bench = Bench(Gates())
    bench.candidate.compute = lambda given: {"y": given["x"] * -2}
    bench.candidate.held = on_thread
    lane = bench.canary(0.1)
    for _ in range(2000):
        bench.send(lane, 1)
        if bench.candidate.waiting:
            bench.candidate.release()
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "agreement"
    assert len(bench.candidate.calls) <= 100


def test_a_part_of_the_candidates_calls_is_run_again_by_both_versions() -> None:
    bench = Bench(Gates())
    bench.send(bench.canary(0.5, compared_share=0.2), 1000)
    assert abs(len(bench.candidate.calls) - 500) <= 3
    assert abs(bench.pairs.made - 100) <= 3
    assert bench.watch.observed.compared == bench.pairs.made
    assert all(len(mine) == 1 for mine in bench.client.answers)


def test_a_slower_canary_is_rolled_back_by_pairs_alone() -> None:
    bench = Bench(Gates())
    lane = bench.canary(0.5)
    bench.candidate.latency_s = 0.0015
    bench.send(lane, 1000)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "latency_p50"
    assert "1.50 times" in verdict.reason


def test_calls_that_wait_longer_on_one_side_say_nothing_of_a_canary() -> None:
    bench = Bench(Gates(max_duration_s=1e6))
    lane = bench.canary(0.5)
    for number in range(1000):  # the candidate's calls wait in a queue ten times as long as they run
        bench.candidate.held = True
        bench.send(lane, 1, 0)
        if bench.candidate.waiting:
            bench.clock.advance(0.01)
            bench.candidate.release()
        assert not any(isinstance(verdict, Rollback) for verdict in bench.verdicts), number


def test_no_pair_is_made_while_real_calls_come_first() -> None:
    bench = Bench(Gates())
    lane = bench.canary(1.0)
    bench.pairs.is_free = False
    bench.send(lane, 100)
    assert (bench.pairs.made, bench.watch.observed.compared) == (0, 0)
    assert len(bench.candidate.calls) == 8  # and no more before the next pair
    assert lane.to_json()["skipped"] == lane.skipped
    assert abs(lane.skipped - 25) <= 3


def test_many_calls_at_once_get_no_more_wrong_answers_than_one_after_the_other() -> None:
    bench = Bench(Gates())
    bench.candidate.compute = lambda given: {"y": given["x"] * -2}
    bench.candidate.held = True
    bench.send(bench.canary(1.0), 500, 0)
    assert len(bench.candidate.calls) == 9  # 8 that no pair stands for yet, and the one of the pair


@pytest.mark.parametrize("fault", [fail, nan])
def test_failed_pair_does_not_end_the_comparison(fault: Any) -> None:
    bench = Bench(Gates())
    lane = bench.canary(0.5)
    bench.current.compute = fault
    bench.send(lane, 200)
    assert bench.pairs.made == 0
    bench.current.compute = double
    bench.send(lane, 200)
    assert bench.pairs.made > 10


def test_a_canary_without_any_comparison_is_not_promoted() -> None:
    bench = Bench(dataclasses.replace(QUICK, min_samples=5))
    bench.pairs.is_free = False
    bench.send(bench.canary(0.5), 1000)
    assert bench.verdicts == []
    bench.clock.advance(100_000)
    bench.watch.look()
    bench.clock.advance(0)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert (verdict.gate, "over 0 answers" in verdict.reason) == ("agreement", True)


@pytest.mark.parametrize("on_thread", [False, True])
def test_pairs_get_the_inputs_as_they_were_before_the_reply(on_thread: bool) -> None:
    bench = Bench(Gates())
    buffer = bytearray(np.array([[1, 2]], np.float32).tobytes())
    call = bench.client.call({"x": np.frombuffer(buffer, np.float32).reshape(1, 2)})
    reply = call.reply

    def reuse(answer: Any) -> None:
        reply(answer)
        buffer[:] = bytes(len(buffer))

    call.reply = reuse
    bench.candidate.held = on_thread
    bench.canary(1.0, compared_share=1.0).submit(call)
    if on_thread:
        bench.candidate.release()
    (given,) = bench.pairs.given
    np.testing.assert_array_equal(given["x"], [[1, 2]])


def test_a_verdict_falls_when_the_time_is_over_without_calls() -> None:
    bench = Bench()
    bench.canary(0.5)
    bench.clock.advance(100_000)
    bench.watch.look()
    bench.clock.advance(0)
    assert isinstance(bench.verdicts[0], Rollback)


def test_the_shadow_answers_with_the_current_version() -> None:
    bench = Bench(Gates())
    bench.candidate.compute = fail
    bench.send(bench.shadow(), 20)
    assert bench.client.failures == 0
    assert isinstance(bench.verdicts[0], Rollback)


def test_a_shadow_that_disagrees_is_rolled_back() -> None:
    bench = Bench(Gates())
    bench.candidate.compute = lambda given: {"y": given["x"] * -2}
    bench.send(bench.shadow(), 100)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "agreement"


def test_a_shadow_that_agrees_is_promoted() -> None:
    bench = Bench()
    bench.send(bench.shadow(), 300)
    assert bench.verdicts == [Promote()]


def test_the_shadow_sees_the_inputs_as_they_were_before_the_reply() -> None:
    bench = Bench(Gates())
    buffer = bytearray(np.array([[1, 2]], np.float32).tobytes())
    view = np.frombuffer(buffer, np.float32).reshape(1, 2)
    call = bench.client.call({"x": view})
    reply = call.reply

    def reuse(answer: Any) -> None:
        reply(answer)
        buffer[:] = bytes(len(buffer))

    call.reply = reuse
    bench.shadow().submit(call)
    bench.clock.advance(1)
    np.testing.assert_array_equal(bench.candidate.calls[0].inputs["x"], [[1, 2]])
    assert bench.watch.observed.agreement == 1.0


def test_latency_of_a_shadow_is_that_of_pairs() -> None:
    bench = Bench(Gates())
    lane = bench.shadow()
    bench.candidate.held = True
    for _ in range(300):  # each copy waits for a thread ten times as long as it runs
        bench.send(lane, 1, 0.01)
        if bench.candidate.waiting:
            bench.clock.advance(0.01)
            bench.candidate.release()
            bench.clock.advance(0.01)
    assert bench.watch.observed.compared > 100
    assert not any(isinstance(verdict, Rollback) for verdict in bench.verdicts)
    assert bench.watch.to_json()["latency_ratio_p50"] == pytest.approx(1.0, rel=0.02)


def test_large_borrowed_inputs_are_not_copied() -> None:
    bench = Bench(Gates())
    lane = bench.shadow(max_copied_bytes=4)
    lane.submit(bench.client.call({"x": np.frombuffer(bytes(8), np.float32).reshape(1, 2)}))
    bench.clock.advance(1)
    assert not bench.candidate.calls
    assert lane.dropped == 1


def test_shadow_work_waits_for_real_calls_and_is_dropped_first() -> None:
    bench = Bench(Gates())
    lane = bench.shadow(max_wait_s=0.5)
    bench.send(lane, 1, 0)
    bench.current.held = True
    bench.send(lane, 1, 0)
    bench.clock.advance(0.4)
    assert not bench.candidate.calls  # a real call is under way
    bench.clock.advance(0.2)
    bench.current.release()
    bench.clock.advance(1.0)
    assert lane.dropped == 1  # the first waited too long
    assert len(bench.candidate.calls) == 1
    assert lane.under_way == 0


def test_under_steady_load_the_shadow_gets_nothing() -> None:
    bench = Bench(Gates())
    lane = bench.shadow()
    bench.send(lane, 2000, 0.0002)
    assert not bench.candidate.calls
    assert all(len(mine) == 1 for mine in bench.client.answers)
    assert lane.dropped > 1900


def test_a_model_on_a_thread_is_shadowed_too() -> None:
    bench = Bench(Gates())
    bench.current.held = bench.candidate.held = True
    lane = bench.shadow()
    for _ in range(3):
        bench.send(lane, 1, 0)
        bench.current.release()
        bench.clock.advance(0.1)
        bench.candidate.release()
    assert bench.watch.observed.compared == 3


def test_a_failed_current_answer_is_not_held_against_the_candidate() -> None:
    bench = Bench(Gates())
    bench.current.compute = fail
    bench.send(bench.shadow(), 20)
    assert not bench.candidate.calls
    assert bench.client.failures == 20


def test_statistics_say_how_it_stands() -> None:
    bench = Bench(Gates())
    lane = bench.shadow()
    bench.send(lane, 20)
    stated = lane.to_json()
    assert stated["verdict"] == "continue"
    assert "agreement" in stated["undecided"]  # type: ignore[operator]
    assert stated["compared"] == 20
    bench.watch.blame(not_finite=True)
    assert bench.watch.to_json()["gate"] == "not_finite"


@pytest.mark.parametrize("share", [0.0, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    for kind, name in ((CanaryOptions, "share"), (CanaryOptions, "compared_share"), (ShadowOptions, "share")):
        with pytest.raises(ConfigError, match=f"^{name} is {share}, expected"):
            from_plain(kind, {name: share})


STEP = st.one_of(
    st.sampled_from(
        ["send", "send", "release_current", "release_candidate", "wait", "blame", "look", "close"]
    ),
    st.tuples(st.sampled_from(["current", "candidate"]), st.sampled_from([double, fail, nan])),
    st.tuples(st.sampled_from(["hold_current", "hold_candidate"]), st.booleans()),
)


@settings(max_examples=2 * settings().max_examples)  # 200 in the long run
@given(
    steps=st.lists(STEP, max_size=60), is_shadow=st.booleans(), share=st.floats(0.1, 1), retry=st.booleans()
)
def test_every_call_is_answered_exactly_once(
    steps: list[Any], is_shadow: bool, share: float, retry: bool
) -> None:
    bench = Bench(Gates(min_samples=3, error_burst=3, alpha=0.4, max_extra_errors=0.4))
    lane = bench.shadow(share=share) if is_shadow else bench.canary(share, retry=retry)
    actions: dict[str, Callable[[], None]] = {
        "send": lambda: bench.send(lane, 1, 0),
        "release_current": lambda: bench.current.release() if bench.current.waiting else None,
        "release_candidate": lambda: bench.candidate.release(-1) if bench.candidate.waiting else None,
        "wait": lambda: bench.clock.advance(0.01),
        "blame": lambda: bench.watch.blame(not_finite=True),
        "look": bench.watch.look,
        "close": bench.candidate.refuse_all,
    }
    for step in steps:
        if isinstance(step, str):
            actions[step]()
        elif step[0].startswith("hold"):
            getattr(bench, step[0].removeprefix("hold_")).held = step[1]
        else:
            getattr(bench, step[0]).compute = step[1]
    bench.current.held = bench.candidate.held = False
    while bench.current.waiting or bench.candidate.waiting:
        bench.candidate.refuse_all()
        while bench.current.waiting:
            bench.current.release()
    bench.clock.advance(10)
    assert [len(mine) for mine in bench.client.answers] == [1] * len(bench.client.answers)
    assert len(bench.verdicts) <= 1
    if is_shadow and bench.current.compute is double and all(step != ("current", fail) for step in steps):
        assert bench.client.failures == 0


def cached_canary(bench: Bench, **options: Any) -> CanaryLane:
    """A canary over two versions, each with a cache in front of it."""
    cache = ResponseCache()
    lanes = [CacheLane(cache, one, LOOP, clock=bench.clock) for one in (bench.current, bench.candidate)]
    stated = CanaryOptions(**{"share": 0.5, **options})
    return CanaryLane(*(lanes[0], lanes[1], bench.watch, bench.pairs), options=stated, clock=bench.clock)


def test_answers_from_a_cache_do_not_count_in_a_canary() -> None:
    bench = Bench(Gates(min_samples=20))
    lane = cached_canary(bench, compared_share=1e-4)
    bench.candidate.latency_s = 0.2  # 200 times as slow, but only in the five runs that there are
    for number in range(2000):
        lane.submit(bench.client.call(inputs(1.0, float(number % 5))))
        bench.clock.advance(0.01)
    assert not bench.verdicts
    observed = bench.watch.observed
    assert (observed.candidate.answers, observed.current.answers) == (5, 5)
    assert observed.candidate.latency.count == 5


def test_answers_from_a_cache_are_compared_too() -> None:
    bench = Bench(Gates())
    lane = cached_canary(bench)
    bench.candidate.compute = lambda given: {"y": given["x"] * -2}
    for _ in range(200):
        lane.submit(bench.client.call(inputs(1.0)))
        bench.clock.advance(0.01)
    (verdict,) = bench.verdicts
    assert isinstance(verdict, Rollback)
    assert verdict.gate == "agreement"


@pytest.mark.parametrize("retry", [True, False])
def test_nan_in_a_cache_counts_once_and_is_made_good(retry: bool) -> None:
    bench = Bench(Gates())
    bench.candidate.compute = bench.current.compute = nan
    lane = cached_canary(bench, retry=retry)
    for _ in range(100):
        lane.submit(bench.client.call(inputs(float("nan"))))
        bench.clock.advance(0.01)
    assert (bench.watch.observed.candidate.answers, bench.watch.observed.current.answers) == (1, 1)
    assert not bench.verdicts


@pytest.mark.parametrize("which", ["current", "candidate"])
def test_answers_from_a_cache_do_not_count_in_a_shadow(which: str) -> None:
    bench = Bench(Gates(min_samples=20))
    cached = CacheLane(ResponseCache(), getattr(bench, which), LOOP, clock=bench.clock)
    setattr(bench, which, cached)
    lane = bench.shadow()
    for number in range(200):
        lane.submit(bench.client.call(inputs(1.0, float(number % 5))))
        bench.clock.advance(0.01)
    assert bench.client.failures == 0
    assert bench.watch.observed.compared == 5
    assert (bench.watch.observed.candidate.answers, bench.watch.observed.current.answers) == (5, 5)
    assert lane.dropped == 0


def test_lanes_stand_in_front_of_each_other() -> None:
    """A canary in front of two versions, each with drift statistics in front of a cache."""
    bench, cache = Bench(Gates()), ResponseCache()
    spec = TensorSpec("x", "float32", ("N", 2))
    stacks, drifts = [], []
    for behind in (bench.current, bench.candidate):
        drifts.append(Drift([spec], [TensorSpec("y", "float32", ("N", 2))], {}))
        stacks.append(DriftLane(drifts[-1], CacheLane(cache, behind, LOOP)))
    options = CanaryOptions(share=0.5)
    lane = CanaryLane(*stacks, bench.watch, bench.pairs, options=options, clock=bench.clock)
    for number in range(400):
        lane.submit(bench.client.call(inputs(1.0, float(number % 10))))
    for number, mine in enumerate(bench.client.answers):
        (answer,) = mine
        assert not isinstance(answer, EdgekitError)
        assert answer["y"].tolist() == [[2.0, 2.0 * (number % 10)]]
    assert cache.misses == len(bench.current.calls) + len(bench.candidate.calls) == 20
    assert all(drift.looked_at >= 1 for drift in drifts)


CLASSES = TensorSpec("y", "float32", ("N", 10))
BOXES = TensorSpec("boxes", "float32", (1, 100, 4))


@pytest.mark.parametrize(
    ("output", "figures", "name", "found"),
    [
        (CLASSES, {"score": {"metric": "top1"}}, None, ("agreement", False)),
        (CLASSES, {"score": {"metric": "agreement"}, "class_output": "y"}, None, ("agreement", False)),
        (CLASSES, {"reference": {"outputs": {"y": {"classes": []}}}}, None, ("agreement", False)),
        (CLASSES, {"score": {"metric": "similarity"}}, None, ("similarity", False)),
        (CLASSES, {"score": {"metric": "detections"}}, None, ("similarity", False)),
        (CLASSES, {"score": {"metric": "own.py:score (sha256 0)"}}, None, ("agreement", True)),
        (CLASSES, {"score": {"metric": "top1"}}, "similarity", ("similarity", False)),
        (CLASSES, {}, "agreement", ("agreement", False)),
        (BOXES, {"score": {"metric": "agreement"}}, None, ("similarity", False)),
        (CLASSES, {}, None, ("agreement", True)),
        # Packages without `class_output`: the metric may have been chosen by the shape.
        (CLASSES, {"score": {"metric": "agreement"}}, None, ("agreement", True)),
        (CLASSES, {"reference": {"outputs": {"y": {"low": 0}}}}, None, ("agreement", True)),
        (CLASSES, {"class_output": "other", "score": 3, "reference": []}, None, ("agreement", True)),
    ],
)
def test_the_comparison_is_what_is_declared_else_a_guess_that_says_so(
    output: TensorSpec, figures: dict[str, Any], name: str | None, found: tuple[str, bool]
) -> None:
    comparison = choose_comparison([output], figures, name=name)
    assert (comparison.name, comparison.is_guess) == found
    stated = comparison.to_json()
    assert (stated["name"], stated["guessed"]) == found
    assert stated["reason"]


def test_classes_are_compared_by_the_best_one_and_other_values_by_their_difference() -> None:
    one, other = {"y": np.float32([[0, 1]])}, {"y": np.float32([[0, 9]])}
    assert choose_comparison([CLASSES], {}).compare(one, other) == 1.0
    assert choose_comparison([CLASSES], {}, name="similarity").compare(one, other) == 0.0


@pytest.mark.parametrize(
    ("name", "message"), [("agreement", "class scores"), ("top3", "expected 'agreement'")]
)
def test_a_comparison_that_cannot_be_made_is_refused(name: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        choose_comparison([BOXES], {}, name=name)


def test_agreement_is_the_share_of_equal_best_classes() -> None:
    current = np.float32([[0, 1], [1, 0], [0, 1], [1, 0]])
    assert same_class(current, np.float32([[0, 2], [2, 0], [2, 0], [2, 0]])) == 0.75
    assert same_class(current, current[:2]) == 0.0


def test_a_version_with_other_outputs_agrees_on_nothing() -> None:
    for compare in (choose_comparison([CLASSES], {}).compare, similarity):
        assert compare({"y": np.float32([[0, 1]])}, {"z": np.float32([[0, 1]])}) == 0.0


def test_similarity_is_one_for_equal_outputs_and_falls_with_the_difference() -> None:
    one = {"y": np.float32([3, 4]), "n": np.int64([1, 2])}
    assert similarity(one, one) == 1.0
    assert similarity(one, {**one, "y": np.float32([3, 4.5])}) == pytest.approx(0.95)  # of 0.9 and 1
    assert similarity(one, {**one, "n": np.int64([1, 9])}) == 0.75
    assert similarity(one, {"y": np.float32([3, 4, 5])}) == pytest.approx((2 / 3 + 0) / 2)  # of y and n
    assert similarity(one, {"y": np.float32([[3, 4]])}) == 0.0


def test_real_sessions_of_one_model_agree() -> None:
    pytest.importorskip("onnxruntime")
    from pathlib import Path

    from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

    folder = Path(__file__).parents[2] / "models" / "tiny"
    sessions = [OrtSession(folder / "digits_cnn.onnx", OrtOptions(threads=1)) for _ in range(2)]
    with np.load(folder / "digits_cnn.eval.npz") as data:
        (images,) = [data[name] for name in data.files if name != "y"]
    bench = Bench(Gates(max_p99_ratio=0, max_p50_ratio=0))
    for lane, session in zip((bench.current, bench.candidate), sessions, strict=True):
        lane.compute = session.run
    compare = choose_comparison(sessions[0].outputs, {})
    bench.pairs.compare = compare.compare
    options = ShadowOptions(share=1.0)
    shadow = ShadowLane(
        *(bench.current, bench.candidate, bench.watch, bench.pairs),
        options=options,
        defer=bench.clock.defer,
        clock=bench.clock,
    )
    for image in images:
        shadow.submit(bench.client.call({sessions[0].inputs[0].name: image[None].astype(np.float32)}))
        bench.clock.advance(0.01)
    assert bench.watch.observed.agreement == bench.watch.observed.compared == len(images)
    assert not any(isinstance(answer, BackendError) for mine in bench.client.answers for answer in mine)


class Holder:
    """The states of one sequence, 7, or of none."""

    def __init__(self, *, is_active: bool) -> None:
        self.is_active = is_active

    def holds(self, sequence_id: int | str) -> bool:
        return self.is_active and sequence_id == 7


def canary_of_sequences(bench: Bench, *, held_by: str = "", share: float = 1.0) -> CanaryLane:
    holders: Any = tuple(Holder(is_active=held_by == name) for name in ("current", "candidate"))
    return CanaryLane(
        *(bench.current, bench.candidate, bench.watch, bench.pairs),
        options=CanaryOptions(share=share, compared_share=0.25, retry=True),
        sequences=holders,
        clock=bench.clock,
    )


def send_step(bench: Bench, lane: CanaryLane, *, start: bool = False) -> None:
    call = bench.client.call(inputs(1.0))
    call.sequence = SequenceStep(7, start=start)
    lane.submit(call)


@pytest.mark.parametrize(("held_by", "share"), [("current", 1.0), ("candidate", 0.01)])
@pytest.mark.parametrize("start", [False, True])
def test_steps_go_to_the_version_that_has_the_sequence(held_by: str, share: float, start: bool) -> None:
    bench = Bench()
    lane = canary_of_sequences(bench, held_by=held_by, share=share)
    for _ in range(20):
        send_step(bench, lane, start=start)
    calls = {"current": bench.current.calls, "candidate": bench.candidate.calls}
    assert len(calls[held_by]) == 20
    assert sum(map(len, calls.values())) == 20


def test_a_share_of_sequences_begins_with_the_candidate() -> None:
    bench = Bench(Gates())
    lane = canary_of_sequences(bench, share=0.25)
    for _ in range(400):
        send_step(bench, lane, start=True)
    assert 90 <= len(bench.candidate.calls) <= 101


def test_a_step_that_the_candidate_fails_is_not_asked_of_a_version_without_its_states() -> None:
    bench = Bench(Gates(error_burst=1000))
    bench.candidate.compute = fail
    send_step(bench, canary_of_sequences(bench, held_by="candidate"))
    assert (bench.client.failures, len(bench.current.calls)) == (1, 0)


def test_a_first_step_that_the_candidate_fails_begins_with_the_current_version() -> None:
    bench = Bench(Gates(error_burst=1000))
    bench.candidate.compute = fail
    send_step(bench, canary_of_sequences(bench), start=True)
    assert (bench.client.failures, len(bench.current.calls)) == (0, 1)


def test_after_a_rollback_the_current_version_gets_all_steps() -> None:
    bench = Bench(Gates(error_burst=1))
    bench.candidate.compute = fail
    lane = canary_of_sequences(bench, held_by="candidate")
    for _ in range(3):
        send_step(bench, lane)
    assert (len(bench.candidate.calls), len(bench.current.calls)) == (1, 2)
