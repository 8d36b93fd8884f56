"""The choice of a plan, and what it rests on: pure functions and state machines."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.cli import main
from edgekit_runtime.offload.choose import Preference, choose
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import (
    Conditions,
    LinkState,
    as_sent,
    energy_j,
    predict_s,
    reserved_server_s,
    send_plain,
    served_s,
    slowest_stage_s,
    utilisation,
    wire_bytes,
)
from edgekit_runtime.offload.link_estimate import Exchange, LinkEstimate
from edgekit_runtime.offload.offload_options import read_offload_options
from edgekit_runtime.offload.offload_plan import Escalation, OffloadPlan, PlanCosts
from edgekit_runtime.offload.probe_schedule import CircuitBreaker

LOCAL = OffloadPlan("local", PlanCosts(0.055))
RAW = OffloadPlan("raw", PlanCosts(0.0, 0.002, 150_000, 100), tail="raw")
CUT = OffloadPlan("cut3", PlanCosts(0.02, 0.002, 4_000, 100), tail="cut3")
TABLE = CutTable((LOCAL, RAW, CUT))


def link(mbit_s: float, rtt_s: float = 0.005) -> Conditions:
    return Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_s, 1e9))


def exchange(mbit_s: float, size_bytes: float = 100_000, rtt_s: float = 0.01) -> Exchange:
    return Exchange(
        upload_bytes=size_bytes,
        download_bytes=0,
        elapsed_s=rtt_s + size_bytes * 8 / mbit_s / 1e6,
        server_s=0.0,
        window_bytes=1e9,
    )


def estimate_of(*samples: float) -> LinkEstimate:
    estimate = LinkEstimate()
    estimate.note_round_trip(0.01)
    for at, mbit_s in enumerate(samples, 1):
        estimate.note(float(at), exchange(mbit_s))
    return estimate


@pytest.mark.parametrize(("mbit_s", "expected"), [(200, "raw"), (5, "cut3"), (0.5, "local"), (0, "local")])
def test_bandwidth_decides_between_plans(mbit_s: float, expected: str) -> None:
    assert choose(TABLE, link(mbit_s)).plan.name == expected


def test_reason_says_the_figures_in_one_sentence() -> None:
    reason = choose(TABLE, link(1.8)).reason
    assert reason == "the link has 1.8 Mbit/s; least latency: cut3 takes 45.2 ms, local 55 ms"


def test_reason_names_what_was_wanted_and_the_runner_up() -> None:
    costs = [dataclasses.replace(one.costs, device_j=0.02 + 0.01 * n) for n, one in enumerate(TABLE.plans)]
    plans = tuple(dataclasses.replace(one, costs=cost) for one, cost in zip(TABLE.plans, costs, strict=True))
    table = CutTable(plans, "energy", latency_limit_s=0.1, radio_w=1.0)
    assert choose(table, link(1.8)).reason == (
        "the link has 1.8 Mbit/s; least energy within 100 ms: local takes 20 mJ in 55 ms, "
        "cut3 65.2 mJ in 45.2 ms"
    )
    assert choose(TABLE, link(200)).reason == (
        "the link has 200 Mbit/s; least latency: raw takes 13 ms, cut3 27.2 ms"  # both with the server
    )
    late = dataclasses.replace(table, latency_limit_s=0.05)
    assert choose(late, link(1.8)).reason.endswith("cut3 takes 65.2 mJ in 45.2 ms, local 55 ms, too late")
    capacity = choose(dataclasses.replace(table, objective="capacity"), link(200)).reason
    assert "most devices a server within 100 ms: local takes 0 ms of the server in 55 ms, cut3 " in capacity
    assert choose(TABLE, link(200), None, Preference("throughput")).reason.endswith(
        "most requests a second: raw takes 6 ms in its slowest stage, cut3 20 ms in its slowest stage"
    )


def test_reason_says_that_a_better_plan_is_too_little_better() -> None:
    current = choose(TABLE, link(5))
    slightly = OffloadPlan("local", PlanCosts(current.predicted_s * 0.95))
    kept = choose(CutTable((slightly, CUT)), link(5), current)
    assert kept.plan.name == "cut3"
    assert kept.reason.endswith("cut3 takes 33.6 ms, local 31.9 ms, which is too little better to switch yet")


def test_reason_says_that_no_plan_with_the_server_has_proved_itself() -> None:
    reason = choose(TABLE, link(200), usable=()).reason
    assert reason == "the server has not proved a plan that can run now; local takes 55 ms"


def test_small_gain_does_not_switch_at_once_but_lasting_gain_does() -> None:
    current = choose(TABLE, link(5))
    slightly = OffloadPlan("local", PlanCosts(current.predicted_s * 0.95))
    table, plans = CutTable((slightly, CUT)), []
    for _ in range(20):
        current = choose(table, link(5), current)
        plans.append(current.plan.name)
    assert plans[0] == "cut3"
    assert plans[-1] == "local"


def test_loaded_server_keeps_the_device_local_and_says_so() -> None:
    decision = choose(TABLE, link(200), server_load=1.3)
    assert decision.plan.name == "local"
    assert "loaded" in decision.reason


def test_model_without_local_plan_asks_a_server_that_failed_for_a_plan_that_it_proved() -> None:
    table = CutTable((RAW, CUT))
    failed = choose(table, Conditions(None), usable=("cut3",), cause="it failed")
    assert failed.plan.name == "cut3"
    assert failed.reason.startswith("it failed; ")
    unproved = choose(table, link(200), usable=())
    assert unproved.reason == "the server has not proved a plan that can run now; raw takes 13 ms"


def test_bandwidth_falls_at_once_and_rises_with_a_second_sample() -> None:
    assert estimate_of(20, 20).up_bits_per_s == pytest.approx(20e6, rel=1e-3)
    assert estimate_of(20, 20, 2).up_bits_per_s == pytest.approx(2e6, rel=1e-3)
    assert estimate_of(2, 2, 20).up_bits_per_s == pytest.approx(2e6, rel=1e-3)
    assert estimate_of(2, 2, 20, 20).up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_small_body_or_lying_server_time_says_nothing_of_bandwidth() -> None:
    estimate = estimate_of(20, 20)
    estimate.note(3.0, Exchange(upload_bytes=100, download_bytes=10, elapsed_s=0.0101, server_s=0.0))
    estimate.note(4.0, Exchange(upload_bytes=100_000, download_bytes=10, elapsed_s=0.05, server_s=1e9))
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_one_late_small_reply_is_a_hiccup_and_two_are_a_slow_link() -> None:
    estimate = estimate_of(20, 20)
    late = Exchange(upload_bytes=1_000, download_bytes=100, elapsed_s=0.07, server_s=0.0, window_bytes=1e9)
    estimate.note(3.0, late)
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)
    estimate.note(4.0, late)
    assert estimate.up_bits_per_s is not None
    assert estimate.up_bits_per_s < 0.2e6


def test_clock_that_jumps_leaves_a_usable_state() -> None:
    estimate = estimate_of(20, 20)
    for now_s in (1e9, -1e9, 5.0):
        estimate.note(now_s, exchange(20))
        state = estimate.state(now_s)
        assert state is not None
        assert state.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_breaker_backs_off_and_closes_with_a_success() -> None:
    breaker = CircuitBreaker()
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        breaker.fail(100.0, "it failed", 1.0)
        assert not breaker.may_probe(100.0 + wait_s - 0.01)
        assert breaker.may_probe(100.0 + wait_s)
    breaker.fail(100.0, "it failed", 0.0)
    assert breaker.may_probe(130.0)  # half of the pause is jitter
    breaker.succeed()
    assert breaker.is_closed


def test_commands_set_show_and_remove_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    assert main(["offload", "server", "https://edge:8443", "--json"]) == 0
    assert main(["offload", "server", "ftp://edge"]) == 16
    capsys.readouterr()
    assert main(["offload", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "server": "https://edge:8443",
        "fault": "",
        "sessions": [],
    }
    assert main(["offload", "off"]) == 0
    capsys.readouterr()
    main(["offload", "status"])
    assert capsys.readouterr().out == "server for packages that this user starts now: none\n"


def test_limit_of_probes_is_kept_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    assert main(["offload", "server", "https://edge:8443", "--probe-limit", "0.2"]) == 0
    options = read_offload_options()
    assert options is not None
    assert options.probe_bytes_per_hour == 200_000
    with pytest.raises(SystemExit):
        main(["offload", "server", "https://edge:8443", "--probe-limit", "nan"])


def test_link_is_only_known_to_be_so_fast_until_a_body_takes_time() -> None:
    estimate = estimate_of()
    estimate.note(1.0, Exchange(upload_bytes=4000, download_bytes=10, elapsed_s=0.0101, server_s=0.0))
    assert estimate.is_bound
    estimate.note(2.0, exchange(200, 1_000_000))
    estimate.note(3.0, exchange(200, 1_000_000))
    assert not estimate.is_bound
    assert estimate.up_bits_per_s == pytest.approx(200e6, rel=1e-3)


def test_long_reply_tells_the_bandwidth_from_the_server_apart() -> None:
    estimate = estimate_of(20, 20)
    # 1 MB at 100 Mbit/s after its first part, behind 100 kB at 20 Mbit/s and a round trip of 10 ms; the first
    # window of TCP costs five more round trips.
    rest_s = 0.08 + 5 * 0.01
    estimate.note(
        3.0,
        Exchange(
            upload_bytes=100_000,
            download_bytes=1_010_000,
            elapsed_s=0.05 + rest_s,
            server_s=0.0,
            window_bytes=1e9,
            rest_bytes=1_000_000,
            rest_s=rest_s,
        ),
    )
    state = estimate.state(3.0)
    assert state is not None
    assert state.up_bits_per_s == pytest.approx(20e6, rel=0.1)
    assert state.down_bits_per_s == pytest.approx(100e6, rel=0.3)


def test_work_of_both_machines_for_a_small_exchange_is_no_matter_of_the_link() -> None:
    estimate = LinkEstimate()
    estimate.note_round_trip(0.01)
    estimate.overhead_s = 0.004
    estimate.note(
        1.0,
        Exchange(
            upload_bytes=100_000,
            download_bytes=0,
            elapsed_s=0.01 + 0.004 + 0.04,
            server_s=0.0,
            window_bytes=1e9,
        ),
    )
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_longer_round_trip_is_not_taken_for_a_slow_link() -> None:
    estimate = estimate_of(20, 20)
    slow = Exchange(
        upload_bytes=1_000, download_bytes=500, elapsed_s=0.06 + 0.0006, server_s=0.0, window_bytes=1e9
    )  # the round trip has become 60 ms
    estimate.note(3.0, slow)
    estimate.note(4.0, slow)
    assert estimate.is_suspect
    estimate.note_round_trip(0.06)
    assert not estimate.is_suspect
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)
    estimate.note(5.0, slow)
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_round_trip_beside_large_bodies_only_falls() -> None:
    estimate = estimate_of(20, 20)
    estimate.note_round_trip(0.2, is_beside=True)
    assert estimate.rtt_s == 0.01
    estimate.note_round_trip(0.005, is_beside=True)
    assert estimate.rtt_s == 0.005


def test_slow_link_stays_slow_once_the_round_trip_is_known_to_be_the_same() -> None:
    estimate = estimate_of(20, 20, 2)
    assert estimate.is_suspect
    estimate.note_round_trip(0.011)
    assert not estimate.is_suspect
    assert estimate.up_bits_per_s == pytest.approx(2e6, rel=1e-3)


def test_request_that_was_given_up_measures_what_arrived() -> None:
    estimate = estimate_of(20, 20)
    for _ in range(2):
        estimate.note_cut_off(Exchange(upload_bytes=20_000, download_bytes=0, elapsed_s=0.17, server_s=0.0))
        assert estimate.up_bits_per_s == pytest.approx(1e6, rel=1e-3)


@pytest.mark.parametrize(
    ("objective", "joules", "expected"),
    [("energy", 1.0, "cut3"), ("energy", 1e-4, "local"), ("capacity", 1.0, "local"), ("latency", 1.0, "raw")],
)
def test_objective_decides_among_plans_that_are_fast_enough(
    objective: str, joules: float, expected: str
) -> None:
    plans = [
        dataclasses.replace(plan, costs=dataclasses.replace(plan.costs, device_j=energy))
        for plan, energy in ((LOCAL, joules), (RAW, 0.5), (CUT, 0.1))
    ]
    table = CutTable(tuple(plans), latency_limit_s=0.2, radio_w=1.0)
    assert choose(table, link(200), None, Preference(objective)).plan.name == expected


def test_plan_that_is_too_late_loses_whatever_it_saves() -> None:
    plans = [
        dataclasses.replace(plan, costs=dataclasses.replace(plan.costs, device_j=energy))
        for plan, energy in ((LOCAL, 0.0), (RAW, 1.0))
    ]
    table = CutTable(tuple(plans), "energy", latency_limit_s=0.1, radio_w=1.0)
    assert choose(table, link(200), None).plan.name == "local"
    assert choose(table, link(200), None, Preference("energy", 0.02)).plan.name == "raw"
    strict = dataclasses.replace(table, latency_limit_s=0.02)
    assert choose(strict, link(200), None).plan.name == "raw"
    assert choose(strict, link(200), None, Preference("energy", 0.1)).plan.name == "local"


def test_plan_with_time_to_wait_on_the_server_carries_more_devices() -> None:
    lean = OffloadPlan("lean", PlanCosts(0.094, 0.0005, 100, 100), tail="lean")
    quick = OffloadPlan("quick", PlanCosts(0.05, 0.0008, 100, 100), tail="quick")
    slow = OffloadPlan("local", PlanCosts(0.2))
    table = CutTable((slow, lean, quick), "capacity", latency_limit_s=0.1)
    assert choose(table, link(200)).plan.name == "quick"
    assert choose(dataclasses.replace(table, latency_limit_s=0.2), link(200)).plan.name == "local"
    assert choose(dataclasses.replace(table, latency_limit_s=0.15), link(200)).plan.name == "lean"


def test_energy_and_rate_count_the_reply_and_the_wait_for_it() -> None:
    costs = PlanCosts(0.01, 0.5, 1_000, 1_000_000, device_j=0.1)
    plan, where = OffloadPlan("plan", costs, tail="t"), link(8, 0.02)
    assert energy_j(plan, where, 2.0) == pytest.approx(0.1 + 2.0 * (0.001 + 0.5 + 1.0 + 0.02))
    assert slowest_stage_s(plan, where) == pytest.approx(1.001)


def test_energy_that_is_unknown_leaves_the_choice_to_latency() -> None:
    assert choose(TABLE, link(200), None, Preference("energy")).plan.name == "raw"


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"objective": "capacity"}, "latency_limit_s"),
        ({"objective": "energy"}, "radio_w"),
        ({"objective": "energy", "radio_w": 1.0}, "device_j"),
    ],
)
def test_table_without_what_its_objective_needs_is_refused(fields: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        CutTable((LOCAL, RAW), **fields)


def test_modelled_load_of_a_server_is_that_of_a_simulation() -> None:
    rng = random.Random(0)
    gaps = [rng.expovariate(1.0) for _ in range(40_000)]
    for slack in (0.5, 1.0, 1.5, 1.9, 2.1, 4.0, 16.0):
        low, high = 0.0, 1.0
        for _ in range(9):
            middle = (low + high) / 2
            wait, waits = 0.0, []
            for gap in gaps:  # D. V. Lindley, "The theory of queues with a single server", 1952
                wait = max(0.0, wait + 1 - gap / max(middle, 1e-9))
                waits.append(wait)
            waits.sort()
            low, high = (middle, high) if waits[int(0.99 * len(waits))] <= slack else (low, middle)
        # 40,000 requests, of which 400 decide, tell loads apart to some percent.
        assert utilisation(slack) == pytest.approx(low, rel=0.06)


def test_cascade_that_asks_rarely_lets_a_server_carry_more_devices() -> None:
    escalated = dataclasses.replace(CUT, name="cascade", head="h", escalation=Escalation("y", 0.1, 0.1))
    every, tenth = (reserved_server_s(one, link(200), 0.2) for one in (CUT, escalated))
    assert 0 < tenth < every / 10  # late is 1 % of all requests: 10 % of the tenth that asks
    assert reserved_server_s(escalated, link(200), 0.02) == math.inf  # one that asks takes longer
    rare = dataclasses.replace(escalated, escalation=Escalation("y", 0.1, 0.005))
    assert reserved_server_s(rare, link(200), 0.021) == pytest.approx(0.005 * served_s(CUT.costs))


def test_server_that_refuses_waiting_calls_carries_no_more_than_they_allow() -> None:
    kept_s = reserved_server_s(RAW, link(200), 10.0)
    assert 0.85 * kept_s < served_s(RAW.costs) < 0.95 * kept_s  # not 1: more than 16 never wait


def test_plan_that_was_asked_for_runs_only_where_it_can() -> None:
    asked = Preference(plan="cut3")
    assert choose(TABLE, link(0.1), None, asked).plan.name == "cut3"
    unproved = choose(TABLE, link(0.1), None, asked, usable=("raw",))
    assert unproved.plan.name == "local"
    assert "not proved" in unproved.reason
    assert choose(TABLE, Conditions(None), None, asked, cause="it failed").reason.startswith("it failed")


def test_unknown_plan_that_was_asked_for_leaves_what_changes_no_answer() -> None:
    asked = Preference(plan="cut99")
    cut = dataclasses.replace(CUT, head="cut3.head")
    for table, exact in ((TABLE, "local"), (CutTable((cut, RAW)), "raw"), (CutTable((cut,)), "cut3")):
        decision = choose(table, link(2), None, asked)
        assert decision.plan.name == exact
        assert "no plan 'cut99'" in decision.reason
        assert all(plan.name in decision.reason for plan in table.plans)


PACKED = OffloadPlan(
    "packed",
    PlanCosts(0.012, 0.021, 50_000.0, 100.0, plain_bytes=100_000.0, compress_s=0.002, decompress_s=0.001),
    tail="t",
    compression="zstd",
)


@pytest.mark.parametrize(("mbit_s", "compression"), [(1, "zstd"), (50, "zstd"), (1000, "identity")])
def test_body_is_compressed_only_where_that_takes_less_time_than_it_saves(
    mbit_s: float, compression: str
) -> None:
    conditions = link(mbit_s, rtt_s=0.0)
    unknown = dataclasses.replace(PACKED.costs, plain_bytes=None)
    plain, always = send_plain(PACKED), dataclasses.replace(PACKED, costs=unknown)
    assert as_sent(PACKED, conditions).compression == compression
    assert predict_s(PACKED, conditions) == min(predict_s(plain, conditions), predict_s(always, conditions))


def test_busy_device_sends_plain_what_it_compresses_at_rest() -> None:
    rest = link(50, rtt_s=0.0)
    assert as_sent(PACKED, rest).compression == "zstd"
    assert as_sent(PACKED, dataclasses.replace(rest, device_slowdown=8.0)).compression == "identity"


def test_plan_without_compression_costs_its_plain_bytes_and_no_time_for_it() -> None:
    costs = send_plain(PACKED).costs
    assert (costs.device_s, costs.server_s) == (pytest.approx(0.010), pytest.approx(0.020))
    assert (costs.upload_bytes, costs.compress_s, costs.plain_bytes) == (100_000.0, 0.0, None)


@cases(
    ("message_bytes", "is_tls", "taken_bytes"),
    [
        (1448, False, 1448),  # one full segment
        (144_800, False, 144_800),
        (500, False, 552 * 1448 / 1500),  # the headers of a packet for less
        (500, True, 574 * 1448 / 1500),
        (1448, True, (1470 + 2 * 52) * 1448 / 1500),  # the record of TLS begins another segment
        (0, True, 0),
    ],
)
def test_message_takes_the_link_with_the_headers_around_it(
    message_bytes: float, is_tls: bool, taken_bytes: float
) -> None:
    assert wire_bytes(message_bytes, is_tls=is_tls) == pytest.approx(taken_bytes)
