"""Writes the two report files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_toolkit.report.document import finite_report
from edgekit_toolkit.report.page.html import render_page


def write_report(
    document: Mapping[str, Any], folder: Path, stem: str, pictures: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Write `STEM.report.html` and `STEM.report.json`, each of them atomically.

    Args:
        document: The report document, see `report.schema.json`.
        folder: The output folder, which must exist.
        stem: The start of the file names.
        pictures: A data URI for each sample, for the page only.

    Returns:
        The paths of the page and of the JSON file.

    Raises:
        OutputError: The folder or the files cannot be written.
    """
    report = finite_report(document)
    page, data = folder / f"{stem}.report.html", folder / f"{stem}.report.json"
    write_text_atomically(page, render_page(report, pictures))
    write_text_atomically(data, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return page, data
