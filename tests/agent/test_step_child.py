"""A step in a process of its own: one that ends too early, hangs, or sends what no step sends."""

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from tests.agent.parts import NOON, make_desired, view, want
from tests.waiting import is_running, wait_for

from edgekit_runtime.agent.execution import step_child
from edgekit_runtime.agent.execution.step_child import ChildSteps, StepPlaces
from edgekit_runtime.agent.execution.step_result import StepOrder, StepResult
from edgekit_runtime.agent.execution.step_runner import StepRunner
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.reconcile import Step, reconcile
from edgekit_runtime.commands.command import positive


def carry_out(folder: Path, most_bytes: int = 10):
    places = StepPlaces(config=str(folder), state=str(folder / "state"), keys=str(folder / "keys"))
    order = StepOrder(step=Step("download", "kws", want()), most_bytes=most_bytes, known_time_s=1.8e9)
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


def test_largest_budget_that_the_command_line_takes_is_taken_by_the_process(tmp_path):
    largest_bytes = int(positive("1e12") * 1e6)  # --month-mb
    assert "this device is in no fleet" in carry_out(tmp_path, largest_bytes).reason


def test_other_failures_before_do_not_count_towards_the_limit_of_a_code():
    progress = begin()
    internal = StepResult(outcome="retry", code="internal", max_failures=3)
    for result in [StepResult(outcome="retry", code="network")] * 5 + [internal, internal]:
        progress = result.apply(progress)
    assert (progress.report.state, progress.failures) == ("downloading", 7)
    progress = StepResult(outcome="retry", code="network").apply(progress)
    for _ in range(2):
        progress = internal.apply(progress)
    assert progress.report.state == "downloading"
    assert internal.apply(progress).report.state == "failed"


@pytest.mark.parametrize("outcome", ["unchanged", "installed", "retry", "refused", "failed"])
def test_execution_that_has_ended_stays_as_it_is_whatever_becomes_of_its_step(outcome):
    progress = begin().enter("timed_out", code="timeout", reason="late")
    assert StepResult(outcome=outcome, code="internal", max_failures=1).apply(progress) == progress


CHILD = """
import os, sys, time
from pathlib import Path
from edgekit_runtime.system.child_process import open_channel
with open_channel() as channel, channel.makefile("rw") as lines:
    lines.readline()
    Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
"""
HANGS = """
    while True:
        lines.write('{"received_bytes": 1}\\n')
        lines.flush()
        time.sleep(0.05)
"""
SILENT = "\n    time.sleep(600)\n"
SAYS = """
    lines.write(Path(os.environ["SAID_FILE"]).read_text())
    lines.flush()
    time.sleep(600)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Let steps be carried out by the code given; returns the file with the process's id."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setenv("SAID_FILE", str(tmp_path / "said"))

    def make(code):
        (tmp_path / "child_of_test.py").write_text(CHILD + code)
        return tmp_path / "pid"

    return make


def order_install():
    return StepOrder(step=Step("install", "kws", want()))


def make_steps(folder, **limits):
    places = StepPlaces(config=str(folder), state=str(folder / "state"), keys=str(folder / "keys"))
    return ChildSteps(places, module="child_of_test", **limits)


def begin_step(folder, order):
    runner = StepRunner(folder, None, make_steps(folder, stop_s=0.2))
    runner.begin(order)
    return runner


def read_pid(file):
    return int(wait_for(lambda: file.exists() and file.read_text(), "the process of the step"))


@pytest.mark.parametrize("code", [HANGS, SILENT], ids=["reports", "silent"])
def test_step_that_goes_on_after_the_agent_stops_is_killed_before_the_next_agent_begins(
    code, child, tmp_path
):
    file = child(code)
    runner = begin_step(tmp_path, order_install())
    pid = read_pid(file)
    runner.close()
    assert not is_running(pid)
    assert runner.collect() == [("e1", StepResult())]


def test_step_whose_process_is_silent_for_too_long_is_killed_and_tried_again(child, tmp_path, monkeypatch):
    pids = []

    class RecordedChild(step_child.JsonChild):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            pids.append(self.pid)  # a slow machine kills it before it could write that itself

    monkeypatch.setattr(step_child, "JsonChild", RecordedChild)
    child(SILENT)
    steps = make_steps(tmp_path, silence_s=0.3)
    result = steps.carry_out(order_install(), threading.Event(), pytest.fail, pytest.fail)
    assert (result.outcome, result.code, result.max_failures) == ("retry", "internal", 3)
    assert "the process of the step 'install' hangs" in result.reason
    assert [is_running(pid) for pid in pids] == [False]


DIES = """
    from edgekit_runtime.agent.execution.step_child import _Reporter
    reporter = _Reporter(lines)
    for _ in range(5):
        reporter.count(16 << 10)
    os.kill(os.getpid(), 9)
"""


def test_bytes_of_a_process_that_is_killed_at_once_are_counted_up_to_64_kib(child, tmp_path):
    child(DIES)
    counts = []
    result = make_steps(tmp_path).carry_out(order_install(), threading.Event(), pytest.fail, counts.append)
    assert (result.outcome, result.code) == ("retry", "internal")
    assert "ended by SIGKILL" in result.reason
    assert counts == [64 << 10]


def test_install_that_hangs_is_killed_once_its_execution_has_ended(child, tmp_path):
    file = child(HANGS)
    runner = begin_step(tmp_path, order_install())
    pid = read_pid(file)
    runner.retain(set(), {"e1"})  # an install is finished even where nothing more is to be done
    wait_for(lambda: runner.take_counts()[1], "news")
    wait_for(lambda: runner.take_counts()[1], "more news")
    assert is_running(pid)
    runner.retain({"e2"}, {"e2"})
    wait_for(runner.collect, "the end of the step")
    assert not is_running(pid)
    assert not runner.is_busy


@pytest.mark.parametrize(
    "said",
    [
        "x" * (1 << 20),
        "[" * 60_000 + "\n",
        "{\n",
        "[0, [], null]\n",
        '{"received_bytes": -1}\n',
        '{"received_bytes": true}\n',
        '{"received_bytes": 1.5}\n',
        '{"received_bytes": 1, "more": 1}\n',
        '{"received_bytes": 1, "notes": [["surprise", "text"]]}\n',
        '{"received_bytes": 1, "notes": [["attack", 7]]}\n',
        '{"received_bytes": 1, "notes": [["attack"]]}\n',
        '{"received_bytes": 1, "result": {"outcome": "won"}}\n',
        '{"received_bytes": 1, "result": {"wait_s": -1}}\n',
        "\u00e9\n",
    ],
)
def test_process_that_sends_no_news_of_a_step_is_ended_and_counts_nothing(said, child, tmp_path):
    file = child(SAYS)
    (tmp_path / "said").write_text(said)
    stop = threading.Event()
    result = make_steps(tmp_path).carry_out(order_install(), stop, pytest.fail, pytest.fail)
    assert (result.outcome, result.code, result.max_failures) == ("retry", "internal", 3)
    assert "the process of the step 'install' sent no news of a step: " in result.reason
    assert len(result.reason) < 1000
    assert not is_running(read_pid(file))


def test_news_of_a_step_reach_the_agent(child, tmp_path):
    child(SAYS)
    result = StepResult(outcome="retry", code="digest", reason="wrong")
    lines = [
        {"received_bytes": 5, "notes": [["attack", "one"], ["delta", "two"]]},
        {"received_bytes": 6, "result": dataclasses.asdict(result)},
    ]
    (tmp_path / "said").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    notes, counts = [], []
    found = make_steps(tmp_path).carry_out(
        order_install(), threading.Event(), lambda *note: notes.append(note), counts.append
    )
    assert found == result
    assert (notes, counts) == ([("attack", "one"), ("delta", "two")], [5, 6])
