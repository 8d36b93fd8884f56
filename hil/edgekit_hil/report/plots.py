"""Plots in SVG: a curve, and predictions beside measurements. Numbers in, text out."""

import html
import math
from collections.abc import Callable, Sequence
from typing import Final

from edgekit_host.evidence import Curve, Figure

_WIDTH: Final = 480
_HEIGHT: Final = 260
_LEFT: Final = 58
_RIGHT: Final = 470
_TOP: Final = 30  # the title of the y axis stands above, where no line crosses it
_BOTTOM: Final = 214
_TICKS: Final = 5
_MOST_POINTS: Final = 600


def draw_curve(curve: Curve) -> str:
    """Return a line through the points of a curve; its y axis reaches to 0."""
    step = max(1, len(curve.x) // _MOST_POINTS)
    points = list(zip(curve.x, curve.y, strict=True))[::step]
    low, high = min(curve.x), max(curve.x)
    bottom = min(*curve.y, 0.0)
    top = max(*curve.y, 0.0)
    top = top if top > bottom else bottom + 1
    place_x = _scale(low, high if high > low else low + 1, _LEFT, _RIGHT)
    place_y = _scale(bottom, top, _BOTTOM, _TOP)
    line = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
    axes = _axes((low, max(high, low)), (bottom, top), (curve.x_label, curve.y_label), (place_x, place_y))
    return _svg(f'{axes}<polyline class="line" points="{line}"/>', curve.name)


def draw_predictions(figures: Sequence[Figure]) -> str:
    """Return a plot with a point for each predicted figure: measured on x, predicted on y, in one unit.

    The line is where both are equal. Both axes are logarithmic.

    Args:
        figures: at least one figure, each with positive value and prediction.
    """
    pairs = [(each.name, float(each.value or 0), float(each.predicted or 0)) for each in figures]
    values = [value for _, *both in pairs for value in both]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    place_x, place_y = _scale(low, high, _LEFT, _RIGHT), _scale(low, high, _BOTTOM, _TOP)
    unit = figures[0].unit
    ends = (10**low, 10**high)
    axes = _axes(
        ends,
        ends,
        (f"measured, {unit}", f"predicted, {unit}"),
        (lambda value: place_x(math.log10(value)), lambda value: place_y(math.log10(value))),
        is_log=True,
    )
    equal = f'<line class="equal" x1="{_LEFT}" y1="{_BOTTOM}" x2="{_RIGHT}" y2="{_TOP}"/>'
    dots = "".join(
        f'<circle cx="{place_x(math.log10(measured)):.1f}" cy="{place_y(math.log10(predicted)):.1f}" r="5">'
        f"<title>{html.escape(name)}: {measured:.3g} {html.escape(unit)},"
        f" predicted {predicted:.3g}</title></circle>"
        for name, measured, predicted in pairs
    )
    return _svg(axes + equal + dots, f"predicted against measured, {unit}")


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def _axes(
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    labels: tuple[str, str],
    places: tuple[Callable[[float], float], Callable[[float], float]],
    *,
    is_log: bool = False,
) -> str:
    """Return both axes with their labels and ticks."""
    parts = [f'<path class="axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>']
    parts += [
        f'<text x="{places[0](value):.1f}" y="{_BOTTOM + 16}" class="middle">{value:.3g}</text>'
        for value in _ticks(*x_range, is_log=is_log)
    ]
    for value in _ticks(*y_range, is_log=is_log):
        place = places[1](value)
        parts.append(f'<path class="grid" d="M{_LEFT} {place:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4:.1f}" class="end">{value:.3g}</text>')
    x_label, y_label = (html.escape(label) for label in labels)
    parts.append(f'<text x="{_RIGHT}" y="{_BOTTOM + 36}" class="end label">{x_label}</text>')
    parts.append(f'<text x="4" y="{_TOP - 14}" class="label">{y_label}</text>')
    return "".join(parts)


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    """Return round values within a range."""
    if is_log:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
        inside = [value for value in every if low <= value <= high]
        return inside[:: math.ceil(len(inside) / (2 * _TICKS))] if inside else [low]
    if high <= low:
        return [low]
    raw = (high - low) / _TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(content: str, title: str) -> str:
    name = html.escape(title)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{content}</svg>'
        f"<figcaption>{name}</figcaption></figure>"
    )
