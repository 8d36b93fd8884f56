"""Draws the chart of a plan: latency over bandwidth, with a line for each candidate.

A ribbon below the chart shows the best candidate at each bandwidth. The chart is SVG without scripts. Its
values are shown on hover and on focus.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgekit_host.markup import Markup, el, show_ms, three_digits
from edgekit_host.plots.axes import Axis, log_ticks
from edgekit_host.plots.frame import Frame, drawing, line, rect, text

_WIDTH, _HEIGHT = 640.0, 420.0
_X_MIN, _RIGHT, _TOP, _BOTTOM = 64.0, 628.0, 14.0, 330.0
RIBBON_HEIGHT: Final = 23.0
_RIBBON_TOP, _RIBBON_BOTTOM = 355.0, 378.0
_CHARACTER: Final = 7.0  # width of a character
_HIGHEST: Final = 12.0  # multiple of the slowest best candidate. Slower values leave the frame
_LINE_HEIGHT: Final = 16.0
_MAX_LISTED: Final = 16
_COLORS: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """The latency curve of a candidate.

    Attributes:
        tag: One or two characters that label the candidate in the chart.
        seconds: The latency at each bandwidth of the chart. It is infinite where the candidate cannot run.
    """

    tag: str
    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """A range of bandwidths in which one candidate is the best.

    Attributes:
        curve: The index of the candidate.
        low_mbit_s, high_mbit_s: The ends of the range.
    """

    curve: int
    low_mbit_s: float
    high_mbit_s: float


def colors_of(reaches: Sequence[Reach]) -> dict[int, int]:
    """Return a dict from the index of each candidate in `reaches` to its colour number."""
    return {
        curve: number % _COLORS + 1
        for number, curve in enumerate(dict.fromkeys(reach.curve for reach in reaches))
    }


def _make_frame(mbit_s: Sequence[float], curves: Sequence[Curve]) -> Frame:
    best = [min(curve.seconds[at] for curve in curves) for at in range(len(mbit_s))]
    finite = [value for curve in curves for value in curve.seconds if math.isfinite(value)]
    bounded = [value for value in best if math.isfinite(value)] or [1.0]
    low = max(min(bounded) / 1.25, 1e-7)
    high = max(min(max(finite, default=1.0), _HIGHEST * max(bounded)) * 1.1, low * 1.5)
    x = Axis(mbit_s[0], max(mbit_s[-1], mbit_s[0] * 1.0001), log=True)
    return Frame(x=x, y=Axis(low, high, log=True), left=_X_MIN, right=_RIGHT, top=_TOP, bottom=_BOTTOM)


def latency_chart(
    mbit_s: Sequence[float], curves: Sequence[Curve], reaches: Sequence[Reach], *, key: str
) -> Markup:
    """Return the chart as SVG.

    Args:
        mbit_s: The bandwidths, in rising order.
        curves: At least one curve, with a latency for each bandwidth.
        reaches: The ranges in which each candidate is the best, drawn as a ribbon.
        key: A prefix for the ids in the SVG, unique on the page.
    """
    frame, colors = _make_frame(mbit_s, curves), colors_of(reaches)
    order = sorted(range(len(curves)), key=lambda index: index in colors)
    lines = [
        frame.trace(zip(mbit_s, curves[index].seconds, strict=True), f"line {_style(colors.get(index))}")
        for index in order
    ]
    tags = [
        _tag(frame, mbit_s, curves[index], colors.get(index), (index + 0.5) / len(curves)) for index in order
    ]
    box = rect(_X_MIN, _TOP, _RIGHT - _X_MIN, _BOTTOM - _TOP)
    return drawing(
        (_WIDTH, _HEIGHT),
        el("defs", el("clipPath", box, id=f"{key}-frame")),
        _grid(frame),
        el("g", *lines, clip_path=f"url(#{key}-frame)", aria_hidden="true"),
        el("g", *tags, aria_hidden="true"),
        _ribbon(frame, curves, reaches, colors),
        _bands(frame, mbit_s, curves, colors),
        title="Latency against bandwidth",
        description=f"{len(curves)} candidates to run the model. The table below holds the values.",
        role="group",
    )


def _style(color: int | None) -> str:
    return "other" if color is None else f"curve{color}"


def _tag(
    frame: Frame, mbit_s: Sequence[float], curve: Curve, color: int | None, share: float
) -> Markup | None:
    """Return the tag of a line, in the frame and near `share` of its width, so that tags do not overlap."""
    position = share * (len(mbit_s) - 1)
    inside = [at for at, value in enumerate(curve.seconds) if frame.y.shows(value)]
    if not inside:
        return None
    at = min(inside, key=lambda index: abs(index - position))
    x, y = min(max(frame.x_at(mbit_s[at]), _X_MIN + 9), _RIGHT - 9), frame.y_at(curve.seconds[at])
    tag = text(x, y + 4, curve.tag, None, "middle")
    return el("g", el("circle", cx=x, cy=y, r=8.5), tag, class_=f"tag {_style(color)}")


def _grid(frame: Frame) -> Markup:
    x_ticks = [(tick, three_digits(tick)) for tick in log_ticks(frame.x.low, frame.x.high)]
    y_ticks = [(tick, show_ms(tick)) for tick in log_ticks(frame.y.low, frame.y.high)]
    title = "Bandwidth to the server (Mbit/s, log scale); ribbon: the best candidate"
    words = text((_X_MIN + _RIGHT) / 2, _RIBBON_BOTTOM + 24, title, "axis", "middle")
    return el("g", *frame.grid(x_ticks, y_ticks, has_columns=True), words, aria_hidden="true")


def _ribbon(
    frame: Frame, curves: Sequence[Curve], reaches: Sequence[Reach], colors: dict[int, int]
) -> Markup:
    parts = []
    for reach in reaches:
        curve = curves[reach.curve]
        words = f"{three_digits(reach.low_mbit_s)} to {three_digits(reach.high_mbit_s)} Mbit/s: {curve.name}"
        ends = (frame.x_at(reach.low_mbit_s), frame.x_at(reach.high_mbit_s))
        style = _style(colors.get(reach.curve))
        parts.append(ribbon_part(ends, _RIBBON_TOP, (curve.name, curve.tag), words, style))
    return el("g", *parts)


def ribbon_part(
    ends: tuple[float, float], top: float, names: Sequence[str], words: str, style: str
) -> Markup:
    """Return one part of a ribbon. Its label is the first of `names` that fits.

    There is no label if all names are too long. `ends` are the left and right end and `top` is the upper
    edge, in units of the drawing. `words` is the text of the tooltip. `style` is a class of the style sheet.
    """
    width = max(ends[1] - ends[0], 1.0)
    name = next((name for name in names if _CHARACTER * len(name) + 8 <= width), None)
    return el(
        "g",
        el("title", words),
        rect(ends[0], top, width, RIBBON_HEIGHT),
        None
        if name is None
        else text(ends[0] + width / 2, top + RIBBON_HEIGHT / 2 + 4.5, name, None, "middle"),
        class_=f"reach {style}",
    )


def _bands(frame: Frame, mbit_s: Sequence[float], curves: Sequence[Curve], colors: dict[int, int]) -> Markup:
    """Return vertical bands that cover the chart. Each shows its values when the pointer is over it."""
    step = max(1, len(mbit_s) // 20)
    indices = list(range(0, len(mbit_s), step))
    width = (_RIGHT - _X_MIN) / max(len(indices), 1)
    return el("g", *(_band(frame, mbit_s[at], at, curves, colors, width=width) for at in indices))


def _band(
    frame: Frame, mbit_s: float, at: int, curves: Sequence[Curve], colors: dict[int, int], *, width: float
) -> Markup:
    order = sorted(range(len(curves)), key=lambda index: curves[index].seconds[at])[:_MAX_LISTED]
    lines = [f"{three_digits(mbit_s)} Mbit/s"]
    lines += [f"{curves[index].tag}  {curves[index].name}" for index in order]
    values = ["", *(show_ms(curves[index].seconds[at]) for index in order)]
    room = min(max(map(len, lines)), 34)
    x = frame.x_at(mbit_s)
    box_width = 7.0 * room + 76
    box_x = x + 8 if x + 8 + box_width < _RIGHT else max(x - 8 - box_width, 2.0)
    rows = []
    for number, (words, value) in enumerate(zip(lines, values, strict=True)):
        y = _TOP + 20 + _LINE_HEIGHT * number
        style = "head" if number == 0 else f"row {_style(colors.get(order[number - 1]))}"
        rows.append(text(box_x + 8, y, words if len(words) <= 34 else f"{words[:33]}…", style))
        rows.append(text(box_x + box_width - 8, y, value, None, "end"))
    height = _LINE_HEIGHT * len(lines) + 12
    spoken = "; ".join(f"{curves[index].name} {show_ms(curves[index].seconds[at])}" for index in order)
    return el(
        "g",
        rect(max(x - width / 2, _X_MIN), _TOP, width, _RIBBON_BOTTOM - _TOP, "target"),
        el(
            "g",
            line(x, _TOP, x, _RIBBON_BOTTOM, "pointer"),
            el("rect", x=box_x, y=_TOP + 2, width=box_width, height=height, rx=5, class_="values"),
            *rows,
            class_="readout",
        ),
        class_="band",
        tabindex="0",
        role="img",
        aria_label=f"{lines[0]}: {spoken}",
    )
