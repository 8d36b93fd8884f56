"""Both versions with the same inputs: in which order, what counts, and that one pair is made at a time."""

import contextlib
import functools
import random
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.service.canary_fakes import Clock, double, fail, inputs, nan
from tests.waiting import wait_for

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.service.rollout.comparison import similarity
from edgekit_runtime.service.rollout.paired_runs import Pair, PairedRuns, run_pair


class Version:
    """A session that takes `seconds` of the clock for each run and says when it has run."""

    def __init__(self, name: str, log: list[str], clock: Clock, seconds: Any = 0.01, compute: Any = double):
        self.name, self.log, self.clock, self.compute = name, log, clock, compute
        self.seconds = seconds if isinstance(seconds, list) else [seconds]

    def run(self, given: Mapping[str, Any]) -> Any:
        self.log.append(self.name)
        self.clock.now_s += self.seconds[min(self.log.count(self.name), len(self.seconds)) - 1]
        answer = self.compute(given)
        if isinstance(answer, EdgekitError):
            raise answer
        return answer


def make(current: Any, candidate: Any, seed: int = 0) -> tuple[Pair | None, list[str]]:
    """Make one pair of versions with the given seconds and computations."""
    log: list[str] = []
    clock = Clock()
    sessions: list[Any] = [
        Version("current", log, clock, *current),
        Version("candidate", log, clock, *candidate),
    ]
    flip = functools.partial(random.Random(seed).randrange, 2)
    pair = run_pair(*sessions, inputs(1.0, 2.0), similarity, flip=flip, clock=clock)
    return pair, log


def test_each_version_has_its_own_time_and_the_order_is_random() -> None:
    firsts = []
    for seed in range(400):
        pair, log = make((0.01,), (0.02,), seed)
        assert pair is not None
        assert (pair.current_s, pair.candidate_s) == pytest.approx((0.01, 0.02))
        assert pair.agreement == 1.0
        firsts.append(log[0])
    assert 150 < firsts.count("current") < 250


def test_of_short_versions_the_second_runs_count() -> None:
    pair, log = make(([1e-4, 5e-5],), ([9e-4, 5e-5],))
    assert pair is not None
    assert (pair.current_s, pair.candidate_s) == pytest.approx((5e-5, 5e-5))
    assert sorted(log) == ["candidate", "candidate", "current", "current"]


def test_waiting_for_a_real_call_is_no_part_of_a_versions_time() -> None:
    log: list[str] = []
    clock = Clock()
    current, candidate = (Version(name, log, clock) for name in ("current", "candidate"))

    @contextlib.contextmanager
    def wait() -> Iterator[None]:
        clock.now_s += 5.0
        yield

    sessions: list[Any] = [current, candidate]
    candidate.alone = wait()  # type: ignore[attr-defined]
    pair = run_pair(*sessions, inputs(1.0), similarity, flip=lambda: 0, clock=clock)
    assert pair is not None
    assert (pair.current_s, pair.candidate_s) == pytest.approx((0.01, 0.01))


@pytest.mark.parametrize("fault", [fail, nan])
@pytest.mark.parametrize("which", [0, 1])
def test_failed_run_makes_no_pair(fault: Any, which: int) -> None:
    versions: list[Any] = [(0.01, double), (0.01, double)]
    versions[which] = (0.01, fault)
    assert make(*versions)[0] is None


class Loop:
    """Does at once what a thread wants done."""

    def __call__(self, work: Any, *arguments: Any) -> None:
        work(*arguments)


def make_runs(compute: Any = double, *, is_busy: bool = False) -> PairedRuns:
    log: list[str] = []
    sessions: list[Any] = [Version(name, log, Clock(), 0.01, compute) for name in ("current", "candidate")]
    return PairedRuns(
        *sessions, similarity, Loop(), is_busy=lambda: is_busy, defer=lambda *_: None, max_run_s=0.0
    )


def test_pair_that_ends_after_the_trial_is_not_told() -> None:
    may_end, has_ended, pairs = threading.Event(), threading.Event(), []

    def compute(given: Mapping[str, Any]) -> Any:
        assert may_end.wait(60)
        return double(given)

    runs = make_runs(compute)
    runs._call_soon = lambda work, *arguments: (work(*arguments), has_ended.set())
    runs.start(inputs(1.0), pairs.append)
    runs.close()
    may_end.set()
    assert has_ended.wait(60)
    runs.start(inputs(1.0), pairs.append)
    assert not pairs


def test_no_pair_is_made_while_real_calls_need_the_processors() -> None:
    assert make_runs().may_start()
    assert not make_runs(is_busy=True).may_start()


def test_outputs_that_cannot_be_compared_make_no_pair_and_the_next_is_made() -> None:
    answers = [{"y": "no array"}] * 4  # both versions of the first pair twice, as they are short
    pairs: list[Pair | None] = []

    def compute(given: Mapping[str, Any]) -> Any:
        return answers.pop() if answers else {"y": np.ones((1, 2), np.float32)}

    runs = make_runs(compute)
    runs.start(inputs(1.0), pairs.append)
    runs.start(inputs(1.0), pairs.append)
    wait_for(lambda: len(pairs) == 2, "both")
    runs.close()
    assert pairs[0] is None
    assert pairs[1] is not None


def test_pair_that_takes_too_long_is_stopped_and_makes_none() -> None:
    is_cancelled, has_ended, pairs = threading.Event(), threading.Event(), []
    timers: list[Any] = []

    def compute(_given: Mapping[str, Any]) -> Any:
        assert is_cancelled.wait(60)
        raise BackendError("cancelled")

    log: list[str] = []
    sessions: list[Any] = [Version(name, log, Clock(), 0.01, compute) for name in ("current", "candidate")]
    for session in sessions:
        session.cancel_runs = is_cancelled.set

    def take(pair: Any) -> None:
        pairs.append(pair)
        has_ended.set()

    def defer(delay_s: float, work: Any) -> Any:
        timers.append((delay_s, work))
        return types.SimpleNamespace(cancel=lambda: None)

    runs = PairedRuns(*sessions, similarity, Loop(), is_busy=lambda: False, defer=defer, max_run_s=30.0)
    runs.start(inputs(1.0), take)
    (delay_s, stop) = timers[0]
    assert delay_s == 30.0
    stop()
    assert has_ended.wait(60)
    assert pairs == [None]
    runs.close()


@pytest.mark.parametrize("can_share", [True, False])
def test_end_of_a_trial_stops_its_pair_but_never_the_runs_of_calls(can_share: bool) -> None:
    has_begun, may_end, cancelled = threading.Event(), threading.Event(), []

    def compute(_given: Mapping[str, Any]) -> Any:
        has_begun.set()
        assert may_end.wait(60)
        raise BackendError("cancelled")

    def make_version(name: str) -> Any:
        version: Any = Version(name, [], Clock(), 0.01, compute)
        version.cancel_runs = lambda: cancelled.append(name)
        return version

    sessions = [make_version("current"), make_version("candidate")]
    for session in sessions if can_share else ():
        session.share = lambda: make_version("shared")
    handle = types.SimpleNamespace(cancel=lambda: None)
    runs = PairedRuns(
        *sessions, similarity, Loop(), is_busy=lambda: False, defer=lambda *_: handle, max_run_s=0.0
    )
    runs.start(inputs(1.0), lambda _pair: None)
    assert has_begun.wait(60)
    runs.close()
    may_end.set()
    assert cancelled == (["shared", "shared"] if can_share else [])
