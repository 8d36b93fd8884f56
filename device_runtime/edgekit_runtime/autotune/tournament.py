"""The tournament: all engines of a package run the same inputs in turn, and the fastest one wins.

Each backend of each variant takes part if it reproduces the golden outputs of the variant. The tournament
measures the latency of single inferences, and not throughput, memory or energy.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgekit_runtime.autotune.contest import (
    ContestLimits,
    Measure,
    RunSetting,
    hold_contest,
    measure_afresh,
    rank,
)
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.latency import Latency, find_tied

_CLEAR_SHARE: Final = 0.1  # a lead of this share in every process decides
_FEWEST_PROCESSES: Final = 3
_MOST_PROCESSES: Final = 7
_ROUNDS: Final = 40


@dataclass(frozen=True, slots=True)
class Entrant:
    """The result of one backend of one variant of a package.

    Attributes:
        name: backend and artifact, unique within the package.
        setting: the variant, and the position of the backend in its chain of backends.
        choice: the backend, without its fallbacks.
        latency: seconds of one inference, one value per process, or None if the backend did not take part.
        reason: why the backend did not take part, or None.
    """

    name: str
    setting: RunSetting
    choice: BackendChoice
    latency: Latency | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Tournament:
    """The results of all backends of a package on this machine.

    Attributes:
        entrants: entrants in the order of the package.
        winner: the entrant to use, or None if no entrant took part. It is the entrant with the fewest threads
            among those within 2 % of the fastest. If an entrant in `as_fast` differs from it only by fewer
            threads, that entrant wins.
        as_fast: names of the entrants that are at most 2 % slower than the fastest, or not significantly
            slower.
    """

    entrants: tuple[Entrant, ...]
    winner: Entrant | None
    as_fast: tuple[str, ...]


def hold_tournament(
    package: OpenedPackage,
    keys: Path,
    *,
    threads: int | None = None,
    seconds: float = 60.0,
    measure: Measure | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Tournament:
    """Measure each backend of each variant that this machine can run, on the package's golden inputs.

    The tournament ends early after three or more processes if, in each of them, all other backends took at
    least 10 % longer than the fastest. TensorRT first builds its engine, which can take minutes.

    Args:
        package: the package.
        keys: folder of the trusted keys.
        threads: number of threads, or None for each backend's own number.
        seconds: approximate duration. A process that has begun runs to its end.
        measure: measures settings in a process, by default a new process at each call.
        report: called with lines about the progress.

    Raises:
        BackendError: a process with several backends died or hung, although each backend runs alone.
        PackageError: the package has changed.
    """
    entrants = tuple(_enter(package))
    outcomes = hold_contest(
        measure or measure_afresh(package, keys, threads),
        [entrant.setting for entrant in entrants],
        ContestLimits(_FEWEST_PROCESSES, _MOST_PROCESSES, _ROUNDS, time.monotonic() + seconds),
        is_decided=_is_decided,
        report=report,
    )
    done = {entrant.setting: _finish(entrant, outcomes[entrant.setting]) for entrant in entrants}
    latencies = {setting: outcome for setting, outcome in outcomes.items() if isinstance(outcome, Latency)}
    if not latencies:
        return Tournament(tuple(done.values()), None, ())
    medians = {setting: latency.median_s for setting, latency in latencies.items()}
    fastest = done[rank(medians, package.manifest)[0]]
    tied = find_tied(latencies)
    # What differs from it in threads alone: chance decides between these, and more threads cost more.
    alike = dict.fromkeys(
        (setting for setting in tied if _model_of(done[setting]) == _model_of(fastest)), 0.0
    )
    winner = done[rank(alike or medians, package.manifest)[0]]
    return Tournament(tuple(done.values()), winner, tuple(done[setting].name for setting in tied))


def _model_of(entrant: Entrant) -> tuple[str, str, dict[str, JsonValue]]:
    choice = entrant.choice
    options = {name: value for name, value in choice.options.items() if name != "threads"}
    return choice.name, choice.artifact, options


def _is_decided(latencies: Mapping[RunSetting, Latency]) -> bool:
    """Return whether one setting was far ahead of all others in every process."""
    fastest = min(latencies.values(), key=lambda latency: latency.median_s, default=None)
    return fastest is None or all(
        latency is fastest or latency.ratio_interval_to(fastest)[0] >= 1 + _CLEAR_SHARE
        for latency in latencies.values()
    )


def _finish(entrant: Entrant, outcome: Latency | str) -> Entrant:
    if isinstance(outcome, str):
        return replace(entrant, reason=outcome)
    return replace(entrant, latency=outcome)


def _enter(package: OpenedPackage) -> Iterator[Entrant]:
    """Yield all backends; if some differ only in options, their names get a number."""
    names: Counter[str] = Counter()
    for variant in package.manifest.all_variants:
        for position, choice in enumerate(variant.backend.chain):
            name = f"{choice.name} {choice.artifact}"
            names[name] += 1
            unique = name if names[name] == 1 else f"{name} ({names[name]})"
            yield Entrant(unique, RunSetting(variant.name, position), replace(choice, fallback=None))
