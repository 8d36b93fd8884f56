"""Tuning: measures a small grid of options on this machine, and drops the slower half in each step.

Each step measures the remaining settings twice as often as the step before, in several fresh processes. The
last setting is then compared with the package's own setting in fresh processes. It is used only if it is
significantly faster, because the best of many noisy results can be the best by chance. A setting with
spinning threads must be faster by a larger margin, because the threads use energy that is not measured.

Source: K. Jamieson, A. Talwalkar, Non-stochastic Best Arm Identification, AISTATS 2016 (successive halving).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Final, Literal

from edgekit_runtime.autotune.contest import (
    ContestLimits,
    Measure,
    RunSetting,
    hold_contest,
    measure_afresh,
    rank,
)
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice, Manifest
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.sessions.row_independence import rows_are_independent
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.system.engines import MAX_THREADS, find_engine
from edgekit_runtime.system.own_process import count_cores

Objective = Literal["latency", "throughput"]

_BATCHES: Final = (1, 4, 16)
_NEEDED_GAIN: Final = 0.03  # a smaller gain is not worth a change from the tested setting
_NEEDED_GAIN_SPINNING: Final = 0.15  # cores that never sleep drain a battery
_DEFAULTS: Final[Mapping[str, JsonValue]] = {"spinning": False, "arena": True, "xnnpack": True}
_PROCESSES: Final = 3  # a time that half of the processes have is missed in one of eight rounds
_FIRST_ROUNDS: Final = 5
_FINAL_ROUNDS: Final = 40
_FEWEST_FINAL_PROCESSES: Final = 6  # with fewer, all can be faster by chance once in twenty times
_MOST_FINAL_PROCESSES: Final = 15
_FINAL_SHARE: Final = 0.4  # share of the time for the last comparison


@dataclass(frozen=True, slots=True)
class SettingResult:
    """The result of one setting.

    Attributes:
        latency: seconds per row in each process of the last step that measured this setting, or None if the
            setting failed or was not measured.
        ratio: `latency` divided by the latency of the package's own setting in the same step, or None.
        processes: number of processes that measured this setting, over all steps.
        reason: why the setting failed, or None.
    """

    setting: RunSetting
    latency: Latency | None = None
    ratio: float | None = None
    processes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a search.

    Attributes:
        trials: results of all settings. The package's own setting comes first.
        best: the setting to use. It is the package's own setting if no other is significantly better.
        interval: 95 % confidence interval of the ratio between the times of `best` and of the package's own
            setting. It is (1, 1) if both are the same setting.
        is_complete: whether there was time for all settings.
    """

    objective: Objective
    trials: tuple[SettingResult, ...]
    best: RunSetting
    interval: tuple[float, float]
    is_complete: bool


def list_settings(
    choice: BackendChoice, objective: Objective, processors: int, *, may_batch: bool
) -> list[RunSetting]:
    """Return the settings to try. The package's own setting comes first.

    `choice` has the options of the package. `processors` is the number of processors to use. `may_batch`
    states whether rows are independent, so that a search for throughput may also try batches.
    """
    most = min(processors, MAX_THREADS)
    counts = sorted({1, *(1 << power for power in range(most.bit_length())), most})
    own = {**_DEFAULTS, **choice.options}
    changed = [
        tuple((name, value) for name, value in options.items() if own.get(name) != value)
        for options in find_engine(choice.name).tuning_options(counts)
    ]
    settings = [RunSetting(), *(RunSetting(options=options) for options in changed)]
    if objective == "throughput":
        single: tuple[tuple[str, JsonValue], ...] = () if own.get("threads") == 1 else (("threads", 1),)
        settings += [RunSetting(options=single, instances=count) for count in counts if count > 1]
        if may_batch:
            settings += [replace(s, batch=rows) for s in settings for rows in _BATCHES[1:]]
    return list(dict.fromkeys(settings))


def tune(
    package: OpenedPackage,
    own: RunSetting,
    keys: Path,
    *,
    objective: Objective = "latency",
    seconds: float = 60.0,
    report: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Search for the options with which a backend of a package runs best on this machine.

    Args:
        package: the verified package.
        own: the package's own setting, which names the variant and the backend.
        keys: folder of the trusted keys.
        objective: `latency` minimizes the time of a single run, `throughput` maximizes the rows per second
            with all processors.
        seconds: approximate duration. A process that has begun runs to its end.
        report: called with lines about the progress.

    Raises:
        BackendError: the backend fails with the package's own options, or every process dies or hangs.
    """
    end_s = time.monotonic() + seconds
    choice = own.find_choice(package.manifest)
    may_batch = False
    if objective == "throughput":
        session = open_choice(package.select(own.variant), choice)
        may_batch = rows_are_independent(session, read_golden_inputs(package))
        session.close()
    settings = [
        replace(setting, variant=own.variant, chain_index=own.chain_index)
        for setting in list_settings(choice, objective, count_cores(), may_batch=may_batch)
    ]
    search = SettingSearch(
        measure=measure_afresh(package, keys), manifest=package.manifest, end_s=end_s, report=report
    )
    return search.run(settings, objective)


@dataclass(slots=True, kw_only=True)
class SettingSearch:
    """Searches for the best setting by successive halving. The search ends at about `end_s` on `clock`."""

    measure: Measure
    manifest: Manifest
    end_s: float
    clock: Callable[[], float] = time.monotonic
    report: Callable[[str], None] = lambda _: None
    trials: dict[RunSetting, SettingResult] = field(default_factory=dict, init=False)
    is_complete: bool = field(default=True, init=False)

    @property
    def own(self) -> RunSetting:
        return next(iter(self.trials))

    def run(self, settings: Sequence[RunSetting], objective: Objective) -> Tuning:
        """Measure settings, and return the results. The first setting must be the package's own.

        Raises:
            BackendError: the package's own setting fails, or every process dies or hangs.
        """
        self.trials = {setting: SettingResult(setting) for setting in settings}
        candidates = list(self.trials)[1:]
        rounds = _FIRST_ROUNDS
        while len(candidates) > 1 and self.clock() < self.end_s:
            candidates = self._halve(candidates, rounds)
            rounds *= 2
        best, interval = self.own, (1.0, 1.0)
        if len(candidates) == 1:
            needed = _NEEDED_GAIN_SPINNING if ("spinning", True) in candidates[0].options else _NEEDED_GAIN
            ratio_interval = self._compare(candidates[0])
            if ratio_interval[1] <= 1 - needed:
                best, interval = candidates[0], ratio_interval
        elif candidates:
            self.is_complete = False
        return Tuning(objective, tuple(self.trials.values()), best, interval, self.is_complete)

    def _halve(self, candidates: list[RunSetting], rounds: int) -> list[RunSetting]:
        begin_s = self.clock()
        time_s = (self.end_s - begin_s) * (1 - _FINAL_SHARE) / math.ceil(math.log2(len(candidates)))
        limits = ContestLimits(_PROCESSES, _PROCESSES, rounds, begin_s + time_s)
        latencies = self._contest(candidates, limits)
        ratios = {
            setting: latencies[setting].ratio_to(latencies[self.own])
            for setting in candidates
            if setting in latencies
        }
        return rank(ratios, self.manifest)[: (len(ratios) + 1) // 2]

    def _compare(self, setting: RunSetting) -> tuple[float, float]:
        """Return the 95 % interval of a setting's time as a share of the package's own, or (1, 1)."""
        most = _MOST_FINAL_PROCESSES
        latencies = self._contest([setting], ContestLimits(most, most, _FINAL_ROUNDS, self.end_s))
        if setting not in latencies:
            return 1.0, 1.0
        if len(latencies[setting].seconds) < _FEWEST_FINAL_PROCESSES:
            self.is_complete = False
            return 1.0, 1.0
        return latencies[setting].ratio_interval_to(latencies[self.own])

    def _contest(self, others: Sequence[RunSetting], limits: ContestLimits) -> dict[RunSetting, Latency]:
        """Return the latencies of the package's own setting and of the others that run."""
        settings = (self.own, *others)
        outcomes = hold_contest(self.measure, settings, limits, clock=self.clock, report=self.report)
        own = outcomes[self.own]
        if isinstance(own, str):
            raise BackendError(f"as packaged: {own}")
        latencies = {
            setting: outcome for setting, outcome in outcomes.items() if isinstance(outcome, Latency)
        }
        for setting, outcome in outcomes.items():
            trial = self.trials[setting]
            if isinstance(outcome, str):
                self.trials[setting] = SettingResult(setting, reason=outcome)
            else:
                count = trial.processes + len(outcome.seconds)
                self.trials[setting] = SettingResult(setting, outcome, outcome.ratio_to(own), count)
        return latencies
