"""SVG plots of a run: a curve, and predictions against measurements."""

import math
from collections.abc import Sequence
from typing import Final

from edgekit_host.evidence import Curve, Figure
from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis, linear_ticks, log_ticks
from edgekit_host.plots.frame import Frame, drawing, line, text

_SIZE: Final = (480.0, 260.0)
_LEFT: Final = 58.0
_RIGHT: Final = 470.0
_TOP: Final = 30.0  # the title of the y axis stands above, where no line crosses it
_BOTTOM: Final = 214.0
_MAX_POINTS: Final = 600
_MAX_TICKS: Final = 10


def draw_curve(curve: Curve) -> Markup:
    """Return a line plot of a curve, whose y axis includes 0."""
    step = max(1, len(curve.x) // _MAX_POINTS)
    low, high = min(curve.x), max(curve.x)
    bottom, top = min(*curve.y, 0.0), max(*curve.y, 0.0)
    top = top if top > bottom else bottom + 1
    points = list(zip(curve.x, curve.y, strict=True))[::step]
    frame = _make_frame(Axis(low, high), Axis(bottom, top))
    ticks = (linear_ticks(low, high), linear_ticks(bottom, top))
    return _draw(curve.name, frame, ticks, (curve.x_label, curve.y_label), frame.trace(points, "line"))


def draw_predictions(figures: Sequence[Figure]) -> Markup:
    """Return a scatter plot with the measured values on the x axis and the predicted values on the y axis.

    Both axes are logarithmic. A dashed line shows where the two values are equal.

    Args:
        figures: At least one figure. All have the same unit, and their values and predictions are positive.
    """
    pairs = [(figure.name, float(figure.value or 0), float(figure.predicted or 0)) for figure in figures]
    values = [value for _, *both in pairs for value in both]
    axis = Axis(min(values) * 10**-0.1, max(values) * 10**0.1, log=True)
    unit = figures[0].unit
    ticks = log_ticks(axis.low, axis.high) or [axis.low]
    ticks = ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]
    frame = _make_frame(axis, axis)
    dots = (
        el(
            "circle",
            el("title", f"{name}: {measured:.3g} {unit}, predicted {predicted:.3g}"),
            cx=frame.x_at(measured),
            cy=frame.y_at(predicted),
            r=5,
        )
        for name, measured, predicted in pairs
    )
    return _draw(
        f"predicted against measured, {unit}",
        frame,
        (ticks, ticks),
        (f"measured, {unit}", f"predicted, {unit}"),
        line(_LEFT, _BOTTOM, _RIGHT, _TOP, "equal"),
        *dots,
    )


def _make_frame(x: Axis, y: Axis) -> Frame:
    return Frame(x=x, y=y, left=_LEFT, right=_RIGHT, top=_TOP, bottom=_BOTTOM)


def _draw(
    title: str,
    frame: Frame,
    ticks: tuple[Sequence[float], Sequence[float]],
    labels: tuple[str, str],
    *content: Markup,
) -> Markup:
    """Return a plot. `ticks` and `labels` each have an entry for x and for y."""
    x_ticks, y_ticks = ([(value, f"{value:.3g}") for value in values] for values in ticks)
    plot = drawing(
        _SIZE,
        *frame.grid(x_ticks, y_ticks),
        el("path", class_="edge", d=f"M{_LEFT:g} {_TOP:g}V{_BOTTOM:g}H{_RIGHT:g}"),
        text(_RIGHT, _BOTTOM + 36, labels[0], "axis", "end"),
        text(4, _TOP - 14, labels[1], "axis"),
        *content,
        title=title,
    )
    return el("figure", plot, el("figcaption", title))
