"""Gates of outside judges: what evidence says, how a rollout waits for it, and its verdict."""

import pytest
from tests.fleet.conftest import store as store  # a fixture
from tests.fleet.test_decide import answer, step
from tests.fleet.test_decide import start as start_progress
from tests.fleet.test_rollouts import add_devices, add_release, start, succeed
from tests.toolkit.cases import cases

from edgekit_fleet.operations.rollouts import give_order, replay_rollout
from edgekit_fleet.operations.verdicts import add_evidence, find_verdict
from edgekit_fleet.rollouts.outside_gates import (
    Evidence,
    OutsideGate,
    check_evidence,
    check_gates,
    judge_evidence,
)
from edgekit_fleet.rollouts.progress import apply, entry_from_plain, entry_to_plain
from edgekit_fleet.store.database import Store
from edgekit_runtime.errors import FleetError

GATE = OutsideGate(limit=-0.02, compare="difference", worse="lower", unit="share of visits")
PASS = Evidence(gate="conversion", statement="pass", who="token:shop")
STOP = Evidence(gate="conversion", statement="stop", who="token:shop", reason="complaints")


@cases(
    ("gate", "figures", "outcome"),
    [
        (GATE, {"value": 0.031, "reference": 0.034}, "pass"),
        (GATE, {"value": 0.005, "reference": 0.034}, "stop"),
        (GATE, {"value": 0.031, "reference": 0.034, "low": 0.005, "high": 0.057}, "unclear"),
        (GATE, {"value": 0.005, "reference": 0.034, "low": 0.002, "high": 0.008}, "stop"),
        (OutsideGate(limit=1.1, compare="ratio"), {"value": 12.0, "reference": 10.0}, "stop"),
        (OutsideGate(limit=1.1, compare="ratio"), {"value": 10.5, "reference": 10.0}, "pass"),
        (OutsideGate(limit=5.0, min_samples=100), {"value": 9.0, "samples": 99}, "unclear"),
        (OutsideGate(limit=5.0, min_samples=100), {"value": 9.0}, "unclear"),
        (OutsideGate(limit=5.0, min_samples=100), {"value": 9.0, "samples": 100}, "stop"),
        (OutsideGate(), {"statement": "stop"}, "stop"),
    ],
)
def test_value_is_compared_with_the_limit_and_its_interval_may_leave_it_unclear(
    gate: OutsideGate, figures: dict[str, float], outcome: str
) -> None:
    evidence = Evidence(gate="g", **figures)  # type: ignore[arg-type]
    check_evidence({"g": gate}, evidence)
    assert judge_evidence(gate, evidence).outcome == outcome


@cases(
    ("gate", "figures", "problem"),
    [
        (GATE, {}, "either a value or a statement"),
        (GATE, {"value": 1.0, "statement": "pass"}, "either a value or a statement"),
        (GATE, {"value": 1.0}, "needs a reference"),
        (OutsideGate(limit=1.0), {"value": 1.0, "reference": 1.0}, "needs no reference"),
        (OutsideGate(limit=1.0, compare="ratio"), {"value": 1.0, "reference": 0.0}, "above 0"),
        (OutsideGate(limit=1.0), {"value": 1.0, "low": 0.5}, "belong together"),
        (OutsideGate(limit=1.0), {"value": 1.0, "low": 2.0, "high": 3.0}, "low <= value"),
        (OutsideGate(), {"value": 1.0}, "no limit"),
        (OutsideGate(limit=1.0, min_samples=100), {"statement": "pass"}, "a pass needs a value"),
        (OutsideGate(), {"statement": "pass", "low": 1.0, "high": 2.0}, "no reference and no interval"),
        (OutsideGate(judge="token:other"), {"statement": "pass", "who": "token:shop"}, "token:other alone"),
    ],
)
def test_evidence_that_does_not_fit_its_gate_is_refused(
    gate: OutsideGate, figures: dict[str, float], problem: str
) -> None:
    with pytest.raises(FleetError, match=problem):
        check_evidence({"g": gate}, Evidence(gate="g", **figures))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["latency", "", "a b", "<b>", "x" * 65])
def test_gate_with_a_name_of_the_fleet_or_a_malformed_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="gate name"):
        check_gates({name: GATE})


def test_rollout_waits_at_the_end_of_its_first_wave_and_goes_on_with_a_pass() -> None:
    progress = start_progress(6, evidence={"conversion": GATE})
    answer(progress, step(progress, 1.0).devices, 2.0)
    waiting = step(progress, 10**6)
    assert waiting.action == "wait" and "awaited: conversion" in waiting.sentence
    apply(progress, Evidence(gate="conversion", value=0.03, reference=0.03, low=0.0, high=1.0), 10**6 + 1)
    assert step(progress, 10**6 + 2).action == "wait"  # it was unclear
    apply(progress, PASS, 10**6 + 3)
    assert step(progress, 10**6 + 4).action == "start"


def test_rollout_of_one_wave_does_not_succeed_before_the_evidence() -> None:
    progress = start_progress(2, evidence={"conversion": GATE})
    answer(progress, step(progress, 1.0).devices, 2.0)
    assert step(progress, 3.0).action == "wait"
    apply(progress, PASS, 4.0)
    assert step(progress, 5.0).action == "succeed"


def test_after_the_deadline_it_goes_on_and_late_evidence_still_stops_it() -> None:
    progress = start_progress(6, evidence={"conversion": OutsideGate(deadline_s=100.0)})
    answer(progress, step(progress, 1.0).devices, 2.0)
    assert step(progress, 99.0).action == "wait"
    assert step(progress, 101.0).action == "start"
    apply(progress, STOP, 102.0)
    stop = step(progress, 103.0)
    assert stop.action == "abort" and "complaints" in stop.sentence and stop.figures["exposed"] == 4


@pytest.mark.parametrize("entries", [(PASS, STOP), (STOP, PASS)])
def test_of_conflicting_evidence_the_stop_counts_in_any_order(entries: tuple[Evidence, ...]) -> None:
    progress = start_progress(6, evidence={"conversion": GATE})
    for entry in entries:
        apply(progress, entry, 1.0)
    assert step(progress, 2.0).action == "abort"


def test_entry_of_evidence_survives_the_log() -> None:
    assert entry_from_plain(entry_to_plain(STOP)) == STOP


def test_verdict_follows_the_decisions_and_a_roll_back(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    fleet = start(store, evidence={"conversion": {"judge": "token:shop"}})
    assert fleet.run(succeed) == "running"
    undecided = find_verdict(store, fleet.name)
    assert undecided.verdict == "undecided" and "awaited: conversion" in undecided.reasons[0]
    evidence = Evidence(gate="conversion", statement="pass")
    with pytest.raises(FleetError, match="alone"):
        add_evidence(store, fleet.name, evidence, "anna")
    assert add_evidence(store, fleet.name, evidence, "token:shop").outcome == "pass"
    assert fleet.run(succeed) == "succeeded"
    assert find_verdict(store, fleet.name).verdict == "pass"
    with pytest.raises(FleetError, match="too late"):
        add_evidence(store, fleet.name, evidence, "token:shop")
    give_order(store, fleet.name, "abort", "anna")
    assert fleet.run(succeed) == "aborted"
    assert find_verdict(store, fleet.name).verdict == "stop"
    assert replay_rollout(store, fleet.name) == []


def test_evidence_against_a_release_takes_its_devices_back(store: Store) -> None:
    add_devices(store, 20)
    add_release(store)
    fleet = start(store, evidence={"conversion": {"limit": 2.0}})
    fleet.run(succeed)
    add_evidence(store, fleet.name, Evidence(gate="conversion", value=3.0, reason="<b>bad</b>"), "shop")
    assert fleet.run(succeed) == "aborted"
    verdict = find_verdict(store, fleet.name)
    assert verdict.verdict == "stop"
    assert "conversion is 3, expected at most 2 by shop: <b>bad</b>" in verdict.reasons[0]
