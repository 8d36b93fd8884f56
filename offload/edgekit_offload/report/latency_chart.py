"""The chart of a plan: latency against bandwidth, a line for each candidate, and the best as a ribbon below.

It makes SVG from numbers. Hovering over or focusing a place of the chart shows its values, without a script.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgekit_host.markup import Markup, el, show_ms, three_digits
from edgekit_host.plots.axes import log_ticks

_WIDTH, _HEIGHT = 640.0, 420.0
_X_MIN, _RIGHT, _TOP, _BOTTOM = 64.0, 628.0, 14.0, 330.0
_RIBBON_TOP, _RIBBON_BOTTOM = 356.0, 378.0
_HIGHEST: Final = 12.0  # multiple of the slowest best candidate; slower values leave the frame
_LINE_HEIGHT: Final = 16.0
_MAX_LISTED: Final = 16
_COLORS: Final = 8


@dataclass(frozen=True, slots=True)
class Curve:
    """The latency of a candidate.

    Attributes:
        tag: one or two characters that stand for it in the chart.
        name: name of the candidate.
        seconds: latency at each bandwidth of the chart; infinity if it cannot run.
    """

    tag: str
    name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """Neighbouring bandwidths at which the same candidate is the best.

    Attributes:
        curve: index of the candidate.
        low_mbit_s, high_mbit_s: least and greatest bandwidth at which it is the best.
    """

    curve: int
    low_mbit_s: float
    high_mbit_s: float


def colors_of(reaches: Sequence[Reach]) -> dict[int, int]:
    """Return index of a candidate -> number of its colour; candidates that are never the best have none."""
    return {
        curve: number % _COLORS + 1
        for number, curve in enumerate(dict.fromkeys(reach.curve for reach in reaches))
    }


class _Frame:
    """The positions at which bandwidths and latencies are drawn."""

    def __init__(self, mbit_s: Sequence[float], curves: Sequence[Curve]) -> None:
        best = [min(curve.seconds[at] for curve in curves) for at in range(len(mbit_s))]
        finite = [value for curve in curves for value in curve.seconds if math.isfinite(value)]
        bounded = [value for value in best if math.isfinite(value)] or [1.0]
        self.x_low, self.x_high = mbit_s[0], max(mbit_s[-1], mbit_s[0] * 1.0001)
        self.y_low = max(min(bounded) / 1.25, 1e-7)
        self.y_high = max(min(max(finite, default=1.0), _HIGHEST * max(bounded)) * 1.1, self.y_low * 1.5)

    def x(self, mbit_s: float) -> float:
        share = math.log(mbit_s / self.x_low) / math.log(self.x_high / self.x_low)
        return _X_MIN + (_RIGHT - _X_MIN) * share

    def y(self, seconds: float) -> float:
        share = math.log(max(seconds, 1e-9) / self.y_low) / math.log(self.y_high / self.y_low)
        return _BOTTOM - (_BOTTOM - _TOP) * share


def latency_chart(
    mbit_s: Sequence[float], curves: Sequence[Curve], reaches: Sequence[Reach], *, key: str
) -> Markup:
    """Return the chart.

    Args:
        mbit_s: bandwidths, rising.
        curves: at least one, each with a latency for each bandwidth.
        reaches: the ribbon.
        key: prefix of the ids inside, unique on the page.
    """
    frame, colors = _Frame(mbit_s, curves), colors_of(reaches)
    order = sorted(range(len(curves)), key=lambda index: index in colors)
    lines = [_line(frame, mbit_s, curves[index], colors.get(index)) for index in order]
    tags = [
        _tag(frame, mbit_s, curves[index], colors.get(index), (index + 0.5) / len(curves)) for index in order
    ]
    box = el("rect", x=_X_MIN, y=_TOP, width=_RIGHT - _X_MIN, height=_BOTTOM - _TOP)
    words = f"{len(curves)} candidates to run the model. The table below holds the values."
    return el(
        "svg",
        el("title", "Latency against bandwidth", id=f"{key}-title"),
        el("desc", words, id=f"{key}-desc"),
        el("defs", el("clipPath", box, id=f"{key}-frame")),
        _grid(frame),
        el("g", *lines, clip_path=f"url(#{key}-frame)", aria_hidden="true"),
        el("g", *tags, aria_hidden="true"),
        _ribbon(frame, curves, reaches, colors),
        _bands(frame, mbit_s, curves, colors),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        class_="plot",
        role="group",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def _style(color: int | None) -> str:
    return "other" if color is None else f"curve{color}"


def _line(frame: _Frame, mbit_s: Sequence[float], curve: Curve, color: int | None) -> Markup:
    points = " ".join(
        f"{frame.x(at):.1f},{frame.y(value):.1f}"
        for at, value in zip(mbit_s, curve.seconds, strict=True)
        if math.isfinite(value)
    )
    return el("polyline", points=points, class_=f"line {_style(color)}")


def _tag(
    frame: _Frame, mbit_s: Sequence[float], curve: Curve, color: int | None, share: float
) -> Markup | None:
    """Return the tag of a line, in the frame and near `share` of its width, so that tags do not overlap."""
    position = share * (len(mbit_s) - 1)
    inside = [at for at, value in enumerate(curve.seconds) if frame.y_low <= value <= frame.y_high]
    if not inside:
        return None
    at = min(inside, key=lambda index: abs(index - position))
    x, y = frame.x(mbit_s[at]), frame.y(curve.seconds[at])
    x = min(max(x, _X_MIN + 9), _RIGHT - 9)
    return el(
        "g",
        el("circle", cx=x, cy=y, r=8.5),
        el("text", curve.tag, x=x, y=y + 4, text_anchor="middle"),
        class_=f"tag {_style(color)}",
    )


def _grid(frame: _Frame) -> Markup:
    parts: list[Markup] = []
    for tick in log_ticks(frame.x_low, frame.x_high):
        x = frame.x(tick)
        parts.append(el("line", x1=x, y1=_TOP, x2=x, y2=_BOTTOM, class_="grid"))
        parts.append(el("text", three_digits(tick), x=x, y=_BOTTOM + 17, class_="tick", text_anchor="middle"))
    for tick in log_ticks(frame.y_low, frame.y_high):
        y = frame.y(tick)
        parts.append(el("line", x1=_X_MIN, y1=y, x2=_RIGHT, y2=y, class_="grid"))
        parts.append(el("text", show_ms(tick), x=_X_MIN - 6, y=y + 4, class_="tick", text_anchor="end"))
    middle = (_X_MIN + _RIGHT) / 2
    title = "Bandwidth to the server (Mbit/s, log scale); ribbon: the best candidate"
    parts.append(el("text", title, x=middle, y=_RIBBON_BOTTOM + 24, class_="axis", text_anchor="middle"))
    return el("g", *parts, aria_hidden="true")


def _ribbon(
    frame: _Frame, curves: Sequence[Curve], reaches: Sequence[Reach], colors: dict[int, int]
) -> Markup:
    parts = []
    height = _RIBBON_BOTTOM - _RIBBON_TOP
    for reach in reaches:
        start, right = frame.x(reach.low_mbit_s), frame.x(reach.high_mbit_s)
        curve, width = curves[reach.curve], max(right - start, 1.0)
        room = int((width - 10) / 7)  # characters
        text = curve.name if len(curve.name) <= room else curve.tag if room >= len(curve.tag) else None
        words = f"{three_digits(reach.low_mbit_s)} to {three_digits(reach.high_mbit_s)} Mbit/s: {curve.name}"
        parts.append(
            el(
                "g",
                el("title", words),
                el("rect", x=start, y=_RIBBON_TOP, width=width, height=height),
                None
                if text is None
                else el("text", text, x=start + width / 2, y=_RIBBON_TOP + 15.5, text_anchor="middle"),
                class_=f"reach {_style(colors.get(reach.curve))}",
            )
        )
    return el("g", *parts)


def _bands(frame: _Frame, mbit_s: Sequence[float], curves: Sequence[Curve], colors: dict[int, int]) -> Markup:
    """Return vertical bands that cover the chart; the band under the pointer shows its values."""
    step = max(1, len(mbit_s) // 20)
    indices = list(range(0, len(mbit_s), step))
    width = (_RIGHT - _X_MIN) / max(len(indices), 1)
    return el("g", *(_band(frame, mbit_s[at], at, curves, colors, width=width) for at in indices))


def _band(
    frame: _Frame, mbit_s: float, at: int, curves: Sequence[Curve], colors: dict[int, int], *, width: float
) -> Markup:
    order = sorted(range(len(curves)), key=lambda index: curves[index].seconds[at])[:_MAX_LISTED]
    lines = [f"{three_digits(mbit_s)} Mbit/s"]
    lines += [f"{curves[index].tag}  {curves[index].name}" for index in order]
    values = ["", *(show_ms(curves[index].seconds[at]) for index in order)]
    room = min(max(map(len, lines)), 34)
    x = frame.x(mbit_s)
    box_width = 7.0 * room + 76
    box_x = x + 8 if x + 8 + box_width < _RIGHT else max(x - 8 - box_width, 2.0)
    rows = []
    for number, (line, value) in enumerate(zip(lines, values, strict=True)):
        y = _TOP + 20 + _LINE_HEIGHT * number
        style = "head" if number == 0 else f"row {_style(colors.get(order[number - 1]))}"
        text = line if len(line) <= 34 else f"{line[:33]}…"
        rows.append(el("text", text, x=box_x + 8, y=y, class_=style))
        rows.append(el("text", value, x=box_x + box_width - 8, y=y, text_anchor="end"))
    height = _LINE_HEIGHT * len(lines) + 12
    spoken = "; ".join(f"{curves[index].name} {show_ms(curves[index].seconds[at])}" for index in order)
    return el(
        "g",
        el(
            "rect",
            x=max(x - width / 2, _X_MIN),
            y=_TOP,
            width=width,
            height=_RIBBON_BOTTOM - _TOP,
            class_="target",
        ),
        el(
            "g",
            el("line", x1=x, y1=_TOP, x2=x, y2=_RIBBON_BOTTOM, class_="pointer"),
            el("rect", x=box_x, y=_TOP + 2, width=box_width, height=height, rx=5, class_="values"),
            *rows,
            class_="readout",
        ),
        class_="band",
        tabindex="0",
        role="img",
        aria_label=f"{lines[0]}: {spoken}",
    )
