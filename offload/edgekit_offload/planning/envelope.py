"""Finds the best candidates for each bandwidth, round-trip time, server load and device load.

Candidates within 1 % of the best count as equally good. The simplest of them is chosen: local, an upload of
the input, a cut, or a cascade, in this order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.planning.result import Kind, WinRange
from edgekit_runtime.offload.latency_model import Conditions, LinkState
from edgekit_runtime.offload.offload_plan import OffloadPlan

SERVER_SLOWDOWNS: Final = (1.0, 2.0, 4.0, 8.0)
DEVICE_SLOWDOWNS: Final = (1.0, 2.0, 4.0)
EQUAL: Final = 0.01  # a candidate within this share of the best score is as good
SIMPLICITY: Final[dict[Kind, int]] = {"local": 0, "upload": 1, "cut": 2, "cascade": 3}
_BITS_PER_MBIT: Final = 1e6

Score: TypeAlias = Callable[[OffloadPlan, Conditions], float]


@dataclass(frozen=True, slots=True)
class Grid:
    """The bandwidths and round-trip times for which a plan is made.

    Each bandwidth applies to both directions.
    """

    bandwidths_mbit_s: tuple[float, ...]
    rtts_ms: tuple[float, ...]

    def links(self) -> tuple[LinkState, ...]:
        """Return all links of the grid, ordered by round-trip time and bandwidth."""
        return tuple(
            LinkState(bandwidth * _BITS_PER_MBIT, bandwidth * _BITS_PER_MBIT, rtt / 1e3)
            for rtt, bandwidth in product(self.rtts_ms, self.bandwidths_mbit_s)
        )

    def conditions(self) -> tuple[Conditions, ...]:
        """Return all combinations of links and loads. Unloaded machines come first, ordered like `links`."""
        return tuple(
            Conditions(link, device, server)
            for server, device, link in product(SERVER_SLOWDOWNS, DEVICE_SLOWDOWNS, self.links())
        )


def score_all(
    plans: Sequence[OffloadPlan], conditions: Sequence[Conditions], score: Score
) -> NDArray[np.float64]:
    """Return scores, float64 [plans, conditions], infinite if a plan cannot run or exceeds a limit."""
    return np.array([[score(plan, condition) for condition in conditions] for plan in plans])


def find_winners(scores: NDArray[np.float64], ranks: Sequence[int]) -> NDArray[np.intp]:
    """Return the index of the best plan for each condition, or -1 if no plan can run.

    Args:
        scores: The scores, float64 [plans, conditions].
        ranks: The rank of each plan. If several plans are equally good, the one with the lowest rank is
            chosen. If the ranks are equal too, the first one is chosen.
    """
    best = scores.min(axis=0)
    equal = scores <= best * (1 + EQUAL)
    order = np.argsort(np.array(ranks), kind="stable")
    winners = order[np.argmax(equal[order], axis=0)]
    return np.where(np.isfinite(best), winners, -1)


def win_ranges(winners: NDArray[np.intp], number: int, grid: Grid) -> tuple[WinRange, ...]:
    """Return the ranges of bandwidth in which a plan is the best on unloaded machines.

    `winners` is the result of `find_winners` for the conditions of `grid`. `number` is the index of the plan.
    """
    columns = len(grid.bandwidths_mbit_s)
    ranges = []
    for row, rtt in enumerate(grid.rtts_ms):
        wins = winners[row * columns : (row + 1) * columns] == number
        edges = np.flatnonzero(np.diff(np.concatenate(([False], wins, [False])).astype(np.int8)))
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            ranges.append(WinRange(rtt, grid.bandwidths_mbit_s[first], grid.bandwidths_mbit_s[int(end) - 1]))
    return tuple(ranges)


def choose_few(scores: NDArray[np.float64], base: NDArray[np.float64], at_most: int) -> tuple[int, ...]:
    """Return the indices of candidates that are chosen greedily.

    Each choice is the candidate that improves the best scores most.

    Args:
        scores: The scores of the candidates, float64 [candidates, conditions].
        base: The best score without candidates, float64 [conditions].
        at_most: The maximum number of choices.
    """
    chosen: list[int] = []
    best = np.where(np.isfinite(base), base, np.nan)
    best = np.where(np.isnan(best), scores.max(axis=0, initial=0.0, where=np.isfinite(scores)) * 2, best)
    while len(chosen) < at_most and len(scores):
        gains = np.clip(1 - scores / np.maximum(best, 1e-300), 0, None).sum(axis=1)
        number = int(gains.argmax())
        if gains[number] <= EQUAL:
            break
        chosen.append(number)
        best = np.minimum(best, scores[number])
    return tuple(chosen)
