"""Charts as SVG: numbers in, markup out. Colours come from the style sheet, by classes.

A chart has a title and a description for screen readers, and a table of the same values for everybody. It
holds no styles and no scripts, which the pages' security policy would refuse.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from markupsafe import Markup

from edgekit_host.plots.axes import linear_ticks

_WIDTH, _HEIGHT = 360.0, 190.0
_X_MIN, _X_MAX, _Y_MIN, _Y_MAX = 46.0, 350.0, 12.0, 156.0
_ROWS: Final = 12
_TICKS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart.

    Attributes:
        name: name of the line in the table.
        style: class of the style sheet.
        points: (x, y), x rising.
        is_filled: whether the area under it is filled.
        has_dots: whether its points are marked.
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
        key: unique on the page.
        title: title of the chart.
        words: what it shows, for screen readers.
        x_name: name of the x axis.
        x_ticks: (x, text).
        lines: lines in drawing order: the lowest first.
        limit: y of a horizontal line, or None.
        limit_text: text beside the limit.
        top: highest y; higher points are outside of the frame.
        bottom: lowest y.
        show: writes a y.
        show_x: writes an x, for the table.
        is_log: whether x is drawn by its logarithm.
        x_range: lowest and highest x; those of the points by default.
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
        """Return the chart."""
        return Markup(
            '<svg class="chart" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-labelledby="{}-t {}-d">'
            '<title id="{}-t">{}</title><desc id="{}-d">{}</desc>'
            '<clipPath id="{}-c"><rect x="{}" y="{}" width="{}" height="{}"/></clipPath>'
            '{}<g clip-path="url(#{}-c)">{}</g>{}</svg>'
        ).format(
            *(_WIDTH, _HEIGHT, self.key, self.key, self.key, self.title, self.key, self.words, self.key),
            *(_X_MIN, _Y_MIN - 4, _X_MAX - _X_MIN + 4, _Y_MAX - _Y_MIN + 4),
            self._draw_grid(),
            self.key,
            Markup().join(self._draw_line(line) for line in self.lines),
            self._draw_limit(),
        )

    def write_table(self) -> Markup:
        """Return at most twelve rows of the values, the last one among them."""
        xs = sorted({x for line in self.lines for x, _ in line.points})
        step = max(math.ceil(len(xs) / _ROWS), 1)
        shown_xs = xs[::-1][::step][::-1]
        line_values = [dict(line.points) for line in self.lines]
        head = Markup().join(Markup("<th scope=col>{}").format(line.name) for line in self.lines)
        rows = []
        for x in shown_xs:
            cells = [
                self.show_x(x),
                *(self.show(values[x]) if x in values else "-" for values in line_values),
            ]
            rows.append(Markup("<tr><th scope=row>") + Markup("<td>").join(cells))
        return Markup(
            "<table><caption>{}</caption><thead><tr><th scope=col>{}{}</thead><tbody>{}</tbody></table>"
        ).format(self.title, self.x_name, head, Markup().join(rows))

    def _x(self, x: float) -> float:
        low, high = self.x_range or self._find_range()
        if self.is_log:
            x, low, high = (math.log(max(value, 1e-9)) for value in (x, low, high))
        share = (x - low) / (high - low) if high > low else 0.5
        return _X_MIN + (_X_MAX - _X_MIN) * share

    def _find_range(self) -> tuple[float, float]:
        ends = [x for line in self.lines if line.points for x in (line.points[0][0], line.points[-1][0])]
        return min(ends, default=0.0), max(ends, default=1.0)

    def _y(self, y: float) -> float:
        share = (y - self.bottom) / (self.top - self.bottom)
        return _Y_MAX - (_Y_MAX - _Y_MIN) * min(max(share, 0.0), 2.0)

    def _draw_grid(self) -> Markup:
        parts = []
        for y in linear_ticks(self.bottom, self.top, _TICKS):
            at = self._y(y)
            parts.append(
                Markup('<path class="c-grid" d="M{:.0f} {:.1f}H{:.0f}"/>').format(_X_MIN, at, _X_MAX)
            )
            text = Markup('<text class="c-tick c-end" x="{:.0f}" y="{:.1f}">{}</text>')
            parts.append(text.format(_X_MIN - 6, at + 4, self.show(y)))
        for x, words in self.x_ticks:
            text = Markup('<text class="c-tick c-mid" x="{:.1f}" y="{:.0f}">{}</text>')
            parts.append(text.format(self._x(x), _Y_MAX + 15, words))
        name = Markup('<text class="c-axis c-mid" x="{:.0f}" y="{:.0f}">{}</text>')
        parts.append(name.format((_X_MIN + _X_MAX) / 2, _HEIGHT - 4, self.x_name))
        return Markup('<g aria-hidden="true">{}</g>').format(Markup().join(parts))

    def _draw_line(self, line: Line) -> Markup:
        points = [(self._x(x), self._y(y)) for x, y in line.points]
        if not points:
            return Markup()
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts = [Markup('<polyline class="c-line {}" points="{}"/>').format(line.style, drawn)]
        if line.is_filled:
            area = f"{points[0][0]:.1f},{_Y_MAX} {drawn} {points[-1][0]:.1f},{_Y_MAX}"
            parts.insert(0, Markup('<polygon class="c-area {}" points="{}"/>').format(line.style, area))
        if line.has_dots:  # each dot is a line of no length with round ends
            dots = "".join([f"M{x:.1f} {y:.1f}h0" for x, y in points])
            parts.append(Markup('<path class="c-dots {}" d="{}"/>').format(line.style, dots))
        else:
            dot = Markup('<circle class="c-dot {}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>')
            parts.append(dot.format(line.style, *points[-1]))
        return Markup().join(parts)

    def _draw_limit(self) -> Markup:
        if self.limit is None:
            return Markup()
        y = self._y(self.limit)
        return Markup(
            '<g aria-hidden="true"><path class="c-limit" d="M{:.0f} {:.1f}H{:.0f}"/>'
            '<text class="c-limit-text" x="{:.0f}" y="{:.1f}">{}</text></g>'
        ).format(_X_MIN, y, _X_MAX, _X_MIN + 4, y - 5, self.limit_text)


def draw_bar(parts: Sequence[tuple[str, int]], words: str) -> Markup:
    """Return a bar of parts beside each other.

    Args:
        parts: (class of the style sheet, number).
        words: what it shows, for screen readers.
    """
    total = sum(number for _, number in parts) or 1
    begin, drawn = 0.0, []
    for style, number in parts:
        width = 1000.0 * number / total
        if number:
            rect = Markup('<rect class="c-part {}" x="{:.1f}" width="{:.1f}" height="14"/>')
            drawn.append(rect.format(style, begin, max(width, 4.0)))
        begin += width
    return Markup(
        '<svg class="bar-parts" viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label="{}">'
        "{}</svg>"
    ).format(words, Markup().join(drawn))


def count_ticks(most: int) -> list[tuple[float, str]]:
    """Return marks for numbers from 1 to `most`, drawn by their logarithm."""
    powers = [10.0**power for power in range(1, int(math.log10(most)) + 1) if 10**power * 2 <= most]
    return [(value, f"{value:,.0f}") for value in [1.0, *powers, float(most)]] if most > 1 else [(1.0, "1")]
