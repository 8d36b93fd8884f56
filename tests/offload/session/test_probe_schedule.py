"""When the link is probed, what a probe says, and when a local run begins: on a simulated clock."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.offload.choose import PlanChoice, choose
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.link_estimate import Exchange, LinkEstimate
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.offload.probe_schedule import HedgePolicy, ProbeSchedule, ReplyWait

PROBE_BYTES = 12 << 10
RTT_S = 0.02
LOCAL = OffloadPlan("local", PlanCosts(0.46))
UPLOAD = OffloadPlan("upload", PlanCosts(0.008, 0.02, 307_600, 4_400), tail="upload")
TABLE = CutTable((LOCAL, UPLOAD))


def exchange(mbit_s: float, size_bytes: float, late_s: float = 0.0) -> Exchange:
    return Exchange(
        upload_bytes=size_bytes,
        download_bytes=0,
        elapsed_s=RTT_S + size_bytes * 8 / mbit_s / 1e6 + late_s,
        server_s=0.0,
        window_bytes=1e9,
    )


def estimate_of(mbit_s: float) -> LinkEstimate:
    estimate = LinkEstimate()
    estimate.note_round_trip(RTT_S)
    for at in range(5):
        estimate.note(float(at), exchange(mbit_s, 100_000))
    return estimate


def probe_until(end_s: float, took_s: float = 0.1) -> list[float]:
    """Return when probes end on a link that stays bad from 0 on."""
    schedule, now_s, found = ProbeSchedule(0.0), 0.0, []
    while now_s < end_s:
        if schedule.is_due(now_s, is_busy=False):
            now_s += took_s
            schedule.note_probe(now_s, took_s)
            found.append(now_s)
        now_s += 0.01
    return found


@pytest.mark.parametrize("bad_s", [1.0, 6.0, 60.0, 600.0, 7200.0])
def test_better_link_is_noticed_after_a_twentieth_of_the_time_that_it_was_bad(bad_s: float) -> None:
    next_s = next(at for at in probe_until(1.2 * bad_s + 70) if at >= bad_s)
    assert next_s - bad_s <= min(max(0.05 * bad_s, 0.4), 60.0) + 0.12


def test_probes_of_a_bad_link_cost_little() -> None:
    assert len(probe_until(60.0)) <= 80
    assert len(probe_until(3600.0)) <= 180
    hour = [at for at in probe_until(7200.0) if at > 3600]
    assert len(hour) * PROBE_BYTES < 800_000


def test_probes_take_a_fifth_of_a_slow_link_at_most() -> None:
    probes = probe_until(60.0, took_s=2.0)
    assert len(probes) * 2.0 <= 0.2 * 60.0 + 2.0


@pytest.mark.parametrize("limit_bytes", [0, 100_000, 1_000_000])
def test_probes_of_a_metered_link_stay_within_their_limit(limit_bytes: int) -> None:
    schedule, now_s, sent_bytes = ProbeSchedule(0.0, limit_bytes), 0.0, 0
    while now_s < 2 * 3600:
        if int(now_s) % 10 == 0:
            schedule.restart(now_s)  # a link that changes every ten seconds
        if schedule.is_due(now_s, is_busy=False) and schedule.may_spend(now_s):
            sent_bytes += PROBE_BYTES
            schedule.spend(now_s, PROBE_BYTES)
            schedule.note_probe(now_s, 0.1)
        now_s += 0.1
    assert 1.8 * limit_bytes - PROBE_BYTES <= sent_bytes <= 2 * limit_bytes + PROBE_BYTES


def test_probes_come_often_again_after_the_server_was_used() -> None:
    schedule = ProbeSchedule(0.0)
    schedule.note_probe(1000.0, 0.1)
    assert not schedule.is_due(1030.0, is_busy=False)
    schedule.restart(1030.0)
    assert schedule.is_due(1030.3, is_busy=False)


def test_probe_waits_a_little_for_a_request_to_end() -> None:
    schedule = ProbeSchedule(0.0)
    schedule.note_probe(0.0, 0.01)
    assert schedule.is_due(0.3, is_busy=False)
    assert not schedule.is_due(0.3, is_busy=True)
    assert schedule.is_due(0.36, is_busy=True)


def test_claim_of_a_probe_counts_at_once_until_a_request_has_measured_it() -> None:
    estimate = estimate_of(2.0)
    estimate.note_probe(6.0, exchange(20.0, PROBE_BYTES))
    assert estimate.is_claimed
    assert estimate.up_bits_per_s is not None
    assert estimate.up_bits_per_s > 15e6
    estimate.note(7.0, exchange(2.0, 300_000))
    assert not estimate.is_claimed
    assert estimate.up_bits_per_s == pytest.approx(2e6, rel=0.01)


def test_probe_of_a_link_that_is_as_bad_as_before_claims_nothing() -> None:
    estimate = estimate_of(2.0)
    for late_s in (0.0, 0.03, 0.1):
        estimate.note_probe(6.0, exchange(2.0, PROBE_BYTES, late_s))
    assert not estimate.is_claimed


@cases("phase_s", [3.0, 6.0, 12.0])
@cases("pause_s", [0.01, 0.05, 0.2])
def test_link_that_goes_down_and_up_costs_one_switch_each_within_two_requests(
    phase_s: float, pause_s: float
) -> None:
    estimate, schedule = estimate_of(20.0), ProbeSchedule(0.0)
    decision: PlanChoice | None = None
    plans: dict[int, list[str]] = {0: [], 1: [], 2: []}
    now_s = 0.0
    while now_s < 3 * phase_s:
        phase = int(now_s // phase_s)
        mbit_s = (20.0, 2.0, 20.0)[phase]
        before, state = decision, estimate.state(now_s)
        assert state is not None
        decision = choose(TABLE, Conditions(state), decision)
        if before is not None and before.plan is UPLOAD and decision.plan is LOCAL:
            schedule.restart(now_s)
        plans[phase].append(decision.plan.name)
        link = LinkState(mbit_s * 1e6, mbit_s * 1e6, RTT_S, 1e9)
        if decision.plan is UPLOAD:
            took_s = min(predict_s(UPLOAD, Conditions(link)), 0.8)  # hedged
            estimate.note(now_s + took_s, exchange(mbit_s, 307_600))
        else:
            took_s = LOCAL.costs.device_s
            probe_s = exchange(mbit_s, PROBE_BYTES).elapsed_s
            at_s = max(now_s, schedule.due_s + 0.1)
            if at_s < now_s + took_s:
                schedule.note_probe(at_s + probe_s, probe_s)
                estimate.note_probe(at_s + probe_s, exchange(mbit_s, PROBE_BYTES))
        now_s += took_s + pause_s
    assert plans[1].index("local") <= 1
    assert plans[2].index("upload") <= 1
    every = [plan for phase in plans.values() for plan in phase]
    assert sum(one != other for one, other in pairwise(every)) == 2


LOCAL_S, REPLY_S, REQUEST_BYTES = 0.15, 0.05, 150_000


def test_fault_costs_thirteen_tenths_of_a_local_run_at_most() -> None:
    hedges = HedgePolicy(0.1, LOCAL_S)
    for _ in range(100):
        hedges.note_reply(REPLY_S, REPLY_S)
    assert 0.01 + hedges.allow_s(REPLY_S, LOCAL_S, spent_s=0.01) + LOCAL_S <= 1.3 * LOCAL_S + 0.02


@pytest.mark.parametrize("usual_s", [0.5 * REPLY_S, 0.9 * REPLY_S])
def test_one_reply_in_ten_is_hedged_where_the_prediction_is_wrong(usual_s: float) -> None:
    hedges = HedgePolicy(0.1, 0.01)  # a short local run, so that the limit asks for a hedge at once
    late = 0
    for number in range(1000):
        took_s = usual_s * (1 + 0.01 * (number * 37 % 100))  # 1 to 2 times
        late += took_s > hedges.allow_s(REPLY_S, 0.01, spent_s=0.0) and number >= 200
        hedges.note_reply(took_s, REPLY_S)
    assert 0.02 * 800 <= late <= 0.15 * 800


def test_hedges_take_their_share_and_four_local_runs_at_most() -> None:
    hedges, requests_s, hedged_s = HedgePolicy(0.1, LOCAL_S), 0.0, 0.0
    for _ in range(2000):  # on a link so bad that each request would be hedged
        own_s = LOCAL_S if hedges.is_in_debt else 0.03
        hedges.earn(own_s, LOCAL_S)
        requests_s += own_s
        if hedges.may_hedge(LOCAL_S):
            hedges.spend(LOCAL_S)
            hedged_s += LOCAL_S
    assert 0.09 * requests_s < hedged_s <= 0.1 * requests_s + 4 * LOCAL_S


def test_no_server_is_used_in_debt_until_local_runs_have_paid_it() -> None:
    hedges = HedgePolicy(0.1, LOCAL_S)
    hedges.spend(5 * LOCAL_S)
    runs = 0
    while hedges.is_in_debt:
        hedges.earn(LOCAL_S, LOCAL_S)
        runs += 1
    assert 10 <= runs <= 11


def test_large_requests_among_small_ones_are_hedged_too() -> None:
    hedges, large, hedged = HedgePolicy(0.1, LOCAL_S), 0, 0
    for number in range(2000):
        local_s = LOCAL_S if number % 2 else 32 * LOCAL_S
        hedges.earn(local_s / 5, local_s)
        if number % 2 == 0:
            large += 1
            if hedges.may_hedge(local_s):
                hedges.spend(local_s)
                hedged += 1
    assert 0.015 * large <= hedged <= 0.025 * large  # a tenth of a fifth


def test_credit_of_a_moment_of_load_is_lost_with_it() -> None:
    hedges = HedgePolicy(0.1, LOCAL_S)
    hedges.earn(100 * LOCAL_S, 100 * LOCAL_S)
    for _ in range(1000):
        hedges.earn(LOCAL_S, LOCAL_S)
    assert not hedges.may_hedge(4.1 * LOCAL_S)


def hedge_at(wait: ReplyWait, sent: Callable[[float], float | None]) -> float:
    """Return when a local run begins on a link that has acknowledged `sent(t)` bytes."""
    elapsed_s = wait.look_s
    while True:
        now = sent(elapsed_s)
        more_s = wait.more_s(elapsed_s, None if now is None else int(now))
        if more_s is None:
            return elapsed_s
        elapsed_s += more_s + 1e-9


def make_wait(upload_bytes: int = REQUEST_BYTES) -> ReplyWait:
    return ReplyWait(0.06, LOCAL_S, 0.02, upload_bytes, link=LinkState(100e6, 100e6, 0.01, 1e9))


def carry(mbit_s: float, until_s: float = 1e9, from_s: float = 0.0) -> Callable[[float], float]:
    return lambda at_s: min(REQUEST_BYTES, max(0.0, min(at_s, until_s) - from_s) * mbit_s * 1e6 / 8)


def test_link_that_carries_nothing_is_noticed_after_half_of_the_time() -> None:
    assert hedge_at(make_wait(), lambda _: 0) == pytest.approx(0.03)


def acknowledge(size_bytes: int, mbit_s: float, rtt_s: float) -> Callable[[float], float]:
    """Return what is acknowledged of one window: every other segment, a round trip after it was sent."""
    return lambda at_s: min(size_bytes, max(0.0, at_s - rtt_s) * mbit_s * 1e6 / 8 // 3000 * 3000)


@pytest.mark.parametrize(("rtt_s", "mbit_s"), [(0.06, 20.0), (0.06, 2.0), (0.1, 8.0), (0.15, 100.0)])
def test_request_on_a_link_with_a_long_round_trip_is_not_taken_for_lost(rtt_s: float, mbit_s: float) -> None:
    link, size_bytes, local_s = LinkState(mbit_s * 1e6, 100e6, rtt_s, 1e9), 12_000, 0.2
    reply_s = rtt_s + size_bytes * 8 / mbit_s / 1e6
    allowed_s = HedgePolicy(0.1, local_s).allow_s(reply_s, local_s, spent_s=0.0)
    assert reply_s < allowed_s
    wait = ReplyWait(allowed_s, local_s, 2 * rtt_s, size_bytes, link=link)
    assert hedge_at(wait, acknowledge(size_bytes, mbit_s, rtt_s)) > reply_s
    lost = ReplyWait(allowed_s, local_s, 2 * rtt_s, size_bytes, link=link)
    assert hedge_at(lost, lambda _: 0) <= allowed_s


def test_small_request_is_not_taken_for_lost_before_its_time() -> None:
    assert hedge_at(make_wait(600), lambda _: 0) == pytest.approx(0.06)


def test_server_that_has_all_and_says_nothing_is_not_waited_for() -> None:
    assert hedge_at(make_wait(), lambda _: REQUEST_BYTES) == pytest.approx(0.06)


def test_system_that_knows_nothing_of_its_connections_waits_as_long_as_allowed() -> None:
    assert hedge_at(make_wait(), lambda _: None) == pytest.approx(0.06)


def test_request_that_the_device_was_slow_to_send_gets_no_more_time() -> None:
    assert hedge_at(make_wait(), carry(100.0, from_s=0.025)) == pytest.approx(0.06)


def test_slow_link_gets_more_time_where_its_reply_comes_before_a_local_run_ends() -> None:
    upload_s = REQUEST_BYTES * 8 / 8e6
    assert hedge_at(make_wait(), carry(8.0)) == pytest.approx(upload_s + 0.02, abs=0.03)


def test_link_that_needs_longer_than_a_local_run_is_not_waited_for() -> None:
    assert hedge_at(make_wait(), carry(2.0)) == pytest.approx(0.06)


def test_link_that_stops_midway_is_noticed_between_two_looks() -> None:
    assert hedge_at(make_wait(), carry(8.0, until_s=0.05)) <= 0.06 + 0.03 + 1e-3
