"""Draws the course of a gate in the gate's own unit, with the limit at which it stops."""

import math
from collections.abc import Callable
from typing import Final

from edgekit_fleet.console.charts import Chart, Line, count_ticks
from edgekit_fleet.console.rollouts.evidence import Course

_LINEAR: Final = 20  # the axis is logarithmic for more answers than this


def make_chart(course: Course) -> Chart:
    """Return the chart of a gate's course, with its figures in the unit of the gate."""
    gate = course.gate
    title = gate.title + course.of_model + course.where
    is_ratio = gate.compare == "ratio"
    convert: Callable[[float], float] = math.exp if is_ratio else float
    show = _choose_writer(course)
    limit = convert(course.limit)
    bottom = 1.0 if is_ratio else 0.0
    late = course.estimates[len(course.estimates) // 3 :]
    top = bottom + max(1.5 * (limit - bottom), *(1.1 * (convert(value) - bottom) for value in late))
    lines = [
        Line(name="mean", style="c-mean", points=_pair(course.counts, course.estimates, convert)),
        Line(
            name="certainly above",
            style="c-low",
            points=_pair(course.counts, course.lows, convert),
            is_filled=True,
        ),
    ]
    last = f"after {course.counts[-1]:,} devices the mean is {show(convert(course.estimates[-1]))}"
    words = (
        f"{title}: {last}, and certainly above {show(convert(course.lows[-1]))}. The rollout stops when that"
        f" certainty comes to {show(limit)}."
    )
    answers = course.counts[-1]
    is_log = answers > _LINEAR
    ticks = count_ticks(answers) if is_log else [(float(count), f"{count}") for count in _few(answers)]
    return Chart(
        key=f"gate-{gate.name}",
        title=title,
        words=words,
        x_name="devices that began",
        x_ticks=ticks,
        lines=lines[::-1],
        limit=limit,
        limit_text=f"stops at {show(limit)}",
        top=top,
        bottom=bottom,
        show=show,
        show_x=lambda x: f"{x:,.0f}",
        is_log=is_log,
    )


def _pair(
    counts: tuple[int, ...], values: tuple[float, ...], convert: Callable[[float], float]
) -> list[tuple[float, float]]:
    return [(float(count), convert(value)) for count, value in zip(counts, values, strict=True)]


def _choose_writer(course: Course) -> Callable[[float], str]:
    if course.gate.form == "times":
        return lambda value: f"{value:.2f} x"
    if course.gate.form == "number":
        return lambda value: f"{value:.2f}"
    digits = 0 if course.limit >= 0.02 else 1
    return lambda value: f"{100 * value:.{digits}f} %"


def _few(most: int) -> list[int]:
    step = max(math.ceil(most / 5), 1)
    return sorted({*range(1, most + 1, step), most}) if most % step != 1 else list(range(1, most + 1, step))
