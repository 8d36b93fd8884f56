"""HTML elements that several sections of the page use, such as badges and table cells."""

from collections.abc import Iterable

from edgekit_host.markup import Markup, el, join
from edgekit_toolkit.report.document import Label, ReportedDrop, ReportedFigure
from edgekit_toolkit.report.figures import common_origin, count_samples, exact, shorten, show

MEASURED: ReportedFigure = {"value": 0, "label": "measured", "on": "host"}
"""The origin of figures that the toolkit counts or measures, such as file sizes, parity and scores."""
COUNTED: ReportedFigure = {"value": 0, "label": "modelled", "on": "host"}
"""The origin of figures that are computed from shapes, such as multiply-accumulates."""

_MEANING = {
    "measured": "taken on the machine named",
    "calibrated": "a run on the host, times what networks took on a real device of this kind over the host;"
    " of energy: times the power that a meter read there",
    "modelled": "computed from a model of the device, with measured parts",
    "estimated": "a rough figure from the device class; measure before you rely on it",
    "not measured": "no machine has taken it yet",
}


def badge(figure: ReportedFigure, *, title: str | None = None) -> Markup:
    """Return a badge that shows how and on which machine a figure was obtained.

    If `title` is not None, it is shown first.
    """
    label, on = figure["label"], figure["on"]
    return el(
        "span",
        None if title is None else f"{title} ",
        el("b", label),
        f" · {on}",
        class_=f"badge {label}",
        title=f"{label} on {on}: {_MEANING[label]}",
    )


def legend() -> Markup:
    labels: tuple[Label, ...] = ("measured", "calibrated", "modelled", "estimated")
    entries = [
        el("p", badge({"value": None, "label": label, "on": "where"}), f" {_MEANING[label]}")
        for label in labels
    ]
    return el("div", *entries, class_="legend")


def number(text: str, *, title: str | None = None, style: str = "", extra: str | None = None) -> Markup:
    return el("td", text, extra, class_=f"n {style}".strip(), title=title)


def figure_cell(
    figure: ReportedFigure,
    unit: str,
    *,
    labelled: bool,
    broken: bool = False,
    interval: ReportedDrop | None = None,
) -> Markup:
    """Return a table cell with a figure. A figure that exceeds its limit, or may exceed it, is marked.

    Args:
        figure: The figure.
        unit: The unit of the figure, see `show`.
        labelled: Whether to show the origin of the figure, see `badged_heading`.
        broken: Whether the figure exceeds its limit.
        interval: The interval of a drop, or None.
    """
    own = badge(figure) if labelled and figure["value"] is not None else None
    unresolved = not broken and interval is not None and not interval["resolved"]
    sign, style = ("▲ ", "broken") if broken else ("? ", "unresolved") if unresolved else ("", "")
    return number(
        f"{sign}{show(figure['value'], unit)}",
        title=f"{'over the limit: ' if broken else ''}{exact(figure['value'], unit)}",
        style="missing" if figure["value"] is None and not broken else style,
        extra=join(_interval(interval), own),
    )


def _interval(drop: ReportedDrop | None) -> Markup | None:
    if drop is None:
        return None
    low, high = drop["interval"]
    part = "which chose nothing" if drop["held_back"] else "which also chose"
    title = f"{100 * drop['confidence']:g} % interval, {count_samples(drop)} {part}"
    return el("small", f" {low:.2f} to {high:.2f}", title=title)


def badged_heading(title: str, figures: Iterable[ReportedFigure]) -> tuple[Markup, bool]:
    """Return a heading, and whether each cell must show the origin of its figure.

    If all figures have the same origin, the heading shows it, and the cells do not.
    """
    shared = common_origin(figures)
    return join(title, None if shared is None else badge(shared)), shared is None


def bytes_change(before: int, after: int) -> Markup:
    """Return a table cell such as `2.1 MB → 0.6 MB`. The tooltip shows the exact numbers of bytes.

    If both sizes have the same text, the cell shows this text and the difference.
    """
    old, new = show(before, "bytes"), show(after, "bytes")
    if before == after:
        text = new
    elif old == new:
        text = f"{new} ({'-' if after < before else '+'}{show(abs(after - before), 'bytes')})"
    else:
        text = f"{old} → {new}"
    return number(text, title=f"{before:,} → {after:,} bytes")


def name_cell(name: str, limit: int = 44) -> Markup:
    """Return a row heading with a layer name of up to `limit` characters. The tooltip has the full name."""
    return el("th", shorten(name, limit), scope="row", class_="name", title=name)


def code(text: str) -> Markup:
    """Return text in a monospaced font."""
    return el("code", text)
