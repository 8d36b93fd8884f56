"""Writes the two report files, each whole or not at all."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgekit_runtime.errors import OutputError
from edgekit_toolkit.report.document import finite_report
from edgekit_toolkit.report.page.html import render_page


def write_report(
    document: Mapping[str, Any], folder: Path, stem: str, pictures: Sequence[str] = ()
) -> tuple[Path, Path]:
    """Write `STEM.report.html` and `STEM.report.json`; existing ones are replaced.

    Both are written completely before either replaces an older file. So an error or an interrupt leaves the
    older files.

    `document`: the report document (`report.schema.json`). `folder`: where to write; created where it is
    missing. `pictures`: a data URI for each sample, which only the page has.

    Returns:
        The paths of the page and of the JSON file.

    Raises:
        OutputError: the folder or the files cannot be written.
    """
    report = finite_report(document)
    texts = {
        folder / f"{stem}.report.html": render_page(report, pictures),
        folder / f"{stem}.report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
    }
    waiting: dict[Path, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            waiting[path] = _write_beside(path, text)
        for path in texts:
            waiting[path].replace(path)
            del waiting[path]
    except OSError as error:
        raise OutputError(
            f"the report cannot be written to {folder}: {error.strerror or error}; "
            "give a folder that you may write to and that has space"
        ) from error
    finally:
        for temporary in waiting.values():
            temporary.unlink(missing_ok=True)
    page, data = texts
    return page, data


def _write_beside(path: Path, text: str) -> Path:
    """Write a temporary file in the same folder, flushed to the disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
