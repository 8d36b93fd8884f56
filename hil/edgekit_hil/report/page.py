"""The page of an evidence file, which is a self-contained HTML file."""

import re
from collections.abc import Iterable
from typing import Final

from edgekit_hil.report.plots import draw_curve, draw_predictions
from edgekit_host.evidence import Evidence, Figure
from edgekit_host.markup import Markup, el, join, render_document, section, table

_STYLE: Final = """
header p, figcaption { color: var(--soft); margin: 4px 0; }
.failed { color: var(--red); font-weight: 600; } .passed { color: var(--green); }
.plot .edge, .plot .equal { fill: none; stroke: var(--soft); } .plot .equal { stroke-dasharray: 4 4; }
.plot .line { fill: none; stroke: var(--blue); stroke-width: 2; } .plot circle { fill: var(--blue); }
.plots > * { max-width: 560px; }
"""


def make_page(evidence: Evidence) -> str:
    device = evidence.device
    dirty = " with uncommitted changes" if evidence.is_dirty else ""
    source = f"commit {evidence.commit[:9]}{dirty}" if evidence.commit else "a release"
    engines = ", ".join(f"{name} {version}" for name, version in device.engines.items()) or "no engine"
    title = f"{evidence.bench}: {evidence.target}"
    facts = (
        join(el("b", evidence.kind), f"; {evidence.date[:16].replace('T', ' ')} UTC; {source}"),
        f"{device.model}, {device.memory_bytes / 1e9:.1f} GB; {device.os}, kernel {device.kernel}",
        f"Python {device.python}, edgekit {device.runtime}, {engines}",
        f"clock: {device.clock or 'not told by the device'}",
    )
    return render_document(
        title,
        _STYLE,
        el("header", el("h1", title), *(el("p", fact) for fact in facts)),
        section("Plots", _draw_plots(evidence), key="plots"),
        section("Figures", _list_figures(evidence), key="figures"),
        section(f"Tests: {evidence.describe_tests()}", _list_tests(evidence), key="tests"),
    )


def _draw_plots(evidence: Evidence) -> Markup:
    by_unit: dict[str, list[Figure]] = {}
    for figure in evidence.figures:
        if (figure.value or 0) > 0 and (figure.predicted or 0) > 0:
            by_unit.setdefault(figure.unit, []).append(figure)
    plots = [draw_predictions(figures) for figures in by_unit.values()]
    plots += [draw_curve(curve) for curve in evidence.curves]
    return el("div", *plots, class_="plots") if plots else el("p", "This run measured nothing to plot.")


def _list_figures(evidence: Evidence) -> Markup:
    rows = (
        (
            figure.name,
            "none" if figure.value is None else f"{figure.value:.4g} {figure.unit}",
            "" if figure.predicted is None else f"{figure.predicted:.4g} {figure.unit}",
            "" if figure.error is None else f"{figure.error:+.0%}",
            figure.method,
        )
        for figure in evidence.figures
    )
    return _table(("figure", "measured", "predicted", "error", "method"), rows, caption="Figures")


def _list_tests(evidence: Evidence) -> Markup:
    rows = (
        (test.outcome, test.proves or test.test, test.reason, f"{test.seconds:.1f}\u00a0s", test.test)
        for test in evidence.tests
    )
    return _table(("outcome", "what it proves", "reason", "time", "test"), rows, caption="Tests")


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, caption: str) -> Markup:
    body = (
        el("tr", *(el("td", _break(cell), class_=cell if cell in _OUTCOMES else None) for cell in row))
        for row in rows
    )
    return table(titles, body, caption=caption)


_OUTCOMES: Final = ("passed", "failed", "skipped")


def _break(text: str) -> Markup:
    """Return the name of a test or file with allowed line breaks after punctuation."""
    return Markup(re.sub(r"([_/:.]+)(?=[A-Za-z])", r"\1<wbr>", join(text)))
