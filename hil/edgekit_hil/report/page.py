"""The page of one file of evidence: one HTML file that loads nothing."""

import re
from collections.abc import Iterable
from typing import Final

from edgekit_hil.report.plots import draw_curve, draw_predictions
from edgekit_host.evidence import Evidence, Figure
from edgekit_host.markup import Markup, el, join, render_document

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1b2230; --soft: #545e70; --line: #d9dde3; --page: #fff;
  --blue: #0b62a8; --red: #b23a00; --green: #00714f; }
@media (prefers-color-scheme: dark) { :root { --text: #e8ebf1; --soft: #a6b0c0; --line: #343c4a;
  --page: #12151b; --blue: #6db9f2; --red: #ff9a66; --green: #4fcf9f; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 1040px; margin: 0 auto; padding: 16px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 28px 0 8px; }
p { margin: 4px 0; color: var(--soft); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: 4px 8px 4px 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
.scroll { overflow-x: auto; }
.number { text-align: right; white-space: nowrap; } .failed { color: var(--red); font-weight: 600; }
.passed { color: var(--green); } .plots { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); }
figure { margin: 0; } figcaption { color: var(--soft); } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--soft); } .middle { text-anchor: middle; } .end { text-anchor: end; }
.label { font-weight: 600; } .axis, .grid, .equal { fill: none; stroke: var(--line); }
.axis { stroke: var(--soft); } .equal { stroke-dasharray: 4 4; stroke: var(--soft); }
.line { fill: none; stroke: var(--blue); stroke-width: 2; } circle { fill: var(--blue); }
"""


def make_page(evidence: Evidence) -> str:
    """Return the page."""
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
        el("h1", title),
        *(el("p", fact) for fact in facts),
        el("h2", "Plots"),
        _draw_plots(evidence),
        el("h2", "Figures"),
        _list_figures(evidence),
        el("h2", f"Tests: {evidence.describe_tests()}"),
        _list_tests(evidence),
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
    return _table(("figure", "measured", "predicted", "error", "method"), rows)


def _list_tests(evidence: Evidence) -> Markup:
    rows = (
        (test.outcome, test.proves or test.test, test.reason, f"{test.seconds:.1f}\u00a0s", test.test)
        for test in evidence.tests
    )
    return _table(("outcome", "what it proves", "reason", "time", "test"), rows)


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Markup:
    head = el("tr", *(el("th", title, scope="col") for title in titles))
    body = (
        el("tr", *(el("td", _break(cell), class_=cell if cell in _OUTCOMES else None) for cell in row))
        for row in rows
    )
    return el("div", el("table", head, *body), class_="scroll")


_OUTCOMES: Final = ("passed", "failed", "skipped")


def _break(text: str) -> Markup:
    """Return text that may be broken behind the marks in names of tests and files, and in no word."""
    return Markup(re.sub(r"([_/:.]+)(?=[A-Za-z])", r"\1<wbr>", join(text)))
