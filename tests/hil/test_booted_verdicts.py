"""What judges the booted machine: each fault of a machine must be found, and a good one pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import hil_booted_events
from tests.hil.booted_fake import Clock, FakeMachine

from edgekit_hil.tests.booted_machine import (
    EVENTS,
    FIRST,
    SECOND,
    UPDATE_EVENTS,
    Expectation,
    InterruptedUpdate,
    Outcome,
    try_event,
)
from edgekit_hil.tests.host_side import Fleet
from edgekit_runtime.errors import BenchError

BOOTING = ("power cut in an installation", "reboot in an installation", "kernel panic")
ENDING = ("kill -9", "service hangs", "out of memory: the service")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("booted_machine", "host_side"):
        monkeypatch.setattr(f"edgekit_hil.tests.{module}.time", clock)
    return clock


def judge(event: str, act: Callable[[FakeMachine], None] = lambda _: None) -> Outcome:
    """Return the outcome of an event on a machine that was good until then."""
    fake = FakeMachine()
    machine = fake.open()
    act(fake)
    return try_event(machine, event, EVENTS[event], seed=1)


@pytest.mark.parametrize("event", EVENTS)
def test_right_version_after_an_event_passes(event: str) -> None:
    outcome = judge(event)

    assert outcome.is_right
    assert (outcome.restart_s is not None) == (event in ENDING)


@pytest.mark.parametrize("event", EVENTS)
def test_version_that_nobody_installed_fails(event: str) -> None:
    assert not judge(event, lambda fake: setattr(fake, "version", "0.9.0")).is_right


@pytest.mark.parametrize("event", [each for each in EVENTS if "installation" not in each])
def test_version_that_was_only_copied_fails(event: str) -> None:
    assert not judge(event, lambda fake: setattr(fake, "version", SECOND)).is_right


@pytest.mark.parametrize("event", BOOTING[:2])
@pytest.mark.parametrize(
    ("installed", "version", "is_right"),
    [("", FIRST, True), ("", SECOND, True), ("0", SECOND, True), ("0", FIRST, False)],
)
def test_ended_installation_must_serve_and_an_interrupted_one_may(
    event: str, installed: str, version: str, *, is_right: bool
) -> None:
    def act(fake: FakeMachine) -> None:
        fake.installed, fake.version = installed, version

    outcome = judge(event, act)

    assert (outcome.is_right, outcome.expected.is_interrupted) == (is_right, not installed)


@pytest.mark.parametrize("event", BOOTING[:2])
def test_installation_that_fails_by_itself_fails(event: str) -> None:
    with pytest.raises(BenchError, match="the installation ended with 3 before the machine went down"):
        judge(event, lambda fake: setattr(fake, "installed", "3"))


@pytest.mark.parametrize("event", EVENTS)
def test_service_that_does_not_answer_fails(event: str, clock: Clock) -> None:
    with pytest.raises(BenchError, match="the service does not answer: connection refused"):
        judge(event, lambda fake: setattr(fake, "version", None))

    assert clock.now_s > 240


@pytest.mark.parametrize("event", EVENTS)
def test_right_version_that_answers_wrong_fails(event: str) -> None:
    with pytest.raises(BenchError, match=r"version 1\.0\.0 answers \['0\.9', '0\.1'\], expected \['0\.1'"):
        judge(event, lambda fake: setattr(fake, "answer", "0.9 0.1"))


@pytest.mark.parametrize("event", BOOTING)
def test_machine_that_goes_on_in_the_same_boot_fails(event: str) -> None:
    with pytest.raises(BenchError, match="did not boot again: it goes on in the boot before"):
        judge(event, lambda fake: setattr(fake, "boots", False))


def test_machine_that_does_not_come_back_fails_with_the_reason(clock: Clock) -> None:
    fake = FakeMachine()
    machine = fake.open()
    fake.is_up = False

    with pytest.raises(BenchError, match="did not boot again: no route to host"):
        machine.wait_boot("boot 1")
    assert clock.now_s >= 240


def test_machine_that_answers_again_after_a_while_has_booted(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMachine()
    machine = fake.open()

    def sleep(seconds: float) -> None:
        """First it still answers in the old boot, then not at all, then in the new one."""
        clock.now_s += seconds
        fake.is_up, fake.boot = clock.now_s > 20, 1 + (clock.now_s > 10)

    monkeypatch.setattr(clock, "sleep", sleep)
    machine.wait_boot("boot 1")

    assert 20 < clock.now_s < 22


@pytest.mark.parametrize("event", ENDING)
def test_service_that_systemd_does_not_restart_fails(event: str) -> None:
    with pytest.raises(BenchError, match="systemd has not restarted the service after the event"):
        judge(event, lambda fake: setattr(fake, "restart_s", None))


@pytest.mark.parametrize("event", ENDING)
@pytest.mark.parametrize(
    ("restart_s", "is_right"), [(9.9, True), (10.0, False), (60.0, False), (-1.0, False)]
)
def test_service_that_is_restarted_too_late_fails(event: str, restart_s: float, *, is_right: bool) -> None:
    outcome = judge(event, lambda fake: setattr(fake, "restart_s", restart_s))

    assert (outcome.version, outcome.is_right) == (FIRST, is_right)
    assert outcome.restart_s == pytest.approx(restart_s)


def test_kernel_that_kills_the_service_for_another_program_fails() -> None:
    with pytest.raises(BenchError, match="the kernel killed the service instead of the program"):
        judge("out of memory: another program", lambda fake: setattr(fake, "hog_kills_service", True))


class FakeFleet(Fleet):
    """A fleet whose commands answer what a test says.

    Attributes:
        clock: each command takes a second of it.
        states: states of the device's executions, at each question; the last ones stay.
        ended: state of the rollout at its end.
    """

    def __init__(self, clock: Clock, *states: tuple[str, ...], ended: str = "succeeded") -> None:
        self.clock, self.states, self.ended = clock, list(states), ended

    def run(self, *arguments: str, limit_s: float = 0.0) -> Any:
        del limit_s
        self.clock.sleep(1)
        answers: dict[str, Callable[[], Any]] = {
            "enroll": lambda: [{"code": "one"}],
            "device": lambda: {"executions": [{"state": each} for each in self._next()]},
            "rollout": lambda: [{"state": self.ended}],
        }
        return answers.get(arguments[0], list)()

    def _next(self) -> tuple[str, ...]:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


@pytest.mark.parametrize(
    ("states", "is_open"),
    [((), False), (("queued",), True), (("installing",), True), (("failed", "downloading"), True)],
)
def test_update_is_open_from_its_begin_to_its_end(
    clock: Clock, states: tuple[str, ...], *, is_open: bool
) -> None:
    assert FakeFleet(clock, states).check_open("board") == is_open


@pytest.mark.parametrize("state", ["succeeded", "refused", "failed", "timed_out", "superseded"])
def test_update_that_ended_before_it_could_be_interrupted_fails(clock: Clock, state: str) -> None:
    with pytest.raises(BenchError, match=rf"has ended its update \({state}\), which was to be interrupted"):
        FakeFleet(clock, (state,)).check_open("board")


def test_update_that_never_begins_fails(clock: Clock) -> None:
    with pytest.raises(BenchError, match="device board begins no update"):
        FakeFleet(clock, ()).wait_begun("board")
    assert clock.now_s > 120


def update(fake: FakeMachine, fleet: Fleet, interruption: str) -> Outcome:
    event = InterruptedUpdate(fleet, Path("second"), "rpi5", UPDATE_EVENTS[interruption])
    machine = fake.open()
    fake.version = SECOND if fake.version == FIRST else FIRST
    return try_event(machine, interruption, event, seed=1)


@pytest.mark.parametrize("interruption", UPDATE_EVENTS)
def test_update_that_goes_on_after_the_boot_passes(clock: Clock, interruption: str) -> None:
    assert update(FakeMachine(), FakeFleet(clock, (), ("installing",)), interruption).is_right


@pytest.mark.parametrize("interruption", UPDATE_EVENTS)
def test_update_after_which_another_version_serves_fails(clock: Clock, interruption: str) -> None:
    assert not update(FakeMachine(version=SECOND), FakeFleet(clock, ("installing",)), interruption).is_right


@pytest.mark.parametrize("interruption", UPDATE_EVENTS)
@pytest.mark.parametrize(
    ("faults", "last", "ended", "message"),
    [
        ({"boots": False}, "installing", "succeeded", "did not boot again"),
        ({"agent": False}, "installing", "succeeded", "`systemctl is-active edgekit-agent` ended with 3"),
        ({}, "installing", "paused", "the rollout did not go on after the boot"),
        ({}, "succeeded", "succeeded", "has ended its update"),
    ],
    ids=["no boot", "no agent", "paused", "too late"],
)
def test_update_that_was_not_interrupted_or_did_not_go_on_fails(
    clock: Clock, faults: dict[str, Any], last: str, ended: str, message: str, interruption: str
) -> None:
    fleet = FakeFleet(clock, ("installing",), (last,), ended=ended)
    with pytest.raises(BenchError, match=message):
        update(FakeMachine(**faults), fleet, interruption)


RIGHT = Outcome("kill -9", FIRST, Expectation((FIRST,)), 0.1, 3.0)
WRONG = Outcome("kill -9", SECOND, Expectation((FIRST,)), 0.1, 3.0)
LATE = Outcome("kill -9", FIRST, Expectation((FIRST,)), 11.0, 3.0)


@pytest.mark.parametrize(
    ("outcomes", "failures", "code"),
    [
        ([RIGHT], [], 0),
        ([RIGHT, WRONG], [], 1),
        ([RIGHT, LATE], [], 1),
        ([RIGHT], ["kernel panic: the service does not answer"], 1),
        ([], [], 1),
    ],
    ids=["right", "wrong version", "late", "no answer", "nothing tried"],
)
def test_benchmark_fails_unless_the_right_version_served_after_each_event(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[Outcome],
    failures: list[str],
    code: int,
) -> None:
    monkeypatch.setattr("sys.argv", ["hil_booted_events", "--json", str(tmp_path / "outcomes.json")])
    monkeypatch.setattr(hil_booted_events, "run_events", lambda *_: (outcomes, failures))

    assert hil_booted_events.main() == code
    assert len(json.loads((tmp_path / "outcomes.json").read_text())) == len(outcomes)
