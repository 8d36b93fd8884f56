"""Draws the pictures of docs/explanation/compression.md from the tables of docs/benchmarks/quantization.md.

    scripts/python -m benchmarks.compression_pictures [--folder docs/explanation]

A figure that changes in the tables changes in the pictures with the next run; no figure is in here.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import make_parser

from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis, linear_ticks, log_ticks
from edgekit_host.plots.frame import Frame, rect, text
from edgekit_host.plots.placement import Room

DOCS = Path(__file__).resolve().parents[1] / "docs"
FIGURES = DOCS / "benchmarks" / "quantization.md"
FOLDER = DOCS / "explanation"
OURS, OTHER, BEFORE = "ours", "other", "before"
OURS_NAME = "edgekit"
NAMES = {
    "resnet8": "ResNet8",
    "dscnn": "DS-CNN",
    "mnist5k_dscnn": "MNIST",
    "mobilenet_v1_025": "MobileNet v1",
    "vww": "VWW",
    "ppocr_det": "PP-OCRv4",
    "efficientnet_lite0": "EfficientNet-Lite0",
}
_STYLE = """
.bg{fill:#fff}text{fill:#1b2330;font-size:13px}.h{font-size:15px;font-weight:600}
.grid{stroke:#e4e8ec}.tick,.axis,text.other,text.before{fill:#57606a}.tick{font-size:12px}
text.ours{fill:#0a7d55;font-weight:600}
.ours{stroke:#0a7d55;fill:#0a7d55}.other{stroke:#8b949e;fill:#8b949e}.before{stroke:none;fill:#c4cad2}
text,text.ours,text.other,text.before{stroke:none}.baseline{stroke:#8b949e;stroke-dasharray:4 4}
polyline.ours,polyline.other{fill:none;stroke-width:2}
@media(prefers-color-scheme:dark){.bg{fill:#0d1117}text{fill:#e6edf3}.grid{stroke:#262c34}
.tick,.axis,text.other,text.before{fill:#9aa4af}.ours{stroke:#3fc28a;fill:#3fc28a}text.ours{fill:#3fc28a}
.other{stroke:#7d8690;fill:#7d8690}.before{fill:#48515c}.baseline{stroke:#7d8690}}
"""
_HEIGHT = 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 16.0, 60.0, 246.0
_PANEL, _WIDE_PANEL = 360.0, 560.0
_MOST_IN_A_ROW = 3  # panels: a page shows more of them too small
_MAX_POINTS = 10.0  # of the widest bar, and of the scores of other tools below the best


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together.

    Attributes:
        style: `ours` or `other`.
        label: beside the point `label_at`.
        joined: whether a line goes through the points.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    label_at: int = -1
    joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart of a picture; `baseline` is a value of y with its label."""

    title: str
    x_title: str
    y_title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    baseline: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars of a model, one below the other, and what they show.

    Attributes:
        shares: length of each as a share of the widest, and its style.
    """

    name: str
    shares: Sequence[tuple[float, str]]
    label: str
    label_style: str


def read_table(head: str) -> list[list[str]]:
    """Return the cells of the rows below the first table head that begins so; an empty first cell is filled.

    Raises:
        LookupError: there is no such table.
    """
    lines = FIGURES.read_text().splitlines()
    start = next((number for number, text in enumerate(lines) if text.startswith(head)), None)
    if start is None:
        raise LookupError(f"{FIGURES} has no table that begins {head!r}")
    rows = []
    for text_line in lines[start + 2 :]:
        if not text_line.startswith("|"):
            break
        cells = [cell.strip().replace("`", "") for cell in text_line[1:-1].split("|")]
        rows.append([cells[0] or rows[-1][0], *cells[1:]])
    return rows


def read_numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*", cell)]


def make_axis(low: float, high: float, *, log: bool = False) -> Axis:
    ticks = log_ticks(low, high, dense_up_to=200) if log else linear_ticks(low, high)
    return Axis(low, high, tuple(ticks), 0, log=log)


def draw_panel(panel: Panel, left: float, width: float) -> list[Markup]:
    right = left + width - _RIGHT
    frame = Frame(x=panel.x, y=panel.y, left=left + _LEFT, right=right, top=_TOP, bottom=_BOTTOM)
    ticks = [[(tick, f"{tick:g}") for tick in axis.ticks] for axis in (panel.x, panel.y)]
    parts = [text(left + 14, 24, panel.title, "h"), text(left + 14, 46, panel.y_title, "axis")]
    parts += frame.grid(*ticks)
    parts.append(text((frame.left + frame.right) / 2, _BOTTOM + 40, panel.x_title, "axis", "middle"))
    room = Room(frame.left, frame.right, frame.top, frame.bottom)
    if panel.baseline is not None:
        value, label = panel.baseline
        y = frame.y_at(value)
        parts += [frame.across(value, "baseline"), text(frame.right, y - 5, label, OTHER, "end")]
        room.take_point(frame.right - 24, y - 8, 24.0)
    for series in panel.series:
        for x, y in series.points:
            room.take_point(frame.x_at(x), frame.y_at(frame.y.clamp(y)), 5.0)
    for series in panel.series:
        parts += draw_series(frame, series, room)
    return parts


def draw_series(frame: Frame, series: Series, room: Room) -> list[Markup]:
    """Draw points and line; points below the axis are on its lower edge with their value."""
    points = [(x, frame.y.clamp(y)) for x, y in series.points]
    parts = [frame.trace(points, series.style)] if series.joined else []
    places = [(frame.x_at(x), frame.y_at(y)) for x, y in points]
    parts += [el("circle", cx=x, cy=y, r=3.5, class_=series.style) for x, y in places]
    value = series.points[series.label_at][1]
    label = series.label if frame.y.shows(value) else f"{series.label} ↓ {value:g}"
    spot = room.place_label(label, *places[series.label_at])
    if spot is not None:
        parts.append(text(spot.x, spot.y, label, series.style))
    return parts


def draw(description: str, width: float, height: float, parts: Iterable[Markup]) -> Markup:
    return el(
        "svg",
        el("style", Markup(_STYLE)),
        rect(0, 0, width, height, "bg"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        font_family="system-ui, sans-serif",
        role="img",
        aria_label=description,
    )


def draw_panels(description: str, panels: Sequence[Panel]) -> Markup:
    width = _PANEL if len(panels) > 1 else _WIDE_PANEL
    rows = -(-len(panels) // _MOST_IN_A_ROW)
    columns = -(-len(panels) // rows)
    parts = []
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        parts.append(
            el("g", *draw_panel(panel, column * width, width), transform=f"translate(0 {row * _HEIGHT:g})")
        )
    return draw(description, columns * width, rows * _HEIGHT, parts)


def draw_rounding() -> Markup:
    """Draw score over bits, nearest against second order."""
    bits = (8, 6, 4, 3)
    panels = []
    for name, floats, int8, *few, _seconds in read_table("| model | float32 | int8 | 6 bits"):
        model, metric = name.split(", ")
        if model not in NAMES or not all(few):
            continue
        pairs = [read_numbers(int8) * 2, *map(read_numbers, few)]
        nearest, rounded = zip(*pairs, strict=True)
        (source,) = read_numbers(floats)
        low = 10 * (min(nearest) // 10)
        panels.append(
            Panel(
                title=NAMES[model],
                x_title="bits of a weight",
                y_title=f"{metric}, %",
                x=Axis(2.7, 8.3, bits),
                y=make_axis(low, source + (source - low) / 8),
                series=[
                    Series(label="nearest", style=OTHER, points=list(zip(bits, nearest, strict=True))),
                    Series(label="second order", style=OURS, points=list(zip(bits, rounded, strict=True))),
                ],
                baseline=(source, "float32"),
            )
        )
    return draw_panels("Score over bits of the weights, nearest and second-order rounding", panels)


def draw_coding() -> Markup:
    """Draw score over the bytes of a model, ours as they travel and other tools' after xz."""
    rows = read_table("| model | tool | bits: score, kB")
    panels = []
    for model, title in NAMES.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for name, tool, runs in rows:
            if name == model:
                pairs = re.findall(r"([\d.]+), ([\d.]+)(?:;|$)", runs.replace("*", ""))
                points[tool] = [(float(size), float(score)) for score, size in pairs]
        if not points:
            continue
        sizes, scores = zip(*(point for values in points.values() for point in values), strict=True)
        lowest = max(min(scores), max(scores) - _MAX_POINTS)
        panels.append(
            Panel(
                title=title,
                x_title="kB: ours as packages travel, others' after xz",
                y_title="score, %",
                x=make_axis(0.85 * min(sizes), 1.04 * max(sizes)),
                y=make_axis(lowest - 0.5, max(scores) + 0.7),
                series=[
                    Series(
                        label=tool,
                        style=OURS if tool == OURS_NAME else OTHER,
                        points=sorted(values),
                        label_at=0,
                        joined=tool == OURS_NAME,
                    )
                    for tool, values in points.items()
                ],
            )
        )
    return draw_panels("Score over bytes, edgekit and other tools", panels)


def draw_bars(title: str, rows: Sequence[Bars]) -> Markup:
    """Draw a row of bars for each model, as long as its figures; longer ones than the widest end there."""
    begin, length, width = 190.0, 210.0, 560.0
    parts = [text(14, 24, title, "h")]
    for number, row in enumerate(rows):
        top = 44.0 + 34 * number
        parts.append(text(begin - 8, top + 16, row.name, "axis", "end"))
        for place, (share, style) in enumerate(row.shares):
            parts.append(rect(begin, top + 11 * place, max(length * min(share, 1.0), 1.5), 9, style))
        parts.append(text(begin + length + 8, top + 16, row.label, row.label_style))
    return draw(title, width, 56.0 + 34 * len(rows), parts)


def list_pruned() -> Iterator[tuple[str, float, list[float], list[float]]]:
    """Yield name with multiply-adds saved, score of the source, and scores of pruned and distilled models."""
    for model, macs, pruned, distilled, *_ in read_table("| model, float32 | multiply-adds | pruned"):
        name, source, *_samples = model.split(", ")
        title = f"{NAMES[name]}, -{100 - 100 * read_numbers(macs)[0]:.0f} %"
        yield title, read_numbers(source)[0], read_numbers(pruned), read_numbers(distilled)


def draw_pruning() -> Markup:
    """Draw the points that pruned models lose."""
    rows = []
    for name, source, pruned, _distilled in list_pruned():
        lost = round(source - pruned[-1], 2)
        style = OURS if lost <= 1 else OTHER
        share = lost / _MAX_POINTS
        rows.append(Bars(name=name, shares=[(share, OURS)], label=f"{lost:g} points", label_style=style))
    return draw_bars("Points lost by pruned models in int8, by multiply-adds saved", rows)


def draw_distillation() -> Markup:
    """Draw the points that pruned models lose, before and after distillation."""
    rows = []
    for name, source, pruned, distilled in list_pruned():
        costs = [round(source - scores[0], 2) for scores in (pruned, distilled) if scores]
        shares = [(cost / _MAX_POINTS, style) for cost, style in zip(costs, (BEFORE, OURS), strict=False)]
        label = " → ".join(f"{cost:g}" for cost in costs)
        is_trained = len(costs) > 1
        rows.append(
            Bars(
                name=name,
                shares=shares,
                label=label if is_trained else f"{label}, not trained",
                label_style=OURS if is_trained else OTHER,
            )
        )
    return draw_bars("Points lost by pruned models in float: pruned, distilled", rows)


def draw_dead_channels() -> Markup:
    """Draw the size of float models with and without dead channels."""
    rows = []
    for model, *cells in read_table("| model | kB with dead channels"):
        before, after = (read_numbers(cell)[0] for cell in cells[:2])
        rows.append(
            Bars(
                name=NAMES.get(model, model),
                shares=[(1.0, BEFORE), (after / before, OURS)],
                label=f"{before:,.0f} → {after:,.0f} kB",
                label_style=OURS if after < before else OTHER,
            )
        )
    return draw_bars("Float models with dead channels and without, outputs equal", rows)


PICTURES: Mapping[str, Callable[[], Markup]] = {
    "compression-rounding": draw_rounding,
    "compression-coding": draw_coding,
    "compression-pruning": draw_pruning,
    "compression-distillation": draw_distillation,
    "compression-dead-channels": draw_dead_channels,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    for name, draw_picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(f"{draw_picture()}\n")


if __name__ == "__main__":
    main()
