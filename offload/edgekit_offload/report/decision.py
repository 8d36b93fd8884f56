"""The decision of a plan: its latency curves, the best candidates, and a summary in a few sentences."""

import math
from collections.abc import Sequence
from typing import Final

from edgekit_host.markup import three_digits
from edgekit_offload.planning.explain import LIMIT_BROKEN
from edgekit_offload.planning.result import NEVER, Candidate, PlanningResult
from edgekit_offload.report.latency_chart import Curve, Reach

_WORTH: Final = 1.05  # least gain of a split over the best whole-model candidate that is worth a sentence


def curves_of(result: PlanningResult, row: int) -> list[Curve]:
    return [
        Curve(
            str(number + 1),
            _show_name(candidate),
            tuple(_seconds(value) for value in candidate.latency_ms[row]),
        )
        for number, candidate in enumerate(result.candidates)
    ]


def _show_name(candidate: Candidate) -> str:
    if not candidate.is_over_loss:
        return candidate.name
    return f"{candidate.name} ({'above' if candidate.has_known_loss else 'not known to keep'} --max-loss)"


def _seconds(latency_ms: float) -> float:
    return math.inf if latency_ms >= 1e15 else latency_ms / 1e3


def reaches_of(result: PlanningResult, row: int) -> tuple[Reach, ...]:
    """Return the bandwidth ranges with their best candidates, in rising order.

    Two neighbouring ranges meet at the geometric mean of the grid points on both sides.
    `row` is the index of the round-trip time in `result.rtts_ms`.
    """
    grid, rtt_ms = result.bandwidths_mbit_s, result.rtts_ms[row]
    reaches = []
    for index, candidate in enumerate(result.candidates):
        for win in candidate.wins:
            if win.rtt_ms == rtt_ms:
                before = [mbit_s for mbit_s in grid if mbit_s < win.from_mbit_s]
                after = [mbit_s for mbit_s in grid if mbit_s > win.to_mbit_s]
                low = math.sqrt(before[-1] * win.from_mbit_s) if before else win.from_mbit_s
                high = math.sqrt(after[0] * win.to_mbit_s) if after else win.to_mbit_s
                reaches.append(Reach(index, low, high))
    return tuple(sorted(reaches, key=lambda reach: reach.low_mbit_s))


def decide(result: PlanningResult) -> list[str]:
    """Return sentences about the best candidates at the first round-trip time and the gain from splitting."""
    if not result.candidates or not result.rtts_ms or not result.bandwidths_mbit_s:
        return ["Nothing was measured, so there is nothing to decide."]
    reaches, grid = reaches_of(result, 0), result.bandwidths_mbit_s
    parts = [f"{_where(reach, grid)} {_action(result.candidates[reach.curve])}" for reach in reaches]
    if not reaches:
        parts = ["no candidate keeps the limits at any bandwidth"]
    elif reaches[0].low_mbit_s > grid[0]:
        parts.insert(
            0, f"below {three_digits(_round(reaches[0].low_mbit_s))} Mbit/s no candidate keeps the limits"
        )
    return [f"At a round trip of {three_digits(result.rtts_ms[0])} ms: {', '.join(parts)}.", _gain(result)]


def _where(reach: Reach, grid: Sequence[float]) -> str:
    """Return the range in which a candidate wins, without a bound where it reaches the end of the grid."""
    low, high = three_digits(_round(reach.low_mbit_s)), three_digits(_round(reach.high_mbit_s))
    if reach.low_mbit_s <= grid[0]:
        return "at every bandwidth" if reach.high_mbit_s >= grid[-1] else f"below {high} Mbit/s"
    return f"above {low} Mbit/s" if reach.high_mbit_s >= grid[-1] else f"from {low} to {high} Mbit/s"


def _round(value: float) -> float:
    """Return a number rounded to two significant digits, since the grid is no finer."""
    return float(f"{value:.2g}")


def _action(candidate: Candidate) -> str:
    if candidate.kind == "local":
        return "run it on the device"
    if candidate.kind == "upload":
        return f"send the input ({candidate.name})"
    return f"split ({candidate.name})" if candidate.kind == "cut" else f"use the cascade ({candidate.name})"


def _gain(result: PlanningResult) -> str:
    """Return the largest gain of splitting over the best whole-model candidate, by the objective."""
    offered = [candidate for candidate in result.candidates if not candidate.is_over_loss]
    whole = [candidate for candidate in offered if candidate.kind in ("local", "upload")]
    split = [candidate for candidate in offered if candidate.kind in ("cut", "cascade")]
    if not split:
        return "No split was found."
    ratio, mbit_s, rtt_ms = max(
        (
            min((candidate.score[row][column] for candidate in whole), default=NEVER)
            / min(candidate.score[row][column] for candidate in split),
            result.bandwidths_mbit_s[column],
            result.rtts_ms[row],
        )
        for row in range(len(result.rtts_ms))
        for column in range(len(result.bandwidths_mbit_s))
    )
    where = f"{three_digits(_round(mbit_s))} Mbit/s and {three_digits(rtt_ms)} ms"
    if ratio >= LIMIT_BROKEN:
        return f"Splitting keeps the limits where no whole-model candidate does, as at {where}."
    if ratio < _WORTH:
        return f"Splitting does not pay: at best {ratio:.2f} times as good as the best whole-model candidate."
    return f"Splitting pays up to {ratio:.2f} times over the best whole-model candidate, at {where}."
