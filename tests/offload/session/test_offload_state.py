"""What a session learns about the speed of both machines from its requests."""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tests.offload.session.offload_parts import wait_until

from edgekit_runtime.client.responses import make_error, parse_head
from edgekit_runtime.errors import EdgekitError, RequestError, TransportError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.link_estimate import Exchange
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan, PlanCosts
from edgekit_runtime.offload.offload_server import NonFiniteError, OffloadServer, Reply, ServerTimes
from edgekit_runtime.offload.probe_schedule import BackOff
from edgekit_runtime.offload.session import offload_state
from edgekit_runtime.offload.session.offload_state import OffloadState, scale_plan
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.offload.session.server_prober import ServerProber

LOCAL = OffloadPlan("local", PlanCosts(0.101, request_s=0.001))
# Of 6 ms on the server, 2 ms are of the request and 1 ms of compression.
CUT = OffloadPlan(
    "cut3",
    PlanCosts(0.012, 0.006, 4000.0, 100.0, 0.002, decompress_s=0.001, server_request_s=0.002),
    head="cut3.head",
    tail="cut3.tail",
)


def make_state(
    cut: OffloadPlan = CUT, local: OffloadPlan = LOCAL, objective: str = "latency"
) -> OffloadState:
    radio_w = None if local.costs.device_j is None else 1.0
    table = CutTable((local, cut), objective, latency_limit_s=10.0, radio_w=radio_w)
    return start(table)


def start(table: CutTable) -> OffloadState:
    """Return the state of a table whose plans are all proved."""
    ways = {
        plan.name: cast(
            PlanRunner,
            SimpleNamespace(plan=plan, is_proved=True, retry_s=0.0, failure="", back_off=BackOff()),
        )
        for plan in table.plans
        if plan.tail
    }
    state = OffloadState(table, ways, OffloadOptions("http://127.0.0.1:1"))
    state.breaker.succeed()
    return state


def reply(compute_s: float) -> Reply:
    times = ServerTimes(0.0, compute_s, 0.1)
    return Reply(
        {"y": np.zeros(1, np.float32)},
        None,
        Exchange(upload_bytes=4000, download_bytes=100, elapsed_s=0.02, server_s=0.0),
        times,
    )


def refuse(error: EdgekitError) -> Reply:
    return Reply(
        None,
        error,
        Exchange(upload_bytes=4000, download_bytes=100, elapsed_s=0.02, server_s=0.0),
        ServerTimes(),
    )


def test_one_slow_run_does_not_make_the_device_pass_for_slow() -> None:
    state = make_state()
    for took_s in (0.1, 0.1, 0.9, 0.1):
        state.note_local(took_s, 1)
    assert state.device_slowdown == pytest.approx(1.0)
    for _ in range(6):
        state.note_local(0.3, 1)
    assert state.device_slowdown == pytest.approx(3.0)


def test_compression_of_a_request_is_not_taken_for_the_head() -> None:
    packed = dataclasses.replace(CUT, costs=dataclasses.replace(CUT.costs, compress_s=0.004))
    state = make_state(packed)
    state.note_head(packed, CUT.costs.device_s - CUT.costs.request_s - 0.004)
    assert state.device_slowdown == pytest.approx(1.0)


def test_work_of_a_server_beside_the_model_is_not_taken_for_its_speed() -> None:
    state = make_state()
    state.note_reply(CUT, reply(0.003), is_late=False)  # the model took 3 ms there, as planned
    assert state.conditions(0.0).server_slowdown == pytest.approx(1.0)


def test_short_tail_says_nothing_of_the_speed_of_a_server() -> None:
    cut = OffloadPlan("cut3", PlanCosts(0.012, 0.0012, 4000.0, server_request_s=0.001), tail="cut3.tail")
    state = make_state(cut)
    state.note_reply(cut, reply(0.00005), is_late=False)
    assert state.conditions(0.0).server_slowdown == 1.0


def test_several_rows_are_compared_with_the_costs_of_so_many() -> None:
    state, four = make_state(), scale_plan(CUT, 4)
    assert four.costs.device_s == pytest.approx(4 * 0.010 + 0.002)
    assert four.costs.server_s == pytest.approx(4 * 0.004 + 0.002)
    state.note_head(four, 0.04)
    state.note_reply(four, reply(0.012), is_late=False)
    assert state.device_slowdown == pytest.approx(1.0)
    assert state.conditions(0.0).server_slowdown == pytest.approx(1.0)


def test_cascade_sends_all_rows_of_a_request_if_one_is_not_sure() -> None:
    cascade = dataclasses.replace(CUT, escalation=Escalation("y", 0.5, 0.3))
    one, eight = (scale_plan(cascade, rows).escalation for rows in (1, 8))
    assert one is not None
    assert eight is not None
    assert one.share == pytest.approx(0.3)
    assert eight.share == pytest.approx(0.942, abs=1e-3)  # 1 - 0.7^8


def test_longer_round_trip_is_measured_once_the_bandwidth_seems_to_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    state = make_state()
    state.estimate.note_round_trip(0.02)
    state.estimate.overhead_s = 0.004
    for at in (1.0, 2.0):
        state.estimate.note(
            at,
            Exchange(upload_bytes=100_000, download_bytes=0, elapsed_s=0.064, server_s=0.0, window_bytes=1e9),
        )  # 20 Mbit/s
    # TCP's average has not reached the new round trip of 60 ms yet.
    server = SimpleNamespace(measure_round_trip=lambda _: (0.036, 0.064))
    prober = ServerProber(state, cast(OffloadServer, server), "m", has_rows=False, timeout_s=10.0)
    try:
        for at in (3.0, 4.0):
            state.estimate.note(
                at,
                Exchange(
                    upload_bytes=1_000, download_bytes=500, elapsed_s=0.065, server_s=0.0, window_bytes=1e9
                ),
            )
        wait_until(lambda: not state.estimate.is_suspect, "the round trip is not measured")
    finally:
        prober.stop()
        prober.close()
    assert state.estimate.rtt_s == pytest.approx(0.06)
    assert state.estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_choice_made_with_the_window_of_a_busy_link_does_not_outlive_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(offload_state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    raw = OffloadPlan("raw", PlanCosts(0.0, 0.015, 150_000.0, 100.0), tail="raw")
    state = make_state(raw, OffloadPlan("local", PlanCosts(0.2)))
    state.estimate.note_round_trip(0.06)
    state.estimate.note(
        now[0],
        Exchange(upload_bytes=150_000, download_bytes=0, elapsed_s=0.12, server_s=0.0, window_bytes=1e6),
    )  # 20 Mbit/s
    assert state.decision().plan.name == "raw"
    now[0] += 5
    assert state.preview().plan.name == "local"  # the first window of TCP takes four round trips more
    assert state.decision().plan.name == "local"


def test_looking_at_the_choice_does_not_make_it() -> None:
    state = make_state()
    state.breaker.fail(0.0, "it failed", 0.0)
    state.decision()
    state.breaker.succeed()
    state.estimate.note_round_trip(0.001)
    state.estimate.note(
        1.0, Exchange(upload_bytes=100_000, download_bytes=0, elapsed_s=0.01, server_s=0.0, window_bytes=1e9)
    )
    state.reconsider()
    switches = list(state.switches)
    for _ in range(20):
        assert state.preview().plan.name == "cut3"
    assert list(state.switches) == switches


def test_choice_counts_the_time_to_connect_where_no_connection_is_open() -> None:
    state = make_state()
    state.estimate.note_round_trip(0.001)
    state.estimate.note(
        1.0, Exchange(upload_bytes=100_000, download_bytes=0, elapsed_s=0.01, server_s=0.0, window_bytes=1e9)
    )
    assert state.decision().plan.name == "cut3"
    state.connect_s = 0.5  # the server closed the idle connection
    assert state.decision().plan.name == "local"
    state.connect_s = 0.0
    assert state.decision().plan.name == "cut3"


def test_what_a_server_said_of_itself_counts_for_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(offload_state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = make_state()
    state.estimate.note_round_trip(0.001)
    times = ServerTimes(0.5, 0.03, 0.99)
    state.note_reply(
        CUT,
        Reply(
            {},
            None,
            Exchange(upload_bytes=100_000, download_bytes=100, elapsed_s=0.6, server_s=0.0, window_bytes=1e9),
            times,
        ),
        is_late=False,
    )
    assert "loaded (0.99)" in state.decision().reason
    state.note_load(None)  # a reply that does not state it
    assert "loaded (0.99)" in state.preview().reason
    state.note_load(0.1)
    state.reconsider()
    assert state.decision().plan.name == "local"  # the last request waited half a second there
    now[0] += 121
    state.reconsider()
    assert state.decision().plan.name == "cut3"


@pytest.mark.parametrize("objective", ["latency", "energy", "capacity"])
def test_probe_is_sent_while_another_plan_would_be_better_on_a_good_link(objective: str) -> None:
    costs = dataclasses.replace(LOCAL.costs, device_s=0.0102, device_j=0.05)
    local = dataclasses.replace(LOCAL, costs=costs)
    # Of the plan's 10 ms, 8 are on the server; so it wins by 2 % of the latency, and 44 % of the energy.
    cut = OffloadPlan("cut3", PlanCosts(0.002, 0.008, 4000.0, 100.0, device_j=0.02), tail="cut3.tail")
    state = make_state(cut, local, objective)
    state.estimate.note_round_trip(1e-6)
    state.estimate.note(
        1.0, Exchange(upload_bytes=100_000, download_bytes=0, elapsed_s=1.0, server_s=0.0, window_bytes=1e9)
    )  # 0.8 Mbit/s
    assert state.decision().plan.name == "local"
    assert (state.find_better(2.0) is not None) == (objective != "capacity")  # there local is best anywhere


TOO_LARGE = RequestError(413, "the body is too large")


@pytest.mark.parametrize("error", [TOO_LARGE, TransportError("no answer"), NonFiniteError("NaN in 'y'")])
def test_pause_grows_while_golden_inputs_pass_and_requests_fail(
    monkeypatch: pytest.MonkeyPatch, error: EdgekitError
) -> None:
    now = [100.0]
    monkeypatch.setattr(offload_state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = make_state()
    way, pauses = state.runners["cut3"], []
    for _ in range(12):
        state.note_reply(CUT, refuse(error), is_late=False)
        assert not way.is_proved
        pauses.append(way.retry_s - now[0])
        now[0] = way.retry_s
        state.note_reply(CUT, reply(0.003), is_late=False, is_golden=True)
        assert way.is_proved
        assert state.breaker.is_closed
    assert 0.25 <= pauses[0] <= 0.5
    assert all(30 <= pause <= 60 for pause in pauses[-4:])
    state.note_reply(CUT, reply(0.003), is_late=False)
    state.note_reply(CUT, refuse(error), is_late=False)
    assert way.retry_s - now[0] <= 0.5


def test_pause_grows_while_a_server_answers_golden_inputs_and_is_too_loaded_for_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(offload_state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = make_state()
    for _ in range(12):
        state.note_reply(CUT, refuse(RequestError(503, "busy")), is_late=False)
        assert not state.breaker.may_probe(now[0] + 0.9)
        state.note_reply(CUT, reply(0.003), is_late=False, is_golden=True)
    state.note_reply(CUT, refuse(RequestError(503, "busy")), is_late=False)
    assert not state.breaker.may_probe(now[0] + 29)
    assert state.breaker.may_probe(now[0] + 60)


def test_refusal_of_a_proxy_without_a_server_is_not_called_load() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 20\r\n\r\n"
    state = make_state()
    error = make_error(parse_head(head, 100), memoryview(b"<h1>No server</h1>  "))
    state.note_reply(CUT, refuse(error), is_late=False)
    assert "a proxy does where no server is left" in state.breaker.cause
    assert "loaded" not in state.breaker.cause
    state.note_reply(CUT, refuse(RequestError(503, "the queue is full")), is_late=False)
    assert "the queue is full" in state.breaker.cause


def test_requests_that_fail_together_are_one_failure() -> None:
    state = make_state()
    for _ in range(8):
        state.note_reply(CUT, refuse(TOO_LARGE), is_late=False)
    state.note_reply(CUT, reply(0.003), is_late=False, is_golden=True)
    state.note_reply(CUT, refuse(TOO_LARGE), is_late=False)
    assert state.runners["cut3"].retry_s - time.monotonic() <= 1.0


def test_plan_that_fails_the_application_keeps_no_other_plan_from_the_server() -> None:
    slower = dataclasses.replace(CUT, name="cut5", costs=dataclasses.replace(CUT.costs, server_s=0.02))
    state = start(CutTable((LOCAL, CUT, slower)))
    state.estimate.note_round_trip(0.001)
    state.estimate.note(
        time.monotonic(),
        Exchange(upload_bytes=100_000, download_bytes=0, elapsed_s=0.01, server_s=0.0, window_bytes=1e9),
    )
    assert state.decision().plan.name == "cut3"
    state.note_reply(CUT, refuse(TOO_LARGE), is_late=False)
    assert state.decision().plan.name == "local"
    state.note_reply(slower, reply(0.017), is_late=False, is_golden=True)
    assert state.decision().plan.name == "cut5"


def test_answer_that_is_not_finite_is_no_fault_of_the_server() -> None:
    state = make_state()
    state.note_reply(CUT, refuse(NonFiniteError("NaN or infinity in 'y'")), is_late=False)
    assert state.breaker.is_closed
    decision = state.decision()
    assert decision.plan.name == "local"
    assert "NaN or infinity in 'y'" in decision.reason
