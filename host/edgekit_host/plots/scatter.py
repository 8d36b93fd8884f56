"""The scatter plot of candidates as inline SVG. No script, no library.

Colours, line styles and fonts are in `report.css` by class, so that dark mode and print need no second plot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from edgekit_host.markup import Markup, el, join
from edgekit_host.plots.axes import Axis, Quantity, focus_axis, scale_axis
from edgekit_host.plots.bars import rect
from edgekit_host.plots.placement import Room

_WIDTH, _HEIGHT = 560.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 546.0, 28.0, 330.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One candidate in a plot.

    Attributes:
        label: short text beside it.
        title: full text, for tooltips and screen readers.
        anchor: id of its table row.
        chosen: whether it is the chosen one: drawn larger, with a ring.
        meets: whether all limits are met: drawn filled, otherwise hollow and square.
    """

    label: str
    title: str
    anchor: str
    chosen: bool
    meets: bool


def pareto_plot(marks: Sequence[Mark], cost: Quantity, score: Quantity, *, key: str) -> Markup:
    """Return the SVG of cost (x, less is better) against score (y, more is better).

    Args:
        marks: at least one mark; `cost.values` and `score.values` hold as many.
        cost: x, with its limit.
        score: y, with its limit and the source's score.
        key: prefix of the ids inside, unique on the page.
    """
    x, y = scale_axis(cost), focus_axis(score)
    points = [_place(x, y, a, b) for a, b in zip(cost.values, score.values, strict=True)]
    room = Room(_LEFT, _RIGHT, _TOP, _BOTTOM)
    for mark, (px, py) in zip(marks, points, strict=True):
        room.take_point(px, py, 11.0 if mark.chosen else 8.0)
    description = (
        f"{len(marks)} candidates. {cost.title} in {cost.unit} on the horizontal axis, "
        f"{score.title} in {score.unit} on the vertical axis. The table below holds all figures."
    )
    return el(
        "svg",
        el("title", f"{cost.title} against {score.title}", id=f"{key}-title"),
        el("desc", description, id=f"{key}-desc"),
        _hatch(key),
        _grid(x, y, cost, score),
        _shades(x, y, cost, score, key),
        _front(points),
        _baseline(y, score, room),
        _limits(x, y, cost, score, room),
        _reaches(points, y, score),
        _marks(marks, points, y, score, room),
        viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}",
        class_="plot",
        role="group",
        aria_labelledby=f"{key}-title {key}-desc",
    )


def _place(x: Axis, y: Axis, cost: float, score: float) -> tuple[float, float]:
    return _LEFT + (_RIGHT - _LEFT) * x.place(cost), _BOTTOM - (_BOTTOM - _TOP) * y.place(score)


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=style)


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> Markup:
    return el("text", text, x=x, y=y, class_=style, text_anchor=anchor)


def _hatch(key: str) -> Markup:
    stroke = el("path", d="M0 8L8 0", class_="hatch")
    pattern = el("pattern", stroke, id=f"{key}-hatch", width=8, height=8, patternUnits="userSpaceOnUse")
    return el("defs", pattern)


def _grid(x: Axis, y: Axis, cost: Quantity, score: Quantity) -> Markup:
    parts: list[Markup] = []
    for tick in x.ticks:
        at, _ = _place(x, y, tick, y.low)
        decimals = max(0, -int(f"{tick:e}".split("e")[1])) if x.log else x.decimals
        parts += [_line(at, _TOP, at, _BOTTOM, "grid")]
        parts += [_text(at, _BOTTOM + 18, f"{tick:,.{decimals}f}", "tick", "middle")]
    for tick in y.ticks:
        _, at = _place(x, y, x.low, tick)
        parts += [_line(_LEFT, at, _RIGHT, at, "grid")]
        parts += [_text(_LEFT - 8, at + 4, f"{tick:.{y.decimals}f}", "tick", "end")]
    scale = ", log scale" if x.log else ""
    middle = (_TOP + _BOTTOM) / 2
    parts += [
        _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, f"{cost.title} ({cost.unit}{scale})", "axis", "middle")
    ]
    vertical = el(
        "text",
        f"{score.title} ({score.unit})",
        transform=f"translate(13 {middle:.0f}) rotate(-90)",
        class_="axis",
        text_anchor="middle",
    )
    return el("g", *parts, vertical, aria_hidden="true")


def _shades(x: Axis, y: Axis, cost: Quantity, score: Quantity, key: str) -> Markup:
    """Hatch the area where a limit is broken."""
    parts: list[Markup] = []
    if cost.limit is not None:
        at, _ = _place(x, y, cost.limit, y.low)
        parts += _shade(at, _TOP, _RIGHT - at, _BOTTOM - _TOP, key)
    if score.limit is not None:
        right = _RIGHT if cost.limit is None else _place(x, y, cost.limit, y.low)[0]
        _, at = _place(x, y, x.low, score.limit)
        parts += _shade(_LEFT, at, right - _LEFT, _BOTTOM - at, key)
    return el("g", *parts, aria_hidden="true")


def _shade(x: float, y: float, width: float, height: float, key: str) -> list[Markup]:
    if width <= 0 or height <= 0:
        return []
    hatched = el("rect", x=x, y=y, width=width, height=height, fill=f"url(#{key}-hatch)")
    return [rect(x, y, width, height, "infeasible"), hatched]


def _limits(x: Axis, y: Axis, cost: Quantity, score: Quantity, room: Room) -> Markup:
    parts: list[Markup] = []
    if cost.limit is not None:
        at, _ = _place(x, y, cost.limit, y.low)
        text = f"max {cost.limit_text}"
        if x.shows(cost.limit):
            parts += [_line(at, _TOP, at, _BOTTOM, "limit")]
        else:
            text = f"{text} →" if cost.limit > x.high else f"← {text}"
        # Above the frame, where no point can be, and anchored so that it stays inside the picture.
        share = x.place(cost.limit)
        anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
        parts += [_text(at, _TOP - 8, text, "limit-text", anchor)]
    if score.limit is not None:
        _, at = _place(x, y, x.low, score.limit)
        text = f"min {score.limit_text}"
        if y.shows(score.limit):
            parts += [_line(_LEFT, at, _RIGHT, at, "limit")]
        else:
            text = f"{text} ↓" if score.limit < y.low else f"{text} ↑"
        # Points crowd above a limit.
        spot = room.place_line_text(text, at, below=True)
        parts += [_text(spot.x, spot.y, text, "limit-text")]
    return el("g", *parts)


def _baseline(y: Axis, score: Quantity, room: Room) -> Markup | None:
    if score.baseline is None or not y.shows(score.baseline):
        return None
    at = _BOTTOM - (_BOTTOM - _TOP) * y.place(score.baseline)
    text = f"source {score.baseline:.2f} {score.unit}"
    spot = room.place_line_text(text, at, below=False)
    return el("g", _line(_LEFT, at, _RIGHT, at, "baseline"), _text(spot.x, spot.y, text, "baseline-text"))


def _front(points: Sequence[tuple[float, float]]) -> Markup | None:
    """Draw the staircase under which every point is beaten in both figures."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners.append((x, y))
    if len(corners) < 2:
        return None
    path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
    return el("path", d=path, class_="front")


def _reaches(points: Sequence[tuple[float, float]], y: Axis, score: Quantity) -> Markup:
    """Draw the confidence interval of each score that is shown."""
    lines: list[Markup] = []
    for (x, _), value, reach in zip(points, score.values, score.reaches, strict=False):
        if reach is not None and y.shows(value):
            low, high = (_BOTTOM - (_BOTTOM - _TOP) * y.place(end) for end in reach)
            lines.append(_line(x, low, x, high, "reach"))
    return el("g", *lines, aria_hidden="true")


def _marks(
    marks: Sequence[Mark], points: Sequence[tuple[float, float]], y: Axis, score: Quantity, room: Room
) -> Markup:
    drawn: list[Markup] = []
    order = sorted(range(len(marks)), key=lambda index: not marks[index].chosen)
    for index in order:
        mark, (px, py), value = marks[index], points[index], score.values[index]
        text = mark.label
        if value < y.low:
            text = f"{text} ↓ {value:.1f} {score.unit}"
        drawn.append(_mark(mark, px, py, _label(text, px, py, room)))
    # The chosen one is drawn last, on top.
    return join(*reversed(drawn))


def _mark(mark: Mark, px: float, py: float, label: Markup | None) -> Markup:
    if mark.meets:
        shape = el("circle", cx=px, cy=py, r=5.5, class_="point")
    else:
        shape = el("rect", x=px - 5, y=py - 5, width=10, height=10, class_="point")
    ring = el("circle", cx=px, cy=py, r=10, class_="ring") if mark.chosen else None
    style = " ".join(["mark", "meets" if mark.meets else "breaks", *(["chosen"] if mark.chosen else [])])
    return el("a", el("title", mark.title), ring, shape, label, href=f"#{mark.anchor}", class_=style)


def _label(text: str, px: float, py: float, room: Room) -> Markup | None:
    """Place a label where it covers nothing; without such a place, only tooltip and table have it."""
    spot = room.place_label(text, px, py)
    if spot is None:
        return None
    # A line ties a distant label to its point, at the label's nearer end.
    end = spot.x if spot.x > px else min(px, spot.x + 7 * len(text))
    leader = None if spot.near else _line(px, py, end, spot.y - 4, "leader")
    return join(leader, _text(spot.x, spot.y, text, "point-label"))
