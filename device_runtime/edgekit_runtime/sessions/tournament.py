"""Which engine runs a model fastest on this very machine: all of them on the same inputs, in turn.

An engine takes part only after it has reproduced the golden outputs. It measures latency of one inference at
a time, not throughput, memory or energy.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from edgekit_runtime.archive import OpenedPackage
from edgekit_runtime.errors import BackendError, DataError
from edgekit_runtime.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.manifest import BackendChoice
from edgekit_runtime.selftest import read_golden
from edgekit_runtime.sessions.session import Array, Session, open_choice

_TIE_SHARE: Final = 0.02  # a difference that nobody notices, and that another day may turn round
_SHORTEST_TURN_S: Final = 1e-3  # below, the neighbours' traces in the caches count more than the engine
_MOST_RUNS_A_TURN: Final = 100
_LIMITS: Final = LatencyLimits(min_rounds=30, time_limit_s=20.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What latencies of one measurement say.

    Attributes:
        winner: whom to keep: of those who are as fast as the fastest, the first in the given order.
        tied: names whose measured difference to the fastest is within chance or 2 %, in the given order; the
            fastest is one of them.
    """

    winner: str
    tied: tuple[str, ...]


def judge(latencies: Mapping[str, Latency]) -> Verdict:
    """Return who is fastest, and who cannot be told from that.

    Args:
        latencies: of one call of `measure_latency`, at least one, the preferred first.
    """
    fastest = min(latencies, key=lambda name: latencies[name].median_s)
    tied = tuple(name for name, latency in latencies.items() if _is_tied(latency, latencies[fastest]))
    return Verdict(tied[0], tied)


def _is_tied(latency: Latency, fastest: Latency) -> bool:
    # Either, since they err apart: medians under a load that comes and goes, ratios with two paces.
    limit = 1 + _TIE_SHARE
    return latency.median_s <= limit * fastest.median_s or latency.ratio_interval_to(fastest)[0] <= limit


def race(
    sessions: Mapping[str, Session],
    inputs: Mapping[str, Array],
    limits: LatencyLimits = _LIMITS,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[str, Latency]:
    """Return the latency of one inference of each session; the rounds are interleaved, in random orders.

    A turn of very short inferences holds several, as many for each session, and their mean counts.

    Args:
        sessions: name -> session, all of the same inputs.
        inputs: what each of them is run on.
        limits: when to stop.
        clock: seconds since any moment; grows.
        seed: of the orders.
    """
    shortest_s = math.inf
    for session in sessions.values():
        session.run(inputs)
        begin = clock()
        session.run(inputs)
        shortest_s = min(shortest_s, clock() - begin)
    runs = _MOST_RUNS_A_TURN
    if shortest_s * _MOST_RUNS_A_TURN > _SHORTEST_TURN_S:
        runs = math.ceil(_SHORTEST_TURN_S / shortest_s)
    turns = {name: functools.partial(_run, session, inputs, runs) for name, session in sessions.items()}
    measured = measure_latency(turns, limits, clock=clock, seed=seed)
    return {
        name: Latency(tuple((np.array(latency.seconds) / runs).tolist()))
        for name, latency in measured.items()
    }


def _run(session: Session, inputs: Mapping[str, Array], runs: int) -> None:
    for _ in range(runs):
        session.run(inputs)


@dataclass(frozen=True, slots=True)
class Entrant:
    """How one backend of a package did.

    Attributes:
        choice: the backend, without its fallbacks.
        latency: of one inference, or None where it did not take part.
        reason: why it did not.
    """

    choice: BackendChoice
    latency: Latency | None
    reason: str | None

    @property
    def name(self) -> str:
        """The backend with its artifact."""
        return f"{self.choice.name} {self.choice.artifact}"


@dataclass(frozen=True, slots=True)
class Tournament:
    """How the backends of a package did on this machine.

    Attributes:
        entrants: in the order of the package.
        verdict: names out of `Entrant.name`, or None where none took part.
    """

    entrants: tuple[Entrant, ...]
    verdict: Verdict | None

    @property
    def winner(self) -> BackendChoice | None:
        """The backend to keep, without its fallbacks."""
        for entrant in self.entrants:
            if self.verdict is not None and entrant.name == self.verdict.winner:
                return entrant.choice
        return None


def hold_tournament(
    package: OpenedPackage, *, threads: int | None = None, limits: LatencyLimits = _LIMITS
) -> Tournament:
    """Measure each backend of a package that this machine can run, on its golden inputs.

    TensorRT is waited for: it builds its engine first, which can take minutes.

    Args:
        package: verified.
        threads: of one inference, or None for those of each backend's options.
        limits: when to stop measuring.
    """
    golden = read_golden(package)
    sessions: dict[str, Session] = {}
    entrants = []
    try:
        for choice in package.manifest.backend.chain:
            entrant = Entrant(replace(choice, fallback=None), None, None)
            try:
                session = open_choice(package, entrant.choice, threads)
                sessions[entrant.name] = session
                test = golden.check(session)
                wrong = [check.message for check in test.checks if not check.passed]
                reason = f"fails the self-test: {'; '.join(wrong)}" if wrong else None
            except (BackendError, DataError) as cause:
                reason = str(cause)
            entrants.append(replace(entrant, reason=reason))
        admitted = {e.name: sessions[e.name] for e in entrants if e.reason is None}
        latencies = race(admitted, golden.inputs, limits) if admitted else {}
    finally:
        for session in sessions.values():
            session.close()
    measured = tuple(replace(entrant, latency=latencies.get(entrant.name)) for entrant in entrants)
    return Tournament(measured, judge(latencies) if latencies else None)
