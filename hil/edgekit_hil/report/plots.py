"""Plots of a run in SVG: a curve, and predictions beside measurements. Numbers in, markup out."""

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from edgekit_host.evidence import Curve, Figure
from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import linear_ticks, log_ticks

_WIDTH: Final = 480
_HEIGHT: Final = 260
_LEFT: Final = 58
_RIGHT: Final = 470
_TOP: Final = 30  # the title of the y axis stands above, where no line crosses it
_BOTTOM: Final = 214
_MAX_POINTS: Final = 600
_MAX_TICKS: Final = 10

_Scale: TypeAlias = Callable[[float], float]


def draw_curve(curve: Curve) -> Markup:
    """Return a line through the points of a curve; its y axis reaches to 0."""
    step = max(1, len(curve.x) // _MAX_POINTS)
    low, high = min(curve.x), max(curve.x)
    bottom, top = min(*curve.y, 0.0), max(*curve.y, 0.0)
    top = top if top > bottom else bottom + 1
    scale_x = _scale(low, high if high > low else low + 1, _LEFT, _RIGHT)
    scale_y = _scale(bottom, top, _BOTTOM, _TOP)
    points = list(zip(curve.x, curve.y, strict=True))[::step]
    line = " ".join(f"{scale_x(x):.1f},{scale_y(y):.1f}" for x, y in points)
    x_axis = _draw_x_axis(linear_ticks(low, high), scale_x, curve.x_label)
    y_axis = _draw_y_axis(linear_ticks(bottom, top), scale_y, curve.y_label)
    return _draw_figure(curve.name, x_axis, y_axis, el("polyline", class_="line", points=line))


def draw_predictions(figures: Sequence[Figure]) -> Markup:
    """Return a plot with a point for each predicted figure: measured on x, predicted on y, in one unit.

    The dashed line is where both are equal. Both axes are logarithmic.

    Args:
        figures: at least one figure, each with positive value and prediction.
    """
    pairs = [(figure.name, float(figure.value or 0), float(figure.predicted or 0)) for figure in figures]
    logarithms = [math.log10(value) for _, *both in pairs for value in both]
    low, high = min(logarithms) - 0.1, max(logarithms) + 0.1
    unit = figures[0].unit
    ticks = log_ticks(10**low, 10**high) or [10**low]
    ticks = ticks[:: math.ceil(len(ticks) / _MAX_TICKS)]
    by_log_x, by_log_y = _scale(low, high, _LEFT, _RIGHT), _scale(low, high, _BOTTOM, _TOP)

    def scale_x(value: float) -> float:
        return by_log_x(math.log10(value))

    def scale_y(value: float) -> float:
        return by_log_y(math.log10(value))

    dots = (
        el(
            "circle",
            el("title", f"{name}: {measured:.3g} {unit}, predicted {predicted:.3g}"),
            cx=scale_x(measured),
            cy=scale_y(predicted),
            r=5,
        )
        for name, measured, predicted in pairs
    )
    return _draw_figure(
        f"predicted against measured, {unit}",
        _draw_x_axis(ticks, scale_x, f"measured, {unit}"),
        _draw_y_axis(ticks, scale_y, f"predicted, {unit}"),
        el("line", class_="equal", x1=_LEFT, y1=_BOTTOM, x2=_RIGHT, y2=_TOP),
        *dots,
    )


def _scale(low: float, high: float, begin: float, end: float) -> _Scale:
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _draw_x_axis(ticks: Sequence[float], scale: _Scale, label: str) -> Markup:
    return el(
        "g",
        el("path", class_="axis", d=f"M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"),
        *(el("text", f"{tick:.3g}", x=scale(tick), y=_BOTTOM + 16, class_="middle") for tick in ticks),
        el("text", label, x=_RIGHT, y=_BOTTOM + 36, class_="end label"),
    )


def _draw_y_axis(ticks: Sequence[float], scale: _Scale, label: str) -> Markup:
    return el(
        "g",
        *(el("path", class_="grid", d=f"M{_LEFT} {scale(tick):.1f}H{_RIGHT}") for tick in ticks),
        *(el("text", f"{tick:.3g}", x=_LEFT - 6, y=scale(tick) + 4, class_="end") for tick in ticks),
        el("text", label, x=4, y=_TOP - 14, class_="label"),
    )


def _draw_figure(title: str, *content: Markup) -> Markup:
    svg = el("svg", *content, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title)
    return el("figure", svg, el("figcaption", title))
