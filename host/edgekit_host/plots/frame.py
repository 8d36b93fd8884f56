"""The frame of a chart: two axes in a rectangle, with its grid, ticks and lines, as inline SVG.

Every chart is drawn in one. Colours, line styles and fonts are in style sheets by class, so that dark mode
and print need no second chart: `grid`, `tick` and `axis` are the frame's, the others the chart's own.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis

Ticks: TypeAlias = Iterable[tuple[float, str]]
"""Value and text of each tick."""


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def text(x: float, y: float, words: str, style: str | None, anchor: str = "start") -> Markup:
    return el("text", words, x=x, y=y, class_=style, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, style: str | None = None) -> Markup:
    """Return a rectangle; `style`: class of the style sheet, which sets its colour."""
    return el("rect", x=float(x), y=float(y), width=float(width), height=float(height), class_=style)


def drawing(
    size: tuple[float, float],
    *content: Markup | None,
    title: str,
    description: str | None = None,
    style: str = "plot",
    role: str = "img",
) -> Markup:
    return el(
        "svg",
        el("title", title),
        None if description is None else el("desc", description),
        *content,
        viewBox=f"0 0 {size[0]:.0f} {size[1]:.0f}",
        class_=style,
        role=role,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Two axes in a rectangle of a drawing; edges are in units of the drawing, and y grows downward."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def x_at(self, value: float) -> float:
        """Return the x of a value; outside of the frame for a value off the axis."""
        return self.left + (self.right - self.left) * self.x.share(value)

    def y_at(self, value: float) -> float:
        """Return the y of a value; outside of the frame for a value off the axis."""
        return self.bottom - (self.bottom - self.top) * self.y.share(value)

    def trace(self, points: Iterable[tuple[float, float]], style: str) -> Markup:
        """Return a line through the points (x, y) whose y is finite."""
        drawn = [f"{self.x_at(x):.1f},{self.y_at(y):.1f}" for x, y in points if math.isfinite(y)]
        return el("polyline", points=" ".join(drawn), class_=style)

    def across(self, value: float, style: str) -> Markup:
        """Return a horizontal line at a value of y, over the whole width."""
        y = self.y_at(value)
        return line(self.left, y, self.right, y, style)

    def upright(self, value: float, style: str) -> Markup:
        """Return a vertical line at a value of x, over the whole height."""
        x = self.x_at(value)
        return line(x, self.top, x, self.bottom, style)

    def grid(self, x_ticks: Ticks, y_ticks: Ticks, *, has_columns: bool = False) -> list[Markup]:
        """Return lines and texts of ticks (value, text); with `has_columns`, ticks of x have lines, too."""
        parts = []
        for value, words in y_ticks:
            parts.append(self.across(value, "grid"))
            parts.append(text(self.left - 6, self.y_at(value) + 4, words, "tick", "end"))
        for value, words in x_ticks:
            if has_columns:
                parts.append(self.upright(value, "grid"))
            parts.append(text(self.x_at(value), self.bottom + 17, words, "tick", "middle"))
        return parts
