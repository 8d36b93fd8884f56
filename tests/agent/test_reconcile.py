"""What the agent decides from what is wanted and what is here."""

from dataclasses import replace
from typing import Any

import pytest
from tests.agent.parts import HERE, NEW, NOON, PACKAGE, make_desired, view, want
from tests.toolkit.cases import cases

from edgekit_runtime.agent.conditions import DeviceConditions, ModelView
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.reconcile import NextSteps, choose_step, count_time, reconcile


def decide(
    models: dict[str, ModelView],
    conditions: DeviceConditions = NOON,
    before: NextSteps | None = None,
    **changes: Any,
) -> NextSteps:
    executions = () if before is None else before.executions
    return reconcile(make_desired(want(**changes)), executions, models, conditions)


def state_of(plan: NextSteps) -> tuple[str, str]:
    (progress,) = plan.executions
    return progress.report.state, progress.report.code


def actions(plan: NextSteps) -> list[str]:
    return [step.action for step in plan.steps]


def test_update_goes_from_download_to_success():
    plan = decide(view())
    assert (state_of(plan), actions(plan)) == (("downloading", ""), ["download"])
    plan = decide(view(), HERE, plan)
    assert (state_of(plan), actions(plan)) == (("installing", ""), ["install"])
    installed = {"version": "2.0.0", "manifest_sha256": NEW, "health": "unproven"}
    plan = decide(view(**installed), HERE, plan)
    assert (state_of(plan), actions(plan)) == (("trying", "load"), ["load"])
    plan = decide(view(**installed, served=("1.0.0", "2.0.0"), on_trial="2.0.0"), HERE, plan)
    assert (state_of(plan), plan.status) == (("trying", "trial"), "working")
    plan = decide(view(**{**installed, "health": "healthy"}, served=("2.0.0",)), HERE, plan)
    assert (state_of(plan), actions(plan), plan.status) == (("succeeded", ""), [], "converged")


def test_without_a_service_the_installed_version_is_enough():
    models = view(version="2.0.0", manifest_sha256=NEW, health="unproven", served=None)
    assert state_of(decide(models)) == ("succeeded", "")
    (begun,) = decide(view(), HERE).executions
    begun = StepResult(outcome="installed").apply(begun)
    plan = reconcile(make_desired(want()), (begun,), models, HERE)
    assert state_of(plan) == ("succeeded", "")


def test_version_rejected_during_its_trial_fails_with_the_reason():
    before = decide(view(version="2.0.0", manifest_sha256=NEW, health="unproven"), HERE)
    plan = decide(view(rejected=((NEW, "latency: 2 x"),)), HERE, before)
    assert state_of(plan) == ("failed", "rejected")
    assert (plan.status, plan.because) == ("diverged", "kws: 2.0.0 was rejected here: latency: 2 x")


def test_service_that_restarts_does_not_end_the_trial():
    installed = {"version": "2.0.0", "manifest_sha256": NEW, "health": "unproven"}
    before = decide(view(**installed, served=("1.0.0", "2.0.0"), on_trial="2.0.0"), HERE)
    plan = decide(view(**installed, served=None), HERE, before)
    assert (state_of(plan), actions(plan)) == (("trying", "trial"), [])


@pytest.mark.parametrize("served", [("1.0.0",), ("1.0.0", "2.0.0")])
def test_version_that_takes_the_service_down_has_not_succeeded(served: tuple[str, ...]):
    installed = {"version": "2.0.0", "manifest_sha256": NEW, "health": "unproven"}
    before = decide(view(**installed, served=served), HERE)
    gone = decide(view(**installed, served=None), HERE, before)
    assert state_of(gone)[0] == "trying"
    plan = decide(view(served=("1.0.0",), rejected=((NEW, "was begun 3 times"),)), HERE, gone)
    assert state_of(plan) == ("failed", "crash-loop")
    confirmed = {**installed, "health": "healthy"}
    assert state_of(decide(view(**confirmed, served=None), HERE, gone)) == ("succeeded", "")


def test_version_made_active_by_hand_ends_the_trial():
    before = decide(view(version="2.0.0", manifest_sha256=NEW, health="unproven"), HERE)
    assert state_of(decide(view(), HERE, before)) == ("failed", "replaced")


def test_fallback_after_success_shows_as_diverged_and_starts_nothing():
    before = decide(view(version="2.0.0", manifest_sha256=NEW, served=("2.0.0",)), HERE)
    plan = decide(view(rejected=((NEW, "was rolled back by hand"),)), HERE, before)
    assert (plan.status, actions(plan)) == ("diverged", [])
    assert "was rolled back by hand" in plan.because


@cases(
    ("models", "conditions", "changes", "expected"),
    [
        (view(rejected=((NEW, "NaN"),)), NOON, {}, ("refused", "rejected-here")),
        (view(pinned="1.0.0"), NOON, {}, ("refused", "pinned")),
        (view(version="3.0.0"), NOON, {}, ("refused", "older")),
        (view(), replace(NOON, free_bytes=1 << 20), {}, ("refused", "disk-full")),
        (view(), replace(NOON, budget_left_bytes=10), {}, ("refused", "budget")),
        (view(), NOON, {"window": "25:00-01:00"}, ("refused", "window")),
        (view(), replace(NOON, battery=0.1), {}, ("waiting", "battery")),
        (view(), replace(NOON, battery=0.1, is_charging=True), {}, ("downloading", "")),
        (view(), NOON, {"not_before_s": 5.0}, ("waiting", "jitter")),
        (view(), HERE, {"window": "23:00-04:00"}, ("waiting", "window")),
        (view(), replace(HERE, minute_of_day=30), {"window": "23:00-04:00"}, ("installing", "")),
        (view(), replace(HERE, minute_of_day=None), {"window": "00:00-23:59"}, ("waiting", "clock")),
        (view(version="3.0.0"), NOON, {"is_return": True}, ("downloading", "")),
        (view(rejected=((NEW, "NaN"),)), NOON, {"is_return": True}, ("downloading", "")),
    ],
)
def test_condition_decides_before_anything_is_downloaded(models, conditions, changes, expected):
    assert state_of(decide(models, conditions, **changes)) == expected


def test_execution_ends_by_its_timeout_whatever_it_waits_for():
    plan = decide(view(), replace(NOON, battery=0.1))
    late = replace(plan, executions=count_time(plan.executions, 86_401.0))
    plan = decide(view(), NOON, late)
    assert state_of(plan) == ("timed_out", "timeout")
    assert "battery" in plan.executions[0].report.reason
    assert actions(decide(view(), NOON, plan)) == []


def test_ended_execution_is_never_carried_out_again_but_a_new_one_is():
    ended = decide(view(pinned="1.0.0"))
    assert actions(decide(view(), NOON, ended)) == []
    assert actions(decide(view(), NOON, ended, execution="e2")) == ["download"]


def test_newer_document_supersedes_what_is_under_way():
    plan = decide(view(), NOON, decide(view()), execution="e2")
    assert [(one.execution, one.state) for one in plan.superseded] == [("e1", "superseded")]


def test_model_that_waits_does_not_hold_up_another():
    desired = make_desired(want(window="01:00-04:00", priority=9), want(model="other", execution="e2"))
    plan = reconcile(desired, (), view(), HERE)
    assert [(step.action, step.model) for step in plan.steps] == [("install", "other")]


def test_higher_priority_comes_first():
    desired = make_desired(want(priority=1), want(model="other", execution="e2", priority=2))
    assert [step.model for step in reconcile(desired, (), view(), NOON).steps] == ["other", "kws"]


def test_unsafe_version_is_unloaded_first_and_after_a_failure_too():
    assert actions(decide(view(), order="unloaded")) == ["unload", "download"]
    failed = decide(view(pinned="1.0.0"), order="unloaded")
    assert (state_of(failed), actions(failed)) == (("refused", "pinned"), ["unload"])
    assert actions(decide(view(served=()), order="unloaded")) == ["download"]


def test_unload_that_is_refused_blocks_no_other_step():
    desired = make_desired(
        want(order="unloaded", priority=2), want(model="other", execution="e2", not_before_s=9.0)
    )
    plan = reconcile(desired, (), view(), NOON)
    assert choose_step(plan.steps, ()).action == "unload"
    assert choose_step(plan.steps, {("unload", "kws")}).action == "download"
    failed = decide(view(pinned="1.0.0"), order="unloaded")
    assert choose_step(failed.steps, {("unload", "kws")}) is None


def test_expired_document_leaves_all_as_it_is():
    plan = decide(view(), replace(NOON, now_s=3e6))
    assert (plan.status, plan.steps, plan.executions) == ("stale", (), ())


def test_wrong_clock_does_not_make_a_document_stale():
    assert actions(decide(view(), replace(NOON, minute_of_day=None))) == ["download"]


def test_download_that_wastes_bytes_ends():
    plan = decide(view())
    (progress,) = plan.executions
    wasted = replace(progress, report=replace(progress.report, sent_bytes=2 << 20))
    plan = decide(view(), NOON, replace(plan, executions=(wasted,)))
    assert state_of(plan) == ("failed", "wasted")


def test_service_that_never_serves_the_version_ends_the_execution():
    models = view(version="2.0.0", manifest_sha256=NEW, health="unproven", remark="no memory")
    plan = decide(models)
    for _ in range(4):
        assert actions(plan) == ["load"]
        (progress,) = plan.executions
        plan = decide(models, NOON, replace(plan, executions=(progress.fail_once("load", "no memory", 0.0),)))
    assert (state_of(plan), actions(plan)) == (("failed", "load"), [])


def test_model_no_longer_wanted_is_removed():
    plan = reconcile(make_desired(removed=("kws", "gone")), (), view(), NOON)
    assert [(step.action, step.model) for step in plan.steps] == [("remove", "kws")]
    assert PACKAGE not in NOON.downloaded


def test_version_that_answers_nan_is_reported_as_faulty():
    models = view(version="2.0.0", manifest_sha256=NEW, served=("2.0.0",), not_finite=3)
    plan = decide(models)
    assert (plan.status, plan.models[0].health) == ("converged", "faulty")
    assert plan.models[0].because == "2.0.0 answered NaN or infinity 3 times"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("not_finite: the candidate answered NaN", "not-finite"),
        ("crash: its worker ended by SIGSEGV", "crash-loop"),
        ("was begun 3 times and never confirmed", "crash-loop"),
        ("p99: 3 times as slow", "rejected"),
    ],
)
def test_rejection_on_the_device_bears_the_code_by_which_gates_know_it(reason, code):
    models = view(version="2.0.0", manifest_sha256=NEW, health="unproven", served=("2.0.0",))
    plan = decide(view(rejected=((NEW, reason),)), NOON, decide(models))
    assert state_of(plan) == ("failed", code)
