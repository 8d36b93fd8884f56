"""A step in a process of its own that ends before its work is done."""

import threading
from pathlib import Path

import pytest
from tests.agent.parts import NOON, make_desired, view, want

from edgekit_runtime.agent.execution.step_child import ChildSteps, StepPlaces
from edgekit_runtime.agent.execution.step_result import StepOrder
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.reconcile import Step, reconcile


def carry_out(folder: Path):
    places = StepPlaces(config=str(folder), state=str(folder / "state"), keys=str(folder / "keys"))
    order = StepOrder(step=Step("download", "kws", want()), most_bytes=10, known_time_s=1.8e9)
    return ChildSteps(places).carry_out(order, threading.Event(), pytest.fail, lambda _: None)


def begin() -> Progress:
    (progress,) = reconcile(make_desired(want()), (), view(), NOON).executions
    return progress


def test_step_whose_process_ends_is_tried_again_three_times_and_says_why(tmp_path):
    result = carry_out(tmp_path)
    assert (result.outcome, result.code) == ("retry", "internal")
    assert "ended with exit code 1: " in result.reason
    assert "this device is in no fleet" in result.reason
    progress = begin()
    states = []
    for _ in range(3):
        progress = result.apply(progress)
        states.append(progress.report.state)
    assert states == ["downloading", "downloading", "failed"]
