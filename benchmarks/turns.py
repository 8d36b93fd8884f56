"""Times of calls that take turns, so that other work on the machine hits all alike."""

import statistics
import time
from collections.abc import Callable, Mapping


def take_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begin_s = clock()
            call()
            times[name].append(clock() - begin_s)
    return times


def median_ms(call: Callable[[], object], rounds: int = 100) -> float:
    return 1e3 * statistics.median(take_turns({"": call}, rounds)[""])
