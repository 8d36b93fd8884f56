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
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_toolkit.targets.loader import list_targets
from public_models import CACHE
from results import make_parser
from works import HERE, Subject, list_subjects

TARGETS = [target.name for target in list_targets()]
REFUSED = 5  # exit code of a budget that no candidate keeps: docs/reference/exit-codes.md


def first_sample(subject: Subject) -> Path:
    """A .npz with the first sample of a model, without its label."""
    path = CACHE / f"{subject.name}.sample.npz"
    CACHE.mkdir(exist_ok=True)
    with np.load(subject.evaluation) as arrays:
        np.savez(path, **{key: arrays[key][:1] for key in arrays.files if key != "y"})
    return path


def edgekit(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "edgekit_cli", *arguments, "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        document: dict[str, Any] = json.loads(process.stdout)
    except ValueError:
        document = {"error": {"message": (process.stderr.strip() or "no message").splitlines()[-1]}}
    return process.returncode, document


def list_options(subject: Subject) -> list[str]:
    """Return options of `edgekit package`: models/tiny are judged by their labels."""
    if subject.work is None:
        return subject.options
    metric = f"{HERE / 'metrics.py'}:{subject.work.metric}"
    return [*subject.options, "--budget", "drop=5%", "--metric", metric]


def run_all(subject: Subject, target: str, search_s: float, folder: Path) -> dict[str, Any]:
    """What came of all commands for one model and target: `failed` names the first that went wrong."""
    start = time.perf_counter()
    options = [*list_options(subject), "--target", target, "--search-seconds", str(search_s)]
    code, report = edgekit("package", subject.model, *options, "-o", folder)
    sample = first_sample(subject)
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
    for command in (("verify", package), ("inspect", package), ("run", package, "--input", sample)):
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


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--search-seconds", type=float, default=5.0, help="of each package")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEKIT_HOME"] = home
        edgekit("keys", "generate")
        for subject in list_subjects(options.only):
            for target in options.target or TARGETS:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(run_all(subject, target, options.search_seconds, Path(folder)))
                print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(rows) + "\n")
    failed = sum(1 for row in rows if row["failed"])
    refused = sum(1 for row in rows if row["refused"])
    print(f"{len(rows)} pairs, {failed} failed, {refused} refused", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
