"""Draws the chart of a plan in a terminal: latency over bandwidth, and a ribbon of the best candidates."""

import math
from typing import Final

from edgekit_host.markup import show_ms, three_digits
from edgekit_host.plots.axes import log_ticks
from edgekit_offload.planning.result import PlanningResult
from edgekit_offload.report.decision import curves_of, reaches_of
from edgekit_offload.report.latency_chart import Curve
from edgekit_runtime.system.shown_text import clean

_LEAST_WIDTH: Final = 40
_HEIGHT: Final = 14
_MARGIN: Final = 9  # columns left of the axis
_HIGHEST: Final = 12.0  # multiple of the slowest best candidate
_LETTERS: Final = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def render_terminal(
    result: PlanningResult, *, rtt_ms: float, width: int = 78, ascii_only: bool = False
) -> str:
    """Return the chart as text without colours.

    Each candidate is drawn as a digit or letter. Where curves cross, only the candidate that is faster at
    lower bandwidths is drawn.

    `rtt_ms` selects the nearest round-trip time of the grid. `width` is the width of the terminal in columns.
    """
    if not result.candidates or not result.rtts_ms or not result.bandwidths_mbit_s:
        return "no candidate was measured"
    row = min(range(len(result.rtts_ms)), key=lambda index: abs(result.rtts_ms[index] - rtt_ms))
    curves = curves_of(result, row)[: len(_LETTERS)]
    columns = max(width, _LEAST_WIDTH) - _MARGIN - 1
    grid = result.bandwidths_mbit_s
    at = [_low(grid) * (_high(grid) / _low(grid)) ** (n / (columns - 1)) for n in range(columns)]
    values = [[_interpolate(grid, curve, mbit_s) for mbit_s in at] for curve in curves]
    upright, across, corner, filled = ("|", "-", "+", "=") if ascii_only else ("│", "─", "└", "█")
    lines = _draw(values, upright)
    ribbon = [" "] * columns
    for reach in reaches_of(result, row):
        covered = [n for n in range(columns) if reach.low_mbit_s <= at[n] <= reach.high_mbit_s]
        for n in covered:
            ribbon[n] = filled
        if covered and reach.curve < len(curves):
            ribbon[covered[len(covered) // 2]] = _LETTERS[reach.curve]
    title = f"latency of one request, round trip {three_digits(result.rtts_ms[row])} ms"
    lines = [title, *lines, " " * (_MARGIN - 1) + corner + across * columns, _axis(at)]
    lines.append("best".rjust(_MARGIN - 1) + " " + "".join(ribbon))
    lines += [
        "",
        *(f"  {_LETTERS[index]}  {_one_line(curve.name, ascii_only)}" for index, curve in enumerate(curves)),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _low(grid: tuple[float, ...]) -> float:
    return grid[0]


def _high(grid: tuple[float, ...]) -> float:
    return max(grid[-1], grid[0] * 1.0001)


def _one_line(name: str, ascii_only: bool) -> str:
    text = " ".join(clean(name).split())
    return text.encode("ascii", "replace").decode() if ascii_only else text


def _interpolate(grid: tuple[float, ...], curve: Curve, mbit_s: float) -> float:
    """Return the latency between two points of the grid, interpolated linearly in the logarithms of both."""
    after = next((n for n, bandwidth in enumerate(grid) if bandwidth >= mbit_s), len(grid) - 1)
    low, high = curve.seconds[max(after - 1, 0)], curve.seconds[after]
    span = math.log(grid[after] / grid[max(after - 1, 0)])
    if span == 0 or not (math.isfinite(low) and math.isfinite(high) and low > 0 and high > 0):
        return high
    share = math.log(mbit_s / grid[after - 1]) / span
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


def _draw(values: list[list[float]], upright: str) -> list[str]:
    """Return the rows of the chart, from the slowest on."""
    columns = len(values[0])
    best = [min(row[n] for row in values) for n in range(columns)]
    finite = [value for value in best if math.isfinite(value) and value > 0] or [1.0]
    highest = max((value for row in values for value in row if math.isfinite(value)), default=1.0)
    low = min(finite) / 1.1
    high = max(min(highest, _HIGHEST * max(finite)), low * 1.5)
    canvas = [[" "] * columns for _ in range(_HEIGHT)]
    for index in sorted(range(len(values)), key=lambda index: -values[index][0]):
        for n, value in enumerate(values[index]):
            if low <= value <= high:
                level = round((_HEIGHT - 1) * math.log(value / low) / math.log(high / low))
                canvas[_HEIGHT - 1 - level][n] = _LETTERS[index]
    labels = [""] * _HEIGHT
    for tick in log_ticks(low, high):
        labels[_HEIGHT - 1 - round((_HEIGHT - 1) * math.log(tick / low) / math.log(high / low))] = show_ms(
            tick
        )
    return [
        f"{label.rjust(_MARGIN - 2)} {upright}{''.join(cells)}"
        for label, cells in zip(labels, canvas, strict=True)
    ]


def _axis(at: list[float]) -> str:
    """Return the line of bandwidths below the axis, without those for which there is no room."""
    cells = [" "] * (_MARGIN + len(at) + 12)
    free = 0
    for tick in log_ticks(at[0], at[-1] * 1.0001):
        text = three_digits(tick)
        column = _MARGIN + min(range(len(at)), key=lambda n: abs(math.log(at[n] / tick)))
        begin = max(column - len(text) // 2, 0)
        if begin >= free:
            cells[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    unit = " Mbit/s"
    line = "".join(cells).rstrip()
    return (
        line + unit
        if len(line) + len(unit) <= _MARGIN + len(at) + 1
        else f"{line}\n{' ' * _MARGIN}Mbit/s, log scale"
    )
