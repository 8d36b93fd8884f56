"""Which options run a package best on this machine: a small grid, measured in turn, halved round by round.

Few samples part the clearly slow from the rest; the better half goes on with twice as many. What wins is then
measured against the package's own options afresh, and kept only if it is better beyond chance: a winner of
many looks good by luck. It says nothing of energy: spinning threads cost some, so they must win by more.

Source: K. Jamieson, A. Talwalkar, Non-stochastic Best Arm Identification, AISTATS 2016 (successive halving).
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from edgekit_runtime.archive import OpenedPackage
from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.latency import Latency
from edgekit_runtime.manifest import BackendChoice
from edgekit_runtime.selftest import read_golden
from edgekit_runtime.service.batching import rows_are_independent
from edgekit_runtime.sessions.session import Session, open_choice
from edgekit_runtime.tuning_stand import Setting, Stand

Objective = Literal["latency", "throughput"]

_logger = logging.getLogger(__name__)
_BATCHES: Final = (1, 4, 16)
_NEEDED_GAIN: Final = 0.03  # less is not worth another setting than the tested one
_NEEDED_GAIN_SPINNING: Final = 0.15  # idle cores that never sleep drain a battery
_DEFAULTS: Final[Mapping[str, JsonValue]] = {"spinning": False, "arena": True, "xnnpack": True}
_FIRST_ROUNDS: Final = 5
_FEWEST_ROUNDS: Final = 3
_FEWEST_FINAL_ROUNDS: Final = 6  # of fewer, all can be faster by chance once in twenty times
_MOST_ROUNDS: Final = 200
_FINAL_SHARE: Final = 0.4  # of the time, for the last comparison


@dataclass(frozen=True, slots=True)
class Trial:
    """How a setting did.

    Attributes:
        setting: that was tried.
        latency: seconds a row, of the last measurement that it took part in; None where it failed.
        ratio: of its latency to the package's own setting in that measurement.
        rounds: of all measurements.
        reason: why it failed.
    """

    setting: Setting
    latency: Latency | None
    ratio: float | None = None
    rounds: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a search found.

    Attributes:
        objective: of the search.
        trials: all settings, the package's own first.
        best: what to run with; the package's own where no other is better beyond chance.
        interval: 95 % interval of the best one's time as a share of the package's own.
        is_complete: whether the time sufficed for all settings.
    """

    objective: Objective
    trials: tuple[Trial, ...]
    best: Setting
    interval: tuple[float, float]
    is_complete: bool


def list_settings(
    choice: BackendChoice, objective: Objective, processors: int, *, may_batch: bool
) -> list[Setting]:
    """Return the settings to try, the package's own first.

    Args:
        choice: the backend, with its options in the package.
        objective: what counts.
        processors: that may be used.
        may_batch: whether rows are independent.
    """
    counts = sorted({1, *(1 << power for power in range(processors.bit_length())), processors})
    counts = [count for count in counts if count <= processors]
    ways: list[dict[str, JsonValue]] = []
    if choice.name == "ort":
        ways += [{"threads": count, "spinning": False} for count in counts]
        ways += [{"threads": count, "spinning": True} for count in counts if count > 1]
        ways += [{"arena": False}]
    elif choice.name == "litert":
        ways += [{"threads": count} for count in counts]
        ways += [{"xnnpack": False}]
    own = {**_DEFAULTS, **choice.options}
    changed = [tuple((k, v) for k, v in way.items() if own.get(k) != v) for way in ways]
    settings = [Setting(), *(Setting(options) for options in changed)]
    if objective == "throughput":
        single: tuple[tuple[str, JsonValue], ...] = () if own.get("threads") == 1 else (("threads", 1),)
        settings += [Setting(single, count) for count in counts if count > 1]
        if may_batch:
            settings += [replace(s, batch=rows) for s in settings for rows in _BATCHES[1:]]
    return list(dict.fromkeys(settings))


def tune(
    package: OpenedPackage,
    choice: BackendChoice,
    *,
    objective: Objective = "latency",
    seconds: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[str], None] | None = None,
) -> Tuning:
    """Search for the options with which `choice` runs best here.

    Args:
        package: verified.
        choice: the backend to tune, with the package's options.
        objective: time of a lone run, or rows a second with all processors.
        seconds: in which to end, nearly: a measurement that has begun is ended.
        clock: seconds since any moment.
        report: takes lines on how far it is, or None.

    Raises:
        BackendError: the backend does not run the package as it is.
    """
    choice = replace(choice, fallback=None)
    end_s = clock() + seconds
    inputs = read_golden(package).inputs
    processors = len(os.sched_getaffinity(0))

    def open_one(setting: Setting) -> Session:
        return open_choice(package, replace(choice, options={**choice.options, **dict(setting.options)}))

    may_batch = False
    if objective == "throughput":
        session = open_one(Setting())
        may_batch = rows_are_independent(session, inputs)
        session.close()
    settings = list_settings(choice, objective, processors, may_batch=may_batch)
    with Stand(open_one, inputs, clock) as stand:
        return search(stand, settings, objective, end_s=end_s, report=report)


def search(
    stand: Stand,
    settings: Sequence[Setting],
    objective: Objective,
    *,
    end_s: float,
    report: Callable[[str], None] | None = None,
) -> Tuning:
    """Return the best of `settings`, the first of which is the package's own.

    Args:
        stand: that opens and measures them.
        settings: to try, at least one.
        objective: what they were made for.
        end_s: when to end, nearly, on the stand's clock.
        report: takes lines on how far it is, or None.

    Raises:
        BackendError: the package's own setting does not run.
    """
    return _Search(stand, settings, end_s, report or _logger.info).run(objective)


class _Search:
    def __init__(
        self, stand: Stand, settings: Sequence[Setting], end_s: float, report: Callable[[str], None]
    ) -> None:
        self._stand, self._end_s, self._report = stand, end_s, report
        self._own = settings[0]
        self._trials = {setting: Trial(setting, None) for setting in settings}
        self._is_complete = True

    def run(self, objective: Objective) -> Tuning:
        self._stand.open(self._own)
        left = [s for s in self._trials if s == self._own or self._opens(s)][1:]
        rounds = _FIRST_ROUNDS
        while len(left) > 1:
            left = self._halve(left, rounds)
            rounds *= 2
        best, interval = self._own, (1.0, 1.0)
        if left and (found := self._compare(left[0])) is not None:
            needed = _NEEDED_GAIN_SPINNING if ("spinning", True) in left[0].options else _NEEDED_GAIN
            if found[1] <= 1 - needed:
                best, interval = left[0], found
        return Tuning(objective, tuple(self._trials.values()), best, interval, self._is_complete)

    def _opens(self, setting: Setting) -> bool:
        try:
            self._stand.open(setting)
        except BackendError as cause:
            self._trials[setting] = Trial(setting, None, reason=str(cause))
            return False
        return True

    def _halve(self, left: list[Setting], rounds: int) -> list[Setting]:
        """Return the better half of the settings; the others are closed."""
        time_s = (self._end_s - self._stand.now_s()) * (1 - _FINAL_SHARE) / math.ceil(math.log2(len(left)))
        affordable = self._stand.rounds_within((self._own, *left), time_s)
        if affordable < _FEWEST_ROUNDS:
            # The run that was timed on opening must do.
            self._is_complete = False
            left = sorted(left, key=self._stand.first_s)
        else:
            self._report(f"{len(left)} settings, {min(rounds, affordable)} rounds")
            self._measure((self._own, *left), min(rounds, affordable))
            left = sorted(left, key=lambda setting: self._trials[setting].ratio or math.inf)
        count = (len(left) + 1) // 2
        for loser in left[count:]:
            self._stand.close(loser)
        return left[:count]

    def _compare(self, setting: Setting) -> tuple[float, float] | None:
        """Return the 95 % interval of a setting's time as a share of the package's own, or None."""
        left_s = self._end_s - self._stand.now_s()
        rounds = min(self._stand.rounds_within((self._own, setting), left_s), _MOST_ROUNDS)
        if rounds < _FEWEST_FINAL_ROUNDS:
            self._is_complete = False
            return None
        self._report(f"{setting.name} against {self._own.name}, at most {rounds} rounds")
        latencies = self._measure((self._own, setting), rounds)
        return latencies[setting].ratio_interval_to(latencies[self._own])

    def _measure(self, settings: Sequence[Setting], rounds: int) -> Mapping[Setting, Latency]:
        latencies = self._stand.measure(settings, rounds)
        for setting, latency in latencies.items():
            self._trials[setting] = Trial(
                setting,
                latency,
                latency.ratio_to(latencies[self._own]),
                self._trials[setting].rounds + len(latency.seconds),
            )
        return latencies
