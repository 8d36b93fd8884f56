"""The package report: an HTML page, its JSON document and a summary for the terminal.

Renders what the pipeline found and decides nothing itself.
"""

from edgekit_toolkit.report.document import SCHEMA_ID, finite_report
from edgekit_toolkit.report.files import write_report
from edgekit_toolkit.report.terminal import print_summary

__all__ = ["SCHEMA_ID", "finite_report", "print_summary", "write_report"]
