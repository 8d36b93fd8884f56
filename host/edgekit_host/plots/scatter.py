"""The scatter plot of candidates, as inline SVG without a script or library."""

from collections.abc import Sequence
from dataclasses import dataclass

from edgekit_host.markup import Markup, el, join
from edgekit_host.plots.axes import Axis, Quantity, focus_axis, scale_axis
from edgekit_host.plots.frame import Frame, drawing, line, rect, text
from edgekit_host.plots.placement import Room

_WIDTH, _HEIGHT = 560.0, 380.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 546.0, 28.0, 330.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A candidate in a plot.

    Attributes:
        anchor: The id of its table row.
        chosen: Whether the candidate was chosen. A chosen candidate is drawn with a ring.
        meets: Whether the candidate meets all limits. If so, it is drawn as a filled circle, and otherwise as
            a hollow square.
    """

    label: str
    title: str
    anchor: str
    chosen: bool
    meets: bool


def pareto_plot(marks: Sequence[Mark], cost: Quantity, score: Quantity, *, key: str) -> Markup:
    """Return an SVG plot of cost (x, lower is better) against score (y, higher is better).

    `marks` must not be empty. `cost` and `score` contain one value for each mark. `key` is a unique prefix
    for the ids in the SVG.
    """
    frame = Frame(x=scale_axis(cost), y=focus_axis(score), left=_LEFT, right=_RIGHT, top=_TOP, bottom=_BOTTOM)
    points = [
        (frame.x_at(cost_value), frame.y_at(frame.y.clamp(score_value)))
        for cost_value, score_value in zip(cost.values, score.values, strict=True)
    ]
    room = Room(_LEFT, _RIGHT, _TOP, _BOTTOM)
    for mark, (px, py) in zip(marks, points, strict=True):
        room.take_point(px, py, 11.0 if mark.chosen else 8.0)
    layers = [
        _hatch(key),
        _grid(frame, cost, score),
        _shades(frame, cost, score, key),
        _front(points),
        _baseline(frame, score, room),
        _limits(frame, cost, score, room),
        _reaches(points, frame, score),
        _marks(marks, points, frame.y, score, room),
    ]
    return drawing(
        (_WIDTH, _HEIGHT),
        *layers,
        title=f"{cost.title} against {score.title}",
        description=(
            f"{len(marks)} candidates. {cost.title} in {cost.unit} on the horizontal axis, "
            f"{score.title} in {score.unit} on the vertical axis. The table below holds all figures."
        ),
        role="group",
    )


def _hatch(key: str) -> Markup:
    stroke = el("path", d="M0 8L8 0", class_="hatch")
    pattern = el("pattern", stroke, id=f"{key}-hatch", width=8, height=8, patternUnits="userSpaceOnUse")
    return el("defs", pattern)


def _grid(frame: Frame, cost: Quantity, score: Quantity) -> Markup:
    ticks = frame.grid(_label_ticks(frame.x), _label_ticks(frame.y), has_columns=True)
    scale = ", log scale" if frame.x.log else ""
    vertical = el(
        "text",
        f"{score.title} ({score.unit})",
        transform=f"translate(13 {(_TOP + _BOTTOM) / 2:.0f}) rotate(-90)",
        class_="axis",
        text_anchor="middle",
    )
    title = f"{cost.title} ({cost.unit}{scale})"
    horizontal = text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, title, "axis", "middle")
    return el("g", *ticks, horizontal, vertical, aria_hidden="true")


def _label_ticks(axis: Axis) -> list[tuple[float, str]]:
    decimals = [max(0, -int(f"{tick:e}".split("e")[1])) if axis.log else axis.decimals for tick in axis.ticks]
    return [(tick, f"{tick:,.{count}f}") for tick, count in zip(axis.ticks, decimals, strict=True)]


def _shades(frame: Frame, cost: Quantity, score: Quantity, key: str) -> Markup:
    """Hatch the area that violates a limit."""
    parts: list[Markup] = []
    right = _RIGHT if cost.limit is None else frame.x_at(frame.x.clamp(cost.limit))
    if cost.limit is not None:
        parts += _shade(right, _TOP, _RIGHT - right, _BOTTOM - _TOP, key)
    if score.limit is not None:
        y = frame.y_at(frame.y.clamp(score.limit))
        parts += _shade(_LEFT, y, right - _LEFT, _BOTTOM - y, key)
    return el("g", *parts, aria_hidden="true")


def _shade(x: float, y: float, width: float, height: float, key: str) -> list[Markup]:
    if width <= 0 or height <= 0:
        return []
    hatched = el("rect", x=x, y=y, width=width, height=height, fill=f"url(#{key}-hatch)")
    return [rect(x, y, width, height, "infeasible"), hatched]


def _limits(frame: Frame, cost: Quantity, score: Quantity, room: Room) -> Markup:
    parts: list[Markup] = []
    if cost.limit is not None:
        limit = frame.x.clamp(cost.limit)
        words = f"max {cost.limit_text}"
        if cost.limit == limit:
            parts.append(frame.upright(limit, "limit"))
        else:
            words = f"{words} →" if cost.limit > limit else f"← {words}"
        # Above the frame, where no point can be, and anchored so that it stays inside the picture.
        share = frame.x.share(limit)
        anchor = "start" if share < 0.1 else "end" if share > 0.9 else "middle"
        parts.append(text(frame.x_at(limit), _TOP - 8, words, "limit-text", anchor))
    if score.limit is not None:
        limit = frame.y.clamp(score.limit)
        words = f"min {score.limit_text}"
        if score.limit == limit:
            parts.append(frame.across(limit, "limit"))
        else:
            words = f"{words} ↓" if score.limit < limit else f"{words} ↑"
        # Points crowd above a limit.
        spot = room.place_line_text(words, frame.y_at(limit), below=True)
        parts.append(text(spot.x, spot.y, words, "limit-text"))
    return el("g", *parts)


def _baseline(frame: Frame, score: Quantity, room: Room) -> Markup | None:
    if score.baseline is None or not frame.y.shows(score.baseline):
        return None
    words = f"source {score.baseline:.2f} {score.unit}"
    spot = room.place_line_text(words, frame.y_at(score.baseline), below=False)
    return el("g", frame.across(score.baseline, "baseline"), text(spot.x, spot.y, words, "baseline-text"))


def _front(points: Sequence[tuple[float, float]]) -> Markup | None:
    """Draw the Pareto front as a staircase."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not corners or y < corners[-1][1]:
            corners.append((x, y))
    if len(corners) < 2:
        return None
    path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in corners[1:])
    return el("path", d=path, class_="front")


def _reaches(points: Sequence[tuple[float, float]], frame: Frame, score: Quantity) -> Markup:
    """Draw the confidence intervals of the visible scores."""
    lines: list[Markup] = []
    for (x, _), value, reach in zip(points, score.values, score.reaches, strict=False):
        if reach is not None and frame.y.shows(value):
            low, high = (frame.y_at(frame.y.clamp(end)) for end in reach)
            lines.append(line(x, low, x, high, "reach"))
    return el("g", *lines, aria_hidden="true")


def _marks(
    marks: Sequence[Mark], points: Sequence[tuple[float, float]], y: Axis, score: Quantity, room: Room
) -> Markup:
    drawn: list[Markup] = []
    order = sorted(range(len(marks)), key=lambda index: not marks[index].chosen)
    for index in order:
        mark, (px, py), value = marks[index], points[index], score.values[index]
        words = mark.label
        if value < y.low:
            words = f"{words} ↓ {value:.1f} {score.unit}"
        drawn.append(_mark(mark, px, py, _label(words, px, py, room)))
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


def _label(words: str, px: float, py: float, room: Room) -> Markup | None:
    """Draw a label at a free position. Without one, the label is only in the tooltip and the table."""
    spot = room.place_label(words, px, py)
    if spot is None:
        return None
    # A line ties a distant label to its point, at the label's nearer end.
    end = spot.x if spot.x > px else min(px, spot.x + 7 * len(words))
    leader = None if spot.near else line(px, py, end, spot.y - 4, "leader")
    return join(leader, text(spot.x, spot.y, words, "point-label"))
