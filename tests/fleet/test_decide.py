"""Rollouts of simulated devices: bad releases stop early, good ones get through, the log decides alike."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.agent.parts import NOON, make_desired, view, want
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN, Model, decisions, simulate
from tests.toolkit.cases import cases

from edgekit_fleet.rollouts.decide import decide
from edgekit_fleet.rollouts.gate_table import Sample, make_limits
from edgekit_fleet.rollouts.gates import Period, find_period, judge_samples, measure
from edgekit_fleet.rollouts.progress import (
    TRANSIENT_CODES,
    UNTRIED_CODES,
    AnswerEntry,
    Decision,
    JoinEntry,
    ModelSettings,
    OrderEntry,
    Progress,
    Reading,
    RolloutSettings,
    StartEntry,
    apply,
    begin,
    entry_from_plain,
    entry_to_plain,
)
from edgekit_fleet.rollouts.replay import replay
from edgekit_fleet.rollouts.waves import (
    default_minimum,
    draw_delay,
    freeze_cohort,
    join_cohort,
    plan_waves,
)
from edgekit_runtime.agent.documents import ModelFigures
from edgekit_runtime.agent.execution.step_child import MAX_FAILURES
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.reconcile import MAX_LOADS, count_time, reconcile
from edgekit_runtime.errors import FleetError

LIMITS = make_limits()


def start(count: int, **settings: object) -> Progress:
    devices = tuple(f"d{number}" for number in range(count))
    waves = (2, count) if count > 2 else (count,)
    models = {"m": ModelSettings(classes=("rpi5",))}
    made = RolloutSettings(**{"waves": waves, "minimum": 2, "models": models, **settings})  # type: ignore[arg-type]
    return begin(StartEntry(settings=made, devices=devices, classes=("rpi5",) * count), 0.0)


def step(progress: Progress, now: float) -> Decision:
    decision = decide(progress, now)
    assert decision is not None
    if decision.action != "wait":
        apply(progress, decision, now)
    return decision


def answer(
    progress: Progress, devices: tuple[str, ...], now: float, outcome: str = "succeeded", code: str = ""
) -> None:
    for device in devices:
        readings = (Reading(model="m", stage=0, measures={"latency": 0.0}),)
        apply(progress, AnswerEntry(device=device, outcome=outcome, code=code, readings=readings), now)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BAD_MODELS)
@pytest.mark.parametrize("devices", [200, 3000])
def test_bad_model_stops_at_few_devices(name: str, devices: int, is_long: bool) -> None:
    for seed in range(5 if is_long else 2):
        run = simulate(seed, devices, BAD_MODELS[name])
        assert run.exposed <= (default_minimum(devices) if devices > 1000 else 40)
        last = decisions(run)[-1]
        if run.progress.state == "paused":
            assert last.action == "pause" and "too few to stop it" in last.sentence
        else:
            assert last.action == "abort" and len(last.devices) == run.exposed


def run_until_doubt(progress: Progress) -> float:
    """Let every fifth device fail until the rollout pauses; returns the time."""
    now, seen = 0.0, 0
    while progress.state == "running":
        now += 10.0
        for device in step(progress, now).devices:
            answer(progress, (device,), now, "failed" if seen % 5 == 0 else "succeeded")
            seen += 1
    return now


def test_suspected_release_waits_for_a_person_and_then_goes_on() -> None:
    progress = start(100)
    now = run_until_doubt(progress)
    assert progress.state == "paused" and 30 <= progress.started <= 32
    assert progress.last is not None
    sentence = progress.last.sentence
    assert "failed to install it" in sentence and "too few to stop it" in sentence
    assert step(progress, now + 1).action == "wait"
    apply(progress, OrderEntry(order="resume", who="anna"), now + 2)
    assert step(progress, now + 3).action == "start"


def test_after_a_resume_the_usual_steps_hold_until_twice_as_many_have_it() -> None:
    progress = start(10_000)
    now = run_until_doubt(progress)
    had = progress.started
    apply(progress, OrderEntry(order="resume", who="anna"), now + 1)
    steps = 0
    while progress.started < 2 * had:
        steps += 1
        answer(progress, step(progress, now + 1 + steps).devices, now + 1 + steps)
    assert steps == 1


def test_resume_of_a_pause_by_a_person_leaves_the_doubt() -> None:
    progress = start(100)
    answer(progress, step(progress, 1.0).devices, 2.0)
    apply(progress, OrderEntry(order="pause", who="anna"), 3.0)
    assert step(progress, 4.0).sentence == "paused by order; resume it"
    apply(progress, OrderEntry(order="resume", who="anna"), 5.0)
    assert progress.resumed_with == 0
    run_until_doubt(progress)
    assert progress.pause is not None and progress.pause.is_doubt
    apply(progress, OrderEntry(order="resume", who="anna"), 1e6)
    assert progress.resumed_with == progress.started
    apply(progress, OrderEntry(order="pause", who="anna"), 1e6)
    assert step(progress, 1e6).sentence == "paused by order; resume it"


@pytest.mark.parametrize("name", ["2 x latency", "5 points more errors", "NaN"])
def test_bad_model_among_twelve_stops_at_few_devices(name: str) -> None:
    run = simulate(1, 1_000, BAD_MODELS[name], others=11)
    assert run.exposed <= default_minimum(1_000)
    assert run.progress.state in ("aborted", "paused")


@pytest.mark.parametrize("devices", [1, 2, 7, 20, 200])
def test_clean_release_reaches_every_device(devices: int, is_long: bool) -> None:
    for seed in range(10 if is_long else 2):
        run = simulate(seed, devices, CLEAN)
        is_alone = devices <= 2  # one that is offline, of two, leaves too few answers
        assert run.progress.state == "succeeded" or (is_alone and run.progress.state == "paused")
        assert run.exposed == devices or is_alone


def test_log_of_a_rollout_gives_the_same_decisions(is_long: bool) -> None:
    """Through the JSON of the audit log, and with clean, bad and half-bad models in fleets of seven sizes."""
    models = [CLEAN, *BAD_MODELS.values(), Model(crash_share=0.02), Model(agreement=0.952)]
    rounds = 14 if is_long else 1  # of a fleet of another size each, from 20 to 80 devices
    for seed in range(rounds * len(models)):
        run = simulate(seed, 20 + 10 * (seed % 7), models[seed % len(models)])
        written = [(at, json.dumps(entry_to_plain(entry))) for at, entry in run.log]
        progress, differences = replay((at, entry_from_plain(json.loads(text))) for at, text in written)
        assert differences == []
        assert progress.state == run.progress.state and progress.started == run.exposed


def test_changed_log_is_noticed() -> None:
    run = simulate(3, 100, BAD_MODELS["crash loop"])
    log = [
        (at, replace(entry, fault="") if isinstance(entry, AnswerEntry) else entry) for at, entry in run.log
    ]
    _, differences = replay(log)
    assert [difference.logged.action for difference in differences] == ["abort"]


def test_log_without_a_start_is_refused() -> None:
    with pytest.raises(FleetError, match="does not begin with its start"):
        replay([(0.0, OrderEntry(order="pause"))])


def test_thirty_failures_of_a_hundred_answers_stop_a_group_of_a_thousand() -> None:
    """The peer divides by the group: 3 % of 1,000 would go on below a limit of 5 %."""
    samples = [Sample(device_class="rpi5", is_failed=number < 30) for number in range(100)]
    verdict = judge_samples(samples, LIMITS, ["m"]).verdict
    assert verdict is not None and verdict.gate == "install"
    assert "30 of 100 devices that began failed to install it" in verdict.sentence


def test_noise_of_a_model_that_has_not_changed_never_stops_it(is_long: bool) -> None:
    """Calls fail in 2 % with both versions: differences scatter by more than the limit of one point."""
    draws = np.random.default_rng(0)
    for _ in range(20 if is_long else 7):
        failed = draws.binomial(20, 0.02, 5_000) / 20 - draws.binomial(2_000, 0.02, 5_000) / 2_000
        ratios = draws.normal(0.0, 0.3, 5_000)
        samples = [
            sample("rpi5", errors=few, latency=ratio)
            for few, ratio in zip(failed.tolist(), ratios.tolist(), strict=True)
        ]
        assert all(
            judge_samples(samples[:count], LIMITS, ["m"]).verdict is None for count in (30, 300, 5_000)
        )


def test_failures_that_come_before_successes_do_not_stop_a_step() -> None:
    progress = start(100)
    devices = tuple(list(progress.members)[:30])
    apply(progress, Decision(action="start", wave=0, sentence="", devices=devices), 0.0)
    answer(progress, devices[:3], 5.0, "failed")
    assert step(progress, 10.0).action == "wait"
    assert step(progress, progress.settings.patience_s + 1.0).action == "abort"  # the others are silent


def test_package_that_is_bad_for_one_class_stops() -> None:
    """Twelve slow ones of 600 are no mean over the fleet."""
    good, slow = [sample("x86-64", latency=0.0)] * 588, [sample("rpi5", latency=0.7)] * 16
    verdict = judge_samples([*good, *slow], LIMITS, ["m"]).verdict
    assert verdict is not None and "of class rpi5" in verdict.sentence


@pytest.mark.parametrize("bad", ["m0", "m11"])
def test_one_bad_model_of_twelve_stops_the_release_and_is_named(bad: str) -> None:
    models = [f"m{number}" for number in range(12)]
    slow = {(model, 0): {"latency": 0.7 if model == bad else 0.0} for model in models}
    samples = [Sample(device_class="rpi5", is_failed=False, measures=slow)] * 20  # type: ignore[arg-type]
    verdict = judge_samples(samples, LIMITS, models).verdict
    assert verdict is not None and verdict.sentence.startswith(f"latency of {bad} is 2.01 times")


def test_twelve_noisy_models_stop_no_release() -> None:
    draws = np.random.default_rng(1)
    models = [f"m{number}" for number in range(12)]
    samples = [
        Sample(
            device_class="rpi5",
            is_failed=False,
            measures={(model, 0): {"latency": draws.normal(0.0, 0.3)} for model in models},
        )
        for _ in range(2_000)
    ]
    assert all(judge_samples(samples[:count], LIMITS, models).verdict is None for count in (30, 300, 2_000))


def test_model_that_gets_slow_later_stops_the_release() -> None:
    progress = start(100)
    devices = tuple(list(progress.members)[:30])
    apply(progress, Decision(action="start", wave=0, sentence="", devices=devices), 0.0)
    answer(progress, devices, 1.0)
    assert judge_samples(progress.samples(2.0), LIMITS, ["m"]).verdict is None
    for device in devices:
        late = (Reading(model="m", stage=1, measures={"latency": 0.7}),)
        apply(progress, AnswerEntry(device=device, readings=late), 3.0)
    decision = step(progress, 4.0)
    assert decision.action == "abort" and "latency is 2.01 times" in decision.sentence


def test_device_is_judged_when_all_its_models_have_answered() -> None:
    classes = {"m": ("rpi5",), "words": ("rpi5",), "jetson-only": ("jetson",)}
    models = {name: ModelSettings(classes=of) for name, of in classes.items()}
    progress = start(40, models=models)
    first, second = step(progress, 0.0).devices
    answer(progress, (first, second), 1.0)
    assert step(progress, 2.0).sentence == "0 of 2 devices are judged and 2 are needed"
    for device in (first, second):
        words = (Reading(model="words", stage=0, measures={"latency": 0.0}),)
        apply(progress, AnswerEntry(device=device, readings=words), 3.0)
    assert step(progress, 4.0).action == "start"


def sample(device_class: str, **measures: float) -> Sample:
    return Sample(device_class=device_class, is_failed=False, measures={("m", 0): measures})  # type: ignore[dict-item]


def figures(requests: int, latency_ms: float, **others: float) -> ModelFigures:
    """Return counts of so many calls with this mean latency."""
    answer_s = requests * latency_ms / 1e3
    return ModelFigures(model="m", version="1", requests=requests, answer_s=answer_s, **others)  # type: ignore[arg-type]


def test_period_has_the_calls_between_two_reports() -> None:
    """A busy hour before the first one says nothing."""
    begin = figures(1000, 50.0, energy_mj=8.0, failed=0)
    end = replace(begin, requests=1300, failed=100, answer_s=begin.answer_s + 2.0, energy_mj=7.0, drift=0.1)
    assert find_period(begin, end) == Period(
        requests=300,
        values={
            "latency": pytest.approx(10.0),
            "energy": pytest.approx((7.0 * 1300 - 8.0 * 1000) / 300),
            "errors": pytest.approx(1 / 3),
            "drift": 0.1,
        },
    )


def test_period_over_a_restart_of_the_service_begins_with_it() -> None:
    assert find_period(figures(1000, 50.0), figures(10, 5.0)).values["latency"] == pytest.approx(5.0)


def test_period_without_calls_says_nothing() -> None:
    report = figures(1000, 50.0, energy_mj=8.0)
    assert find_period(report, report) == Period()
    assert find_period(None, ModelFigures(model="m", version="1")) == Period()


def latency(mean_ms: float) -> Period:
    return Period(values={"latency": mean_ms})


def test_busy_evening_speaks_not_against_a_release() -> None:
    controls = [(latency(10.0), latency(20.0))] * 5
    before, after = latency(30.0), latency(60.0)
    assert measure(before, after, controls)["latency"] == pytest.approx(0.0)
    assert measure(before, after, controls[:4])["latency"] == pytest.approx(0.693, abs=1e-3)


def test_abort_takes_back_every_device_that_was_offered_the_release() -> None:
    progress = start(8)
    answer(progress, step(progress, 0.0).devices, 1.0)
    second = step(progress, 2.0)
    assert len(second.devices) == 2
    apply(progress, OrderEntry(order="abort", who="anna"), 3.0)
    last = step(progress, 4.0)
    assert last.action == "abort" and set(last.devices) == {"d0", "d1", *second.devices}
    assert "anna aborted" in last.sentence
    assert decide(progress, 5.0) is None


@pytest.mark.parametrize(("approval", "asked"), [("first", [0]), ("each", [0, 1])])
def test_wave_waits_for_its_approval(approval: str, asked: list[int]) -> None:
    progress = start(4, approval=approval)
    now, seen = 0.0, []
    while progress.state == "running":
        now += 1.0
        decision = step(progress, now)
        if decision.action == "ask":
            seen.append(decision.wave)
            assert decide(progress, now + 1e6) == decision
            apply(progress, OrderEntry(order="approve", who="anna"), now)
        answer(progress, decision.devices, now)
    assert seen == asked and progress.state == "succeeded"


def test_failure_of_the_network_is_tried_again_and_others_are_not() -> None:
    progress = start(40)
    first = step(progress, 0.0).devices
    apply(progress, AnswerEntry(device=first[0], outcome="failed", code="timeout"), 1.0)
    apply(progress, AnswerEntry(device=first[1], outcome="failed", code="self-test"), 1.0)
    retried = step(progress, 2.0)
    assert retried.action == "retry" and retried.devices == first[:1]


def test_devices_that_do_not_answer_are_replaced_and_followed() -> None:
    progress = start(10)
    assert step(progress, 0.0).devices == ("d0", "d1")
    answer(progress, ("d0",), 1.0)
    assert step(progress, 10.0).action == "wait"
    assert step(progress, 3700.0).devices == ("d2",)


def test_rollout_without_answers_pauses_and_can_be_resumed() -> None:
    progress = start(2)
    step(progress, 0.0)
    now = 172_801.0
    assert step(progress, now).action == "pause"
    assert step(progress, now + 1).action == "wait"
    apply(progress, OrderEntry(order="resume"), now + 2)
    answer(progress, ("d0", "d1"), now + 3)
    assert step(progress, now + 4).action == "succeed"


def test_paused_rollout_still_stops_by_its_gates() -> None:
    progress = start(40)
    devices = step(progress, 0.0).devices
    apply(progress, OrderEntry(order="pause"), 1.0)
    for device in devices:
        apply(progress, AnswerEntry(device=device, outcome="succeeded", fault="crash-loop"), 2.0)
    assert step(progress, 3.0).action == "abort"


def test_device_that_joins_comes_last() -> None:
    progress = start(3)
    apply(progress, JoinEntry(devices=("new",), classes=("rpi5",)), 1.0)
    assert list(progress.members) == ["d0", "d1", "d2", "new"]


def test_cohort_is_random_repeatable_and_spreads_classes() -> None:
    classes = {f"d{number}": "rare" if number < 10 else "usual" for number in range(100)}
    order = freeze_cohort("r1", classes)
    assert order == freeze_cohort("r1", dict(reversed(classes.items()))) != freeze_cohort("r2", classes)
    assert sorted(order) == sorted(classes)
    assert [sum(classes[device] == "rare" for device in order[part : part + 50]) for part in (0, 50)] == [
        5,
        5,
    ]
    assert join_cohort("r1", order, ["d3", "z"]) == (*order, "z")


@cases(
    ("text", "devices", "minimum", "expected"),
    [
        ("1%,10%,50%,100%", 1000, 1, (10, 100, 500, 1000)),
        ("1%,10%,50%,100%", 1000, 30, (30, 100, 500, 1000)),
        ("1%,10%,50%,100%", 20, 2, (2, 10, 20)),
        ("1%,100%", 1, 2, (1,)),
        ("5, 50, 100%", 70, 2, (5, 50, 70)),
        ("0.5%,100%", 10_001, 1, (51, 10_001)),
        ("5,500", 70, 2, (5, 70)),
    ],
)
def test_waves_are_planned(text: str, devices: int, minimum: int, expected: tuple[int, ...]) -> None:
    assert plan_waves(text, devices, minimum) == expected


@cases("text", ["", "1%", "10%,1%,100%", "a", "0,100%", "101%", "1.5,100%", "1%;100%", "-1%,100%"])
def test_malformed_waves_are_refused(text: str) -> None:
    with pytest.raises(FleetError, match="waves"):
        plan_waves(text, 1000, 1)


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"max_latency_ratio": 1.0}, {"min_agreement": 1.0}])
def test_limit_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FleetError, match="expected"):
        make_limits(wrong)


def test_rollout_to_one_device_that_fails_does_not_end_well() -> None:
    progress = start(1)
    begun = step(progress, 1.0)
    answer(progress, begun.devices, 2.0, "failed")
    ended = step(progress, 3.0)
    assert (ended.action, progress.state) == ("abort", "aborted")
    assert ended.sentence.startswith(
        "stopped, and 1 device goes back: 1 of 1 devices are judged, and none runs the release well: "
    )
    assert "failed to install it" in ended.sentence


@pytest.mark.parametrize("code", sorted(UNTRIED_CODES))
@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_device_that_could_not_try_the_release_says_nothing_about_it(outcome: str, code: str) -> None:
    progress = start(1)
    answer(progress, step(progress, 1.0).devices, 2.0, outcome, code)
    ended = step(progress, 3.0)
    assert ended.sentence == (
        "stopped, and 1 device goes back: 1 of 1 devices are judged, 1 device has not tried it"
        f" ({code}: 1), which says nothing about the release"
    )


def test_full_disks_do_not_stop_a_release_that_others_run_well() -> None:
    progress = start(40)
    while progress.state == "running":
        devices = step(progress, 1.0).devices
        answer(progress, tuple(one for one in devices if int(one[1:]) % 2), 2.0, "failed", "disk-full")
        answer(progress, tuple(one for one in devices if not int(one[1:]) % 2), 2.0)
    assert progress.state == "succeeded"
    assert progress.last is not None
    assert "nothing is shown against the release; 20 devices have not tried it (disk-full: 20)" in (
        progress.last.sentence
    )


def test_first_device_with_a_full_disk_lets_no_further_devices_begin_than_the_first_step() -> None:
    progress = start(40, minimum=1, waves=(1, 40))
    answer(progress, step(progress, 1.0).devices, 2.0, "refused", "disk-full")
    assert len(step(progress, 3.0).devices) == 1


def test_end_of_a_rollout_counts_the_devices_that_do_not_run_the_release() -> None:
    progress = start(2)
    first, second = step(progress, 1.0).devices
    answer(progress, (first,), 2.0, "refused")
    answer(progress, (second,), 2.0)
    ended = step(progress, 3.0)
    assert ended.action == "succeed"
    assert "1 device does not run the release well" in ended.sentence


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 10])
def test_small_fleet_begins_with_one_device(devices: int) -> None:
    minimum = default_minimum(devices)
    assert (minimum, plan_waves("1%,10%,50%,100%", devices, minimum)[0]) == (1, 1)


@pytest.mark.parametrize("waves", [(1, 2), (2,)])
@pytest.mark.parametrize("fault", ["", "not-finite", "crash-loop", "fallback"])
def test_bad_release_on_the_only_canary_never_reaches_the_second_device(
    waves: tuple[int, ...], fault: str
) -> None:
    progress = start(2, waves=waves, minimum=1)
    (canary,) = step(progress, 0.0).devices
    apply(progress, AnswerEntry(device=canary, outcome="succeeded" if fault else "failed"), 1.0)
    if fault:
        apply(progress, AnswerEntry(device=canary, fault=fault), 2.0)  # type: ignore[arg-type]
    ended = step(progress, 3.0)
    assert (ended.action, ended.devices) == ("abort", (canary,))
    assert "none runs the release well" in ended.sentence


def test_slow_canary_of_two_devices_is_shown_to_a_person_before_the_second() -> None:
    progress = start(2, waves=(1, 2), minimum=1)
    (canary,) = step(progress, 0.0).devices
    slow = (Reading(model="m", stage=0, measures={"latency": math.log(2.0)}),)
    apply(progress, AnswerEntry(device=canary, outcome="succeeded", readings=slow), 1.0)
    paused = step(progress, 2.0)
    assert paused.action == "pause" and "latency is 2.00 times the old version's" in paused.sentence
    apply(progress, OrderEntry(order="resume", who="anna"), 3.0)
    assert step(progress, 4.0).action == "start"


def test_wave_of_a_small_fleet_is_not_passed_while_the_evidence_leans_against_the_release() -> None:
    progress = start(8, waves=(4, 8), minimum=2)
    now = 0.0
    while progress.state == "running":
        now += 10.0
        for device in step(progress, now).devices:
            answer(progress, (device,), now, "failed" if device == "d0" else "succeeded")
    assert (progress.state, progress.started) == ("paused", 4)


def test_faulty_device_of_a_small_fleet_pauses_the_rollout_at_its_end() -> None:
    progress = start(3, waves=(3,), minimum=3)
    devices = step(progress, 0.0).devices
    answer(progress, devices, 1.0)
    apply(progress, AnswerEntry(device=devices[0], fault="not-finite"), 2.0)
    paused = step(progress, 3.0)
    assert paused.action == "pause" and "1 of 3 devices" in paused.sentence


def test_codes_that_are_tried_again_are_codes_of_the_agent() -> None:
    wanted = want()
    conditions = NOON
    begun = reconcile(make_desired(wanted), (), view(), conditions).executions
    late = count_time(begun, wanted.timeout_s + 1)
    (ended,) = reconcile(make_desired(wanted), late, view(), conditions).executions
    installed = view(version=wanted.version, manifest_sha256=wanted.manifest_sha256, health="unproven")
    (asked,) = reconcile(make_desired(wanted), begun, installed, conditions).executions
    for _ in range(MAX_LOADS):
        asked = asked.fail_once("load", "refused", 0.0)
    (unserved,) = reconcile(make_desired(wanted), (asked,), installed, conditions).executions
    (killed,) = begun
    for _ in range(MAX_FAILURES):
        killed = StepResult(outcome="retry", code="internal", max_failures=MAX_FAILURES).apply(killed)
    reports = [one.report for one in (ended, unserved, killed)]
    assert [one.state for one in reports] == ["timed_out", "failed", "failed"]
    assert {one.code for one in reports} == TRANSIENT_CODES


def test_retries_bound_the_attempts() -> None:
    progress = start(1, waves=(1,), minimum=1, retries=1)
    attempts = 0
    for now in range(0, 20, 2):
        decision = step(progress, float(now))
        if decision.action not in ("start", "retry"):
            break
        attempts += 1
        apply(progress, AnswerEntry(device="d0", outcome="failed", code="timeout"), now + 1.0)
    assert (attempts, progress.state) == (2, "aborted")


def test_delays_are_spread_over_the_whole_time() -> None:
    delays = [draw_delay("r", f"d{number}", 600.0) for number in range(1000)]
    assert delays == [draw_delay("r", f"d{number}", 600.0) for number in range(1000)]
    counts, _ = np.histogram(delays, bins=6, range=(0.0, 600.0))
    assert counts.sum() == 1000 and counts.min() > 120
