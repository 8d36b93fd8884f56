"""Runs every command on every model at hand for every target, and prints what came of it.

    python benchmarks/combinations.py [--only MODEL] [--target T] [--search-seconds S] [--markdown FILE]

Models: those of models/tiny with their labelled samples, and the works of works.py (../shared/models and the
text detector of a public wheel), of which absent ones are skipped with a line. For each model and target it
packages, verifies, inspects, runs the package on one sample and packages again from the recipe, which must
give the same bytes. Exits with 1 if anything failed; a refusal under the budget is no failure and is shown.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np

from edgekit_toolkit.targets.loader import list_targets
from works import CACHE, HERE, WORKS, MissingError

TINY = HERE.parent / "models" / "tiny"
TARGETS = [target.name for target in list_targets()]
REFUSED = 5  # exit code of a budget that no candidate keeps: docs/reference/exit-codes.md


@dataclass(frozen=True)
class Subject:
    """A model with the options of `edgekit package` that go with it, and one sample to run it on."""

    name: str
    model: Path
    options: tuple[str | Path, ...]
    sample: Path


def tiny_subjects() -> list[Subject]:
    """The models of models/tiny, judged by their labels."""
    subjects = []
    for model in sorted(TINY.glob("*.onnx")):
        data = TINY / f"{model.stem}.eval.npz"
        options = ("--calibration", TINY / f"{model.stem}.calib.npz", "--eval", data)
        subjects.append(Subject(model.stem, model, options, first_sample(model.stem, data)))
    return subjects


def work_subjects() -> list[Subject]:
    """The works of the quantization benchmark that can be done here."""
    subjects = []
    for work in WORKS:
        try:
            model, calibration, evaluation = work.prepare()
        except MissingError as missing:
            click.echo(f"skipped {work.name}: {missing}", err=True)
            continue
        metric = f"{HERE / 'metrics.py'}:{work.metric}"
        options = (
            "--budget",
            "drop=5%",
            "--calibration",
            calibration,
            "--eval",
            evaluation,
            "--metric",
            metric,
        )
        subjects.append(Subject(work.name, model, options, first_sample(work.name, calibration)))
    return subjects


def first_sample(name: str, data: Path) -> Path:
    """A .npz with the first sample of `data`, without its label."""
    CACHE.mkdir(exist_ok=True)
    path = CACHE / f"{name}.sample.npz"
    with np.load(data) as arrays:
        np.savez(path, **{key: arrays[key][:1] for key in arrays.files if key != "y"})
    return path


def edgekit(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and document of a command with --json."""
    command = [sys.executable, "-m", "edgekit_cli", *arguments, "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        document = {"error": {"message": (process.stderr.strip() or "no message").splitlines()[-1]}}
    return process.returncode, document


def run_all(subject: Subject, target: str, search_s: float, folder: Path) -> dict[str, Any]:
    """What came of all commands for one model and target: `failed` names the first that went wrong."""
    start = time.perf_counter()
    options = [*subject.options, "--target", target, "--search-seconds", str(search_s)]
    code, report = edgekit("package", subject.model, *options, "-o", folder)
    row: dict[str, Any] = {"model": subject.name, "target": target, "failed": "", "refused": ""}
    row["seconds"] = time.perf_counter() - start
    if code == REFUSED:
        return {**row, "refused": report["error"]["message"]}
    if code:
        return {**row, "failed": f"package ({code}): {report['error']['message']}"}
    chosen = next(one for one in report["candidates"] if one["chosen"])
    package = next(folder.glob("*.edgepkg"))
    row |= {"label": f"{report['target']['backend']}: {chosen['label']}", "bytes": package.stat().st_size}
    row["drop"] = chosen["figures"]["drop"]["value"]
    for command in (("verify", package), ("inspect", package), ("run", package, "--input", subject.sample)):
        code, document = edgekit(*command)
        if code:
            return {**row, "failed": f"{command[0]} ({code}): {document['error']['message']}"}
    recipe = next(folder.glob("*.recipe.json"))
    code, document = edgekit("package", subject.model, "--recipe", recipe, "-o", folder / "again")
    if code:
        return {**row, "failed": f"package --recipe ({code}): {document['error']['message']}"}
    again = next((folder / "again").glob("*.edgepkg"))
    same = hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(package.read_bytes()).digest()
    return row if same else {**row, "failed": "package --recipe: other bytes"}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line a model and target."""
    lines = ["| model | target | chosen | kB | drop, points | s |", "|---|---|---|---|---|---|"]
    for row in rows:
        head = f"| {row['model']} | {row['target']} | "
        if row["failed"] or row["refused"]:
            said = f"**failed**: {row['failed']}" if row["failed"] else f"refused: {row['refused']}"
            lines.append(f"{head}{said} | | | {row['seconds']:.0f} |")
        else:
            cells = f"{row['label']} | {row['bytes'] / 1e3:.0f} | {row['drop']:.2f} | {row['seconds']:.0f} |"
            lines.append(head + cells)
    return "\n".join(lines)


@click.command()
@click.option("--only", multiple=True, help="Only this model.")
@click.option("--target", "targets", type=click.Choice(TARGETS), multiple=True, help="Only this target.")
@click.option("--search-seconds", default=5.0, show_default=True, help="Of each package.")
@click.option("--markdown", "markdown_file", type=click.File("w"), help="Write the table; - for stdout.")
def main(
    *, only: Sequence[str], targets: Sequence[str], search_seconds: float, markdown_file: TextIO | None
) -> None:
    """Run every command on every model for every target."""
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEKIT_HOME"] = home
        edgekit("keys", "generate")
        for subject in [*tiny_subjects(), *work_subjects()]:
            if only and subject.name not in only:
                continue
            for target in targets or TARGETS:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(run_all(subject, target, search_seconds, Path(folder)))
                click.echo(markdown(rows[-1:]).splitlines()[-1], err=True)
    if markdown_file:
        markdown_file.write(markdown(rows) + "\n")
    failed = sum(1 for row in rows if row["failed"])
    refused = sum(1 for row in rows if row["refused"])
    click.echo(f"{len(rows)} pairs, {failed} failed, {refused} refused", err=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
