"""The choice of a plan, and what it rests on: pure functions and state machines."""

import json
from pathlib import Path

import pytest

from edgekit_runtime.cli import main
from edgekit_runtime.remote.choose import choose
from edgekit_runtime.remote.circuit_breaker import CircuitBreaker
from edgekit_runtime.remote.cut_table import CutTable, OffloadPlan, PlanCosts
from edgekit_runtime.remote.latency_model import Conditions, LinkState
from edgekit_runtime.remote.link_estimate import Exchange, LinkEstimate

LOCAL = OffloadPlan("local", PlanCosts(0.055))
RAW = OffloadPlan("raw", PlanCosts(0.0, 0.002, 150_000, 100), tail="raw")
CUT = OffloadPlan("cut3", PlanCosts(0.02, 0.002, 4_000, 100), tail="cut3")
TABLE = CutTable((LOCAL, RAW, CUT))


def link(mbit_s: float, rtt_s: float = 0.005) -> Conditions:
    return Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_s, 1e9))


def exchange(mbit_s: float, size_bytes: float = 100_000, rtt_s: float = 0.01) -> Exchange:
    return Exchange(size_bytes, 0, rtt_s + size_bytes * 8 / mbit_s / 1e6, 0.0, 1e9)


def estimate_of(*samples: float) -> LinkEstimate:
    estimate = LinkEstimate()
    estimate.note_round_trip(0.0, 0.01)
    for at, mbit_s in enumerate(samples, 1):
        estimate.note(float(at), exchange(mbit_s))
    return estimate


@pytest.mark.parametrize(("mbit_s", "expected"), [(200, "raw"), (5, "cut3"), (0.5, "local"), (0, "local")])
def test_bandwidth_decides_between_plans(mbit_s: float, expected: str) -> None:
    assert choose(TABLE, link(mbit_s)).plan.name == expected


def test_reason_says_the_figures_in_one_sentence() -> None:
    reason = choose(TABLE, link(1.8)).reason
    assert reason == "the link has 1.8 Mbit/s; cut3 takes 45.2 ms, local 55 ms"


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


def test_model_without_local_plan_uses_a_bad_server() -> None:
    assert choose(CutTable((RAW,)), Conditions(None), cause="it failed").plan.name == "raw"


def test_bandwidth_falls_at_once_and_rises_with_a_second_sample() -> None:
    assert estimate_of(20, 20).up_bits_per_s == pytest.approx(20e6, rel=1e-3)
    assert estimate_of(20, 20, 2).up_bits_per_s == pytest.approx(2e6, rel=1e-3)
    assert estimate_of(2, 2, 20).up_bits_per_s == pytest.approx(2e6, rel=1e-3)
    assert estimate_of(2, 2, 20, 20).up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_small_body_or_lying_server_time_says_nothing_of_bandwidth() -> None:
    estimate = estimate_of(20, 20)
    estimate.note(3.0, Exchange(100, 10, 0.0101, 0.0))
    estimate.note(4.0, Exchange(100_000, 10, 0.05, 1e9))
    assert estimate.up_bits_per_s == pytest.approx(20e6, rel=1e-3)


def test_one_late_small_reply_is_a_hiccup_and_two_are_a_slow_link() -> None:
    estimate = estimate_of(20, 20)
    late = Exchange(1_000, 100, 0.07, 0.0, 1e9)
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
    waits = []
    for _ in range(12):
        breaker.fail(100.0, "it failed", 1.0)
        waits.append(breaker.retry_s - 100.0)
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == 60.0
    assert not breaker.may_probe(100.0)
    assert breaker.may_probe(161.0)
    breaker.succeed()
    assert breaker.is_closed


def test_commands_set_show_and_remove_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    assert main(["offload", "server", "https://edge:8443", "--json"]) == 0
    assert main(["offload", "server", "ftp://edge"]) == 17
    capsys.readouterr()
    assert main(["offload", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"server": "https://edge:8443", "sessions": []}
    assert main(["offload", "off"]) == 0
    capsys.readouterr()
    main(["offload", "status"])
    assert capsys.readouterr().out == "server: none\n"
