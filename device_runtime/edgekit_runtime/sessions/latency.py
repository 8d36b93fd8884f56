"""Measures and compares the latency of several sessions on this machine.

The results are not valid for other machines.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from edgekit_runtime.records import dataclass

TIE_SHARE: Final = 0.02  # too small a difference to notice. It may be reversed on another day
_LEAST_S: Final = 1e-6  # a clock may stand still during an inference
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """Limits of `measure_latency`.

    Attributes:
        min_rounds: The minimum number of measured rounds, even if they exceed the time limit.
        max_rounds: The maximum number of measured rounds.
        time_limit_s: The time limit in seconds, including the warm-up. After it, no further round starts.
        precision: Stop early when the 95 % confidence interval of each median is within this fraction of the
            median. 0 disables this.
        batch_s: The time in seconds for which each session runs in a round. Shorter inferences are repeated,
            and their mean latency is used. If it is 0, each session runs one inference per round.
    """

    warmup_rounds: int = 2
    min_rounds: int = 5
    max_rounds: int = 200
    time_limit_s: float = 10.0
    precision: float = 0.02
    batch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_rounds < 0 or not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"expected warmup_rounds >= 0 and 1 <= min_rounds <= max_rounds, got {self}")
        if not self.time_limit_s > 0 or not 0 <= self.precision < 1 or not 0 <= self.batch_s < math.inf:
            raise ValueError(f"expected time_limit_s > 0, 0 <= precision < 1 and batch_s >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class Latency:
    """The latencies of one session.

    Attributes:
        seconds: The latency in each round, in seconds. There is at least one round.
    """

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The lower and upper quartile over all rounds, in seconds."""
        lower, upper = np.quantile(self.seconds, (0.25, 0.75))
        return float(lower), float(upper)

    def ratio_to(self, reference: "Latency") -> float:
        """Return the ratio of this latency to the latency of `reference`, as the median over all rounds.

        Both must come from the same call of `measure_latency`, so that other load on the machine affects both
        equally.
        """
        return statistics.median(self._ratios(reference))

    def ratio_interval_to(self, reference: "Latency") -> tuple[float, float]:
        """Return the 95 % confidence interval of `ratio_to`.

        With few rounds, it is the minimum and maximum ratio.

        Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1.
        """
        ratios = sorted(self._ratios(reference))
        reach = 1.96 * math.sqrt(len(ratios)) / 2
        low, high = math.floor(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
        return ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]

    def _ratios(self, reference: "Latency") -> list[float]:
        return [own / other for own, other in zip(self.seconds, reference.seconds, strict=True)]


def find_tied(latencies: Mapping[Name, Latency]) -> list[Name]:
    """Return the names of the fastest session and of all sessions tied with it, in the given order.

    A session is tied if its latency is within 2 % of the fastest, or if the difference is not significant.

    `latencies` contains at least one entry. All entries come from the same call of `measure_latency`.
    """
    fastest = min(latencies.values(), key=lambda latency: latency.median_s)
    return [name for name, latency in latencies.items() if _is_tied(latency, fastest)]


def _is_tied(latency: Latency, fastest: Latency) -> bool:
    # Either, because they fail in different cases: medians under changing load, ratios at two speeds.
    limit = 1 + TIE_SHARE
    return latency.median_s <= limit * fastest.median_s or latency.ratio_interval_to(fastest)[0] <= limit


def measure_latency(
    sessions: Mapping[str, Callable[[], object]],
    limits: LatencyLimits | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
    before_each: Callable[[str], None] = lambda _: None,
) -> dict[str, Latency]:
    """Measure and return the latency of each session.

    Each round runs all sessions in a new random order, each for about `limits.batch_s` seconds.

    Args:
        sessions: A dict from names to functions that run one inference.
        limits: The limits of the measurement.
        clock: A monotonic clock in seconds.
        seed: The seed of the random order.
        before_each: Called with the name before each session runs. This time is not measured.
    """
    limits = limits or LatencyLimits()
    orders = np.random.default_rng(seed)
    names = list(sessions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    repeats = dict.fromkeys(names, 1)
    start = clock()
    for _ in range(limits.warmup_rounds):
        _round(sessions, names, repeats, clock, before_each)
    if limits.batch_s:  # not by the warm-up: the first inference allocates
        warm_s = _round(sessions, names, repeats, clock, before_each)
        repeats = {name: max(1, math.ceil(limits.batch_s / max(warm_s[name], _LEAST_S))) for name in names}
    for count in range(limits.max_rounds):
        if count >= limits.min_rounds and (
            clock() - start >= limits.time_limit_s
            # Without a precision nothing is sorted: that would empty the caches between two inferences.
            or (
                limits.precision > 0
                and all(_is_settled(measured_s, limits.precision) for measured_s in seconds.values())
            )
        ):
            break
        order = [names[index] for index in orders.permutation(len(names))]
        for name, elapsed_s in _round(sessions, order, repeats, clock, before_each).items():
            seconds[name].append(elapsed_s)
    return {name: Latency(tuple(values)) for name, values in seconds.items()}


def _round(
    sessions: Mapping[str, Callable[[], object]],
    order: Sequence[str],
    repeats: Mapping[str, int],
    clock: Callable[[], float],
    before_each: Callable[[str], None],
) -> dict[str, float]:
    elapsed_s = {}
    for name in order:
        before_each(name)
        if repeats[name] > 1:
            sessions[name]()  # refills the caches that others have emptied
        begin = clock()
        for _ in range(repeats[name]):
            sessions[name]()
        elapsed_s[name] = (clock() - begin) / repeats[name]
    return elapsed_s


def _is_settled(seconds: Sequence[float], precision: float) -> bool:
    """Whether the 95 % interval of the median is within `precision` of it on both sides.

    Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1: the interval between the
    order statistics n/2 -+ 1.96 sqrt(n)/2 holds the median of any distribution.
    """
    count = len(seconds)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    if low < 0 or high >= count:
        return False
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    return ordered[high] - median <= precision * median and median - ordered[low] <= precision * median
