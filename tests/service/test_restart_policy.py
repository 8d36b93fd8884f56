"""When workers are started again, and when their version is given up: without processes or clocks."""

import pytest

from edgekit_runtime.service.options.model import Isolation
from edgekit_runtime.service.workers.restart_policy import End, RestartDecision, RestartPolicy


def ends(policy: RestartPolicy, end: End, times: int, lived_s: float = 1.0) -> list[RestartDecision]:
    return [policy.decide(end, lived_s) for _ in range(times)]


def started(**isolation: float) -> RestartPolicy:
    policy = RestartPolicy(Isolation(**isolation))  # type: ignore[arg-type]
    policy.note_ready()
    return policy


def test_first_load_fails_after_three_crashes() -> None:
    assert [one.fails_load for one in ends(RestartPolicy(Isolation()), End.CRASH, 3)] == [False, False, True]


def test_first_load_fails_at_once_where_the_worker_refuses_the_model() -> None:
    assert RestartPolicy(Isolation()).decide(End.REFUSED).fails_load
    assert not started().decide(End.REFUSED).fails_load


def test_first_load_fails_after_seven_refusals_of_the_system_and_about_eight_seconds() -> None:
    decisions = ends(RestartPolicy(Isolation()), End.UNAVAILABLE, 7)
    assert [one.fails_load for one in decisions] == [*[False] * 6, True]
    assert sum(one.delay_s for one in decisions[:-1]) == pytest.approx(7.75)


def test_restarts_wait_longer_after_each_crash() -> None:
    decisions = ends(started(max_delay_s=2.0, max_crashes=6), End.CRASH, 7)
    assert [one.delay_s for one in decisions] == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert [one.is_loop for one in decisions] == [*[False] * 5, True, True]


def test_crashes_become_a_loop_and_a_long_life_ends_it() -> None:
    policy = started(max_crashes=3)
    assert [one.is_loop for one in ends(policy, End.CRASH, 4)] == [False, False, True, True]
    assert policy.decide(End.CRASH, lived_s=60.0) == RestartDecision()


@pytest.mark.parametrize("end", [End.TRAP, End.UNAVAILABLE, End.TRIAL])
def test_what_is_no_fault_of_the_version_is_never_a_loop(end: End) -> None:
    policy = started(max_crashes=1)
    assert not any(one.is_loop or one.fails_load for one in ends(policy, end, 100))


def test_traps_are_delayed_by_themselves_and_trials_not_at_all() -> None:
    policy = started()
    assert [one.delay_s for one in ends(policy, End.TRAP, 3)] == [0.0, 0.25, 0.5]
    assert [one.delay_s for one in ends(policy, End.TRIAL, 3)] == [0.0, 0.0, 0.0]
    assert policy.decide(End.CRASH, 1.0).delay_s == 0.0


def test_refusals_of_the_system_add_to_the_delay_until_a_worker_is_ready() -> None:
    policy = started()
    ends(policy, End.CRASH, 2)
    assert policy.decide(End.UNAVAILABLE).delay_s == 0.5
    policy.note_ready()
    assert policy.decide(End.UNAVAILABLE).delay_s == 0.5
