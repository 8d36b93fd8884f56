"""Draws charts as SVG. The colours are classes of the style sheet.

A chart has a title and a description for screen readers, and a table of its values. It contains no styles or
scripts, since the security policy of the pages forbids them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from edgekit_host.markup import Markup, el, join
from edgekit_host.plots.axes import Axis, linear_ticks
from edgekit_host.plots.frame import Frame, drawing, rect, text

_SIZE: Final = (360.0, 190.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 350.0, 12.0, 156.0
_ROWS: Final = 12
_TICKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart.

    Attributes:
        name: The name of the line in the table.
        style: A class of the style sheet.
        points: The points (x, y), with rising x.
        is_filled: Whether the area below the line is filled.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    is_filled: bool = False
    has_dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The content of a chart.

    Attributes:
        key: A prefix for ids in the SVG, unique on the page.
        words: A description for screen readers.
        x_ticks: The position and text of each tick, (x, text).
        lines: The lines. Later ones are drawn over earlier ones.
        limit: The y of a horizontal line, or None.
        top: The highest y. Points above it are cut off.
        bottom: The lowest y.
        show: Formats a y.
        show_x: Formats an x, for the table.
        is_log: Whether the x axis is logarithmic.
        x_range: The lowest and highest x. The default is the range of the points.
    """

    key: str
    title: str
    words: str
    x_name: str
    x_ticks: Sequence[tuple[float, str]]
    lines: Sequence[Line]
    limit: float | None = None
    limit_text: str = ""
    top: float
    bottom: float = 0.0
    show: Callable[[float], str] = field(default=lambda value: f"{value:g}")
    show_x: Callable[[float], str] = field(default=lambda value: f"{value:g}")
    is_log: bool = False
    x_range: tuple[float, float] | None = None

    def draw(self) -> Markup:
        ends = [x for line in self.lines if line.points for x in (line.points[0][0], line.points[-1][0])]
        low, high = self.x_range or (min(ends, default=0.0), max(ends, default=1.0))
        frame = Frame(
            x=Axis(low, high, log=self.is_log),
            y=Axis(self.bottom, self.top),
            left=_LEFT,
            right=_RIGHT,
            top=_TOP,
            bottom=_BOTTOM,
        )
        y_ticks = [(y, self.show(y)) for y in linear_ticks(self.bottom, self.top, _TICKS)]
        inside = rect(_LEFT, _TOP - 4, _RIGHT - _LEFT + 4, _BOTTOM - _TOP + 8)
        return drawing(
            _SIZE,
            el("clipPath", inside, id=f"{self.key}-clip"),
            el(
                "g",
                *frame.grid(self.x_ticks, y_ticks),
                text((_LEFT + _RIGHT) / 2, _SIZE[1] - 4, self.x_name, "axis", "middle"),
                aria_hidden="true",
            ),
            el(
                "g",
                *(_draw_line(line, frame) for line in self.lines if line.points),
                clip_path=f"url(#{self.key}-clip)",
            ),
            self._draw_limit(frame),
            title=self.title,
            description=self.words,
            style="chart",
        )

    def write_table(self) -> Markup:
        """Return a table of the lines' values at up to twelve values of x, including the highest x."""
        xs = sorted({x for line in self.lines for x, _ in line.points})
        step = max(math.ceil(len(xs) / _ROWS), 1)
        line_values = [dict(line.points) for line in self.lines]
        rows = [
            el(
                "tr",
                el("th", self.show_x(x), scope="row"),
                *(el("td", self.show(values[x]) if x in values else "-") for values in line_values),
            )
            for x in xs[::-1][::step][::-1]
        ]
        head = [el("th", name, scope="col") for name in (self.x_name, *(line.name for line in self.lines))]
        return el("table", el("caption", self.title), el("thead", el("tr", *head)), el("tbody", *rows))

    def _draw_limit(self, frame: Frame) -> Markup | None:
        if self.limit is None:
            return None
        words = text(_LEFT + 4, frame.y_at(self.limit) - 5, self.limit_text, "c-limit-text")
        return el("g", frame.across(self.limit, "c-limit"), words, aria_hidden="true")


def _draw_line(line: Line, frame: Frame) -> Markup:
    floor = frame.y.low
    points = [(x, max(y, floor)) for x, y in line.points]
    last, value = points[-1]
    area = None
    if line.is_filled:
        area = frame.trace([(points[0][0], floor), *points, (last, floor)], f"c-area {line.style}")
    if line.has_dots:  # each dot is a line of no length with round ends
        path = "".join(f"M{frame.x_at(x):.1f} {frame.y_at(y):.1f}h0" for x, y in points)
        dots = el("path", class_=f"c-dots {line.style}", d=path)
    else:
        dots = el("circle", class_=f"c-dot {line.style}", cx=frame.x_at(last), cy=frame.y_at(value), r=3.5)
    return join(area, frame.trace(points, f"c-line {line.style}"), dots)


def draw_bar(parts: Sequence[tuple[str, int]], words: str) -> Markup:
    """Return a bar that is divided in proportion to the numbers of its parts.

    Args:
        parts: The style sheet class and the number of each part, from left to right.
        words: A description for screen readers.
    """
    total = sum(number for _, number in parts) or 1
    begin, drawn = 0.0, []
    for style, number in parts:
        width = 1000.0 * number / total
        if number:
            drawn.append(rect(begin, 0, max(width, 4.0), 14, f"c-part {style}"))
        begin += width
    return el(
        "svg",
        *drawn,
        class_="bar-parts",
        viewBox="0 0 1000 14",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )


def count_ticks(most: int) -> list[tuple[float, str]]:
    """Return ticks (number, text) for a logarithmic axis from 1 to `most`: 1, powers of ten, and `most`."""
    powers = [10.0**power for power in range(1, int(math.log10(most)) + 1) if 10**power * 2 <= most]
    return [(value, f"{value:,.0f}") for value in [1.0, *powers, float(most)]] if most > 1 else [(1.0, "1")]
