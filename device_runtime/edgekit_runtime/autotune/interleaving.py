"""Times several loaded models in one process, in turn.

The results are valid only for this process, see `contest`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np

from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.latency import Latency, LatencyLimits, measure_latency
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tensors import Array

_SHORTEST_TURN_S: Final = 1e-3  # in a shorter turn, cold caches count more than the engine
_MOST_RUNS: Final = 100
# The threads of the previous setting then stop spinning. A thread that slept also gets a whole slice of a
# busy processor.
_PAUSE_S: Final = 2e-3


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """Sessions of one model, which are timed in turn with the sessions of other models.

    Attributes:
        sessions: sessions that run at the same time, at least one.
        inputs: a dict from input name to array, used for each run.
        rows: number of rows in one run of all sessions together.
    """

    sessions: Sequence[Session]
    inputs: Mapping[str, Array]
    rows: int = 1


def take_turns(
    runners: Mapping[str, Runner],
    limits: LatencyLimits,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[str, Latency]:
    """Time the runners in turn.

    Each round times all runners in a random order, with a short pause before each runner. A run of less than
    1 ms is repeated after one run that does not count, and the mean time counts.

    Args:
        runners: a dict from name to runner, at least one.
        limits: limits of the measurement.
        clock: returns a monotonic time in seconds.
        seed: seed of the random orders.

    Returns:
        A dict from name to seconds per row, one value for each round.

    Raises:
        DataError: the inputs do not fit.
        BackendError: an engine failed.
    """
    with ThreadPoolExecutor() as threads:
        runs = {name: _count_runs(runner, threads, clock) for name, runner in runners.items()}

        def before_each(name: str) -> None:
            time.sleep(_PAUSE_S)
            if runs[name] > 1:  # a longer run fills its caches itself
                _run(runners[name], 1, threads)

        turns = {name: partial(_run, runner, runs[name], threads) for name, runner in runners.items()}
        latencies = measure_latency(turns, limits, clock=clock, seed=seed, before_each=before_each)
    return {
        name: Latency(tuple((np.array(latency.seconds) / (runs[name] * runners[name].rows)).tolist()))
        for name, latency in latencies.items()
    }


def _count_runs(runner: Runner, threads: Executor, clock: Callable[[], float]) -> int:
    _run(runner, 1, threads)
    begin_s = clock()
    _run(runner, 1, threads)
    return min(math.ceil(_SHORTEST_TURN_S / max(clock() - begin_s, 1e-9)), _MOST_RUNS)


def _run(runner: Runner, runs: int, threads: Executor) -> None:
    if len(runner.sessions) == 1:
        _run_one(runner.sessions[0], runner.inputs, runs)
        return
    for done in [threads.submit(_run_one, session, runner.inputs, runs) for session in runner.sessions]:
        done.result()


def _run_one(session: Session, inputs: Mapping[str, Array], runs: int) -> None:
    for _ in range(runs):
        session.run(inputs)
