"""The report as one HTML page: no script, no request, every foreign string escaped."""

import base64
import hashlib
from importlib import resources

from edgekit_host.markup import Markup, el, join
from edgekit_toolkit.report.document import Report
from edgekit_toolkit.report.page.candidates import candidates
from edgekit_toolkit.report.page.details import layers, origin, provenance, steps
from edgekit_toolkit.report.page.pieces import legend
from edgekit_toolkit.report.page.verdict import budget, heading, verdict, warnings


def render_page(report: Report) -> str:
    """Return the page; it shows the same with and without network, script and colour.

    Args:
        report: the document, without NaN (`finite_report`).
    """
    style = Markup(resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8"))
    title = f"{report['name']} {report['version']} for {report['target']['name']}: package report"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        # Before anything to which it could apply.
        el("meta", http_equiv="Content-Security-Policy", content=_policy(style)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        # An empty icon of our own keeps browsers from asking the server for one.
        el("link", rel="icon", href="data:,"),
        el("title", title),
        el("style", style),
    )
    body = el(
        "body",
        el(
            "main",
            heading(report),
            warnings(report),
            verdict(report),
            budget(report),
            candidates(report),
            steps(report),
            layers(report),
            origin(report),
            provenance(report),
        ),
        el("footer", legend(), el("p", "The same figures, for programs: the JSON file beside this page.")),
    )
    return join(Markup("<!doctype html>\n"), el("html", head, body, lang="en"), "\n")


def _policy(style: str) -> str:
    """Allow exactly this style sheet and the empty icon: even an escaping bug could load or run nothing."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
