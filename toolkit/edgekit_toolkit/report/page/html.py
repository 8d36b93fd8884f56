"""Renders the report as one HTML page without scripts and external resources. All values are escaped."""

from collections.abc import Sequence

from edgekit_host.markup import el, read_style, render_document, warning_section
from edgekit_toolkit.report.document import Report
from edgekit_toolkit.report.page.candidates import candidates
from edgekit_toolkit.report.page.details import compression, layers, origin, provenance, steps
from edgekit_toolkit.report.page.pieces import legend
from edgekit_toolkit.report.page.samples import samples
from edgekit_toolkit.report.page.verdict import budget, heading, verdict


def render_page(report: Report, pictures: Sequence[str] = ()) -> str:
    """Return the page as HTML. It does not need a network, scripts or colours.

    Args:
        report: The document from `finite_report`.
        pictures: A data URI for each sample, or an empty string for a sample without an image.
    """
    figures = el("p", "The same figures, for programs: the JSON file beside this page.")
    details = [steps(report), compression(report) if report["compression"] else None, layers(report)]
    return render_document(
        f"{report['name']} {report['version']} for {report['target']['name']}: package report",
        read_style(__package__, "report.css"),
        heading(report),
        warning_section(report["warnings"]),
        verdict(report),
        budget(report),
        samples(report, pictures or [""] * len(report["samples"])),
        candidates(report),
        *details,
        origin(report),
        provenance(report),
        footer=el("footer", legend(), figures),
    )
