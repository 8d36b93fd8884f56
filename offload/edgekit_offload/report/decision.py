"""The decision of a plan: its curves, the winners, and one or two sentences about them."""

import math
from collections.abc import Sequence
from typing import Final

from edgekit_host.markup import three_digits
from edgekit_offload.planning.explain import LIMIT_BROKEN
from edgekit_offload.planning.result import NEVER, PlanningResult, Way
from edgekit_offload.report.latency_chart import Curve, Reach

_WORTH: Final = 1.05  # least gain of a split over the best whole-model way that is worth a sentence


def curves_of(result: PlanningResult, row: int) -> list[Curve]:
    """Return a curve for each way, at one round trip of the grid."""
    return [
        Curve(str(number + 1), _show_name(way), tuple(_seconds(value) for value in way.latency_ms[row]))
        for number, way in enumerate(result.ways)
    ]


def _show_name(way: Way) -> str:
    if not way.is_over_loss:
        return way.name
    return f"{way.name} ({'above' if way.has_known_loss else 'not known to keep'} --max-loss)"


def _seconds(latency_ms: float) -> float:
    return math.inf if latency_ms >= 1e15 else latency_ms / 1e3


def reaches_of(result: PlanningResult, row: int) -> tuple[Reach, ...]:
    """Return the ranges of bandwidth with their winners at one round trip of the grid, in rising order.

    Neighbouring ranges meet half-way between the points of the grid, on a logarithmic scale.
    """
    grid, rtt_ms = result.bandwidths_mbit_s, result.rtts_ms[row]
    found = []
    for index, way in enumerate(result.ways):
        for win in way.wins:
            if win.rtt_ms == rtt_ms:
                before = [one for one in grid if one < win.from_mbit_s]
                after = [one for one in grid if one > win.to_mbit_s]
                low = math.sqrt(before[-1] * win.from_mbit_s) if before else win.from_mbit_s
                high = math.sqrt(after[0] * win.to_mbit_s) if after else win.to_mbit_s
                found.append(Reach(index, low, high))
    return tuple(sorted(found, key=lambda reach: reach.low_mbit_s))


def decide(result: PlanningResult) -> list[str]:
    """Return the decision at the first round trip: the winners, and the gain of splitting."""
    if not result.ways or not result.rtts_ms or not result.bandwidths_mbit_s:
        return ["Nothing was measured, so there is nothing to decide."]
    reaches, grid = reaches_of(result, 0), result.bandwidths_mbit_s
    parts = [f"{_where(reach, grid)} {_action(result.ways[reach.curve])}" for reach in reaches]
    if not reaches:
        parts = ["no way keeps the limits at any bandwidth"]
    elif reaches[0].low_mbit_s > grid[0]:
        parts.insert(0, f"below {three_digits(_round(reaches[0].low_mbit_s))} Mbit/s no way keeps the limits")
    return [f"At a round trip of {three_digits(result.rtts_ms[0])} ms: {', '.join(parts)}.", _gain(result)]


def _where(reach: Reach, grid: Sequence[float]) -> str:
    """Return where a way wins; a range that reaches the end of the grid is open there."""
    low, high = three_digits(_round(reach.low_mbit_s)), three_digits(_round(reach.high_mbit_s))
    if reach.low_mbit_s <= grid[0]:
        return "at every bandwidth" if reach.high_mbit_s >= grid[-1] else f"below {high} Mbit/s"
    return f"above {low} Mbit/s" if reach.high_mbit_s >= grid[-1] else f"from {low} to {high} Mbit/s"


def _round(value: float) -> float:
    """Return two significant digits: the grid is no finer."""
    return float(f"{value:.2g}")


def _action(way: Way) -> str:
    if way.kind == "local":
        return "run it on the device"
    if way.kind == "upload":
        return f"send the input ({way.name})"
    return f"split ({way.name})" if way.kind == "cut" else f"use the cascade ({way.name})"


def _gain(result: PlanningResult) -> str:
    """Return the largest gain of splitting over the best whole-model way, by the objective."""
    offered = [way for way in result.ways if not way.is_over_loss]
    whole = [way for way in offered if way.kind in ("local", "upload")]
    split = [way for way in offered if way.kind in ("cut", "cascade")]
    if not split:
        return "No split was found."
    ratio, mbit_s, rtt_ms = max(
        (
            min((way.score[row][column] for way in whole), default=NEVER)
            / min(way.score[row][column] for way in split),
            result.bandwidths_mbit_s[column],
            result.rtts_ms[row],
        )
        for row in range(len(result.rtts_ms))
        for column in range(len(result.bandwidths_mbit_s))
    )
    where = f"{three_digits(_round(mbit_s))} Mbit/s and {three_digits(rtt_ms)} ms"
    if ratio >= LIMIT_BROKEN:
        return f"Splitting keeps the limits where no whole-model way does, as at {where}."
    if ratio < _WORTH:
        return f"Splitting does not pay: at best {ratio:.2f} times as good as the best whole-model way."
    return f"Splitting pays up to {ratio:.2f} times over the best whole-model way, at {where}."
