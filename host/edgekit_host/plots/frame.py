"""The frame of a chart: a rectangle with two axes, a grid, ticks and lines, as inline SVG.

All charts use it. Style sheets set colours, line styles and fonts by class, so that one chart also works in
dark mode and in print. The frame uses the classes `grid`, `tick` and `axis`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis

Ticks: TypeAlias = Iterable[tuple[float, str]]
"""The value and text of each tick."""


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def text(x: float, y: float, words: str, style: str | None, anchor: str = "start") -> Markup:
    return el("text", words, x=x, y=y, class_=style, text_anchor=anchor)


def rect(x: float, y: float, width: float, height: float, style: str | None = None) -> Markup:
    """Return a rectangle, whose CSS class `style` sets its colour."""
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
    """A rectangle with two axes in a drawing. The edges are in drawing units, and y increases downwards."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def x_at(self, value: float) -> float:
        """Return the x coordinate of a value, which is outside the frame if the value is off the axis."""
        return self.left + (self.right - self.left) * self.x.share(value)

    def y_at(self, value: float) -> float:
        """Return the y coordinate of a value, which is outside the frame if the value is off the axis."""
        return self.bottom - (self.bottom - self.top) * self.y.share(value)

    def trace(self, points: Iterable[tuple[float, float]], style: str) -> Markup:
        """Return a line through the points (x, y), without points whose y is not finite."""
        drawn = [f"{self.x_at(x):.1f},{self.y_at(y):.1f}" for x, y in points if math.isfinite(y)]
        return el("polyline", points=" ".join(drawn), class_=style)

    def across(self, value: float, style: str) -> Markup:
        """Return a horizontal line at a y value, across the whole width."""
        y = self.y_at(value)
        return line(self.left, y, self.right, y, style)

    def upright(self, value: float, style: str) -> Markup:
        """Return a vertical line at an x value, across the whole height."""
        x = self.x_at(value)
        return line(x, self.top, x, self.bottom, style)

    def grid(self, x_ticks: Ticks, y_ticks: Ticks, *, has_columns: bool = False) -> list[Markup]:
        """Return the tick texts with horizontal grid lines, and with vertical grid lines if `has_columns`."""
        parts = []
        for value, words in y_ticks:
            parts.append(self.across(value, "grid"))
            parts.append(text(self.left - 6, self.y_at(value) + 4, words, "tick", "end"))
        for value, words in x_ticks:
            if has_columns:
                parts.append(self.upright(value, "grid"))
            parts.append(text(self.x_at(value), self.bottom + 17, words, "tick", "middle"))
        return parts
