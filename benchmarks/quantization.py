"""Compares packages with what onnxruntime.quantization and Olive make of the same models and samples.

    python benchmarks/quantization.py [--only NAME] [--quick] [--json FILE] [--markdown FILE]

Each tool runs as a process of its own and is timed as a whole; then all models are judged alike (judging.py).
edgekit sees the evaluation samples when it chooses among its candidates, the others choose nothing; `--blind`
leaves edgekit only the calibration samples, too. The peers run first, because two goals are relative to the
best of them. Works whose model or data is absent are skipped with a line.
"""

import telemetry_off  # noqa: F401

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import FileType
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.latency import LatencyLimits
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer
from environments import make_environment
from judging import THREADS, Judge, Open, open_model, read_arrays
from results import NONE, machine, make_parser, write_json
from works import HERE, WORKS, Subject, Work, list_subjects

METHODS = ("MinMax", "Entropy", "Percentile")
# An environment of its own: Olive brings torch (several GB with its GPU libraries).
OLIVE = (
    "olive-ai==0.13.*",
    "pydantic<2.12",  # Olive 0.13 fails to import with newer ones
    "requests",  # Olive imports it without declaring it
    f"onnxruntime=={onnxruntime.__version__}",  # the quantizer that Olive calls: the same for both
)
PER_CHANNEL = "per channel"  # in the names of the tools that count as per-channel PTQ
# Slack of a comparison with a goal: scores are shares of a few hundred samples in floating point.
EPSILON = 1e-9
# How the tables call what was asked of ours.
_GOALS = {
    "package_bytes": "package bytes",
    "drop_points": "drop, points",
    "latency_ratio": "latency x fp32, 2 threads",
    "one_thread_ratio": "latency x fp32, 1 thread",
    "seconds": "seconds",
    "behind_points": "points behind the best per-channel PTQ",
    "vendor_share": "package x the vendor's file",
}
Command = list[str | Path]


@dataclass
class Row:
    """What one tool made of a model.

    Attributes:
        tool: which, with its settings.
        note: why there is no model, or which candidate edgekit chose; empty if there is nothing to say.
        figures: `model_bytes`, `package_bytes` (edgekit only), `score` (0..1), `drop_points` (below fp32),
            `latency_ms`, `latency_ratio` (to fp32; median of the rounds, with the quartiles `ratio_low` and
            `ratio_high`), `one_thread_ratio` (likewise, with one thread), `seconds` (to make it), and against
            others `behind_points` (below the best per-channel PTQ), `vendor_share` (package to the vendor's
            file).
    """

    tool: str
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class Result:
    """All rows of one work."""

    work: str
    metric: str
    samples: str
    rows: list[Row]
    goals: dict[str, tuple[float, float, bool]] = field(default_factory=dict)


def judge_goals(goals: Mapping[str, float], row: Row) -> dict[str, tuple[float, float, bool]]:
    """Each goal with its limit, our value and whether it is kept; without a package none is."""
    figures = row.figures if "score" in row.figures else {}
    values = {name: figures.get(name, float("inf")) for name in goals}
    return {name: (most, values[name], values[name] <= most + EPSILON) for name, most in goals.items()}


Made = tuple[Row, Open | None]


def run_tool(tool: str, command: Command) -> tuple[Row, str]:
    """Run a tool; its time, or as the note why it failed, and what it printed."""
    start = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if process.returncode:
        said = (process.stderr.strip().splitlines() or ["no message"])[-1].partition(" Report: ")[0]
        return Row(tool, f"failed ({process.returncode}): {said}", {"seconds": seconds}), process.stdout
    return Row(tool, figures={"seconds": seconds}), process.stdout


def run_peer(tool: str, command: Command, model: Path) -> Made:
    row, _ = run_tool(tool, [*command, model])
    if row.note:
        return row, None
    row.figures["model_bytes"] = model.stat().st_size
    try:
        open_model(model)
    except BackendError as error:
        row.note = f"does not load: {error}"[:300]
        return row, None
    return row, partial(open_model, model)


def run_edgekit(subject: Subject, work: Work, budget: str, folder: Path, *, blind: bool) -> Made:
    """Package with the command line; judged as a device opens it. `blind` withholds evaluation samples."""
    metric = work.metric if work.metric != "mask_iou" else f"{HERE / 'metrics.py'}:mask_iou"
    command: Command = [sys.executable, "-m", "edgekit_cli", "package", subject.model, "--target", "x86-64"]
    command += ["--backend", "ort"]  # the peers make models for onnxruntime
    command += ["--budget", budget, "--metric", metric, *subject.options[: 2 if blind else 4]]
    row, printed = run_tool(f"edgekit, {budget}", [*command, "-o", folder, "--json"])
    if row.note:
        return row, None
    report: dict[str, Any] = json.loads(printed)
    row.note = next(one["label"] for one in report["candidates"] if one["chosen"])
    path, trust = next(folder.glob("*.edgepkg")), TrustStore.from_folder(find_keys_folder())
    with read_package(path, trust) as package:
        artifact = package.manifest.backend.artifact
        row.figures["model_bytes"] = len(package.read(artifact))
        row.figures["package_bytes"] = path.stat().st_size
    return row, lambda threads: open_session(path, trust=trust, threads=threads)


def run_peers(model: Path, calibration: Path, folder: Path, *, quick: bool) -> list[Made]:
    ort: Command = [sys.executable, HERE / "peers" / "ort_static.py"]
    given: Command = [model, calibration]
    made = [run_peer("onnxruntime, defaults", [*ort, *given], folder / "ort.onnx")]
    for method in METHODS[: 1 if quick else None]:
        name = f"onnxruntime, {PER_CHANNEL}, {method}"
        made.append(run_peer(name, [*ort, "--per-channel", method, *given], folder / f"ort_{method}.onnx"))
    python = None if quick else make_environment("olive", OLIVE, "6 GB")
    if python is None:
        return made
    olive: Command = [python, HERE / "peers" / "olive_static.py"]
    made.append(run_peer("Olive, defaults", [*olive, *given], folder / "olive.onnx"))
    name = f"Olive, {PER_CHANNEL}"
    made.append(run_peer(name, [*olive, "--per-channel", *given], folder / "olive_pc.onnx"))
    return made


def best_per_channel(rows: Sequence[Row]) -> float:
    return max((row.figures.get("score", 0.0) for row in rows if PER_CHANNEL in row.tool), default=0.0)


def benchmark(subject: Subject, limits: LatencyLimits, *, quick: bool, blind: bool) -> Result:
    """Run all tools on one work and judge what they made."""
    name, model, calibration, evaluation, work = subject
    assert work is not None
    fp32 = Row("fp32 source", figures={"model_bytes": model.stat().st_size})
    judge = Judge(read_arrays(evaluation), work.metric, open_model(model))
    with tempfile.TemporaryDirectory() as folder:
        made: list[Made] = [
            (fp32, partial(open_model, model)),
            *run_peers(model, calibration, Path(folder), quick=quick),
        ]
        for row, opener in made:
            if opener is not None:
                row.figures["score"] = judge.score(opener(THREADS))
        best = best_per_channel([row for row, _ in made])
        budget = work.budget(100 * (fp32.figures["score"] - best))
        ours, opener = run_edgekit(subject, work, budget, Path(folder, "edgekit"), blind=blind)
        if opener is not None:
            ours.figures["score"] = judge.score(opener(THREADS))
            ours.figures["behind_points"] = 100 * (best - ours.figures["score"])
        made.insert(1, (ours, opener))
        time_together(judge, made, limits)
    rows = [row for row, _ in made]
    if work.vendor:
        vendor_bytes = work.vendor_bytes
        rows.append(Row(f"the vendor's {work.vendor}", figures={"model_bytes": vendor_bytes}))
        if "package_bytes" in ours.figures:
            ours.figures["vendor_share"] = ours.figures["package_bytes"] / vendor_bytes
    return Result(name, work.metric, work.samples, rows, judge_goals(work.goals, ours))


def time_together(judge: Judge, made: Sequence[Made], limits: LatencyLimits) -> None:
    """Add latencies and drops to the rows that have a model; the first is the fp32 source."""
    running = [(row, opener) for row, opener in made if opener is not None]
    rows, models = [row for row, _ in running], [opener for _, opener in running]
    latencies = judge.time(models, limits, THREADS)
    for row, latency in zip(rows, latencies, strict=True):
        row.figures["drop_points"] = 100 * (rows[0].figures["score"] - row.figures["score"])
        row.figures["latency_ms"] = 1e3 * latency.median_s
        row.figures["latency_ratio"] = latency.ratio_to(latencies[0])
        ratios = np.divide(latency.seconds, latencies[0].seconds)
        row.figures["ratio_low"], row.figures["ratio_high"] = map(float, np.quantile(ratios, (0.25, 0.75)))
    latencies = judge.time(models, limits, 1)
    for row, latency in zip(rows, latencies, strict=True):
        row.figures["one_thread_ratio"] = latency.ratio_to(latencies[0])


def markdown(results: Sequence[Result], host: Mapping[str, str | float]) -> str:
    parts = ["Taken on: " + ", ".join(f"{name} {value}" for name, value in host.items()) + "."]
    for result in results:
        lines = [f"`{result.work}`, {result.samples}; score: {result.metric}", ""]
        lines += [
            "| tool | size | score | drop | latency | x fp32 | one thread | time to make |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in result.rows]
        if result.goals:
            lines += ["", "| goal | limit | edgekit | kept |", "|---|---|---|---|"]
        for name, (most, value, kept) in result.goals.items():
            limit, figure = (f"{round(number, 2):,.10g}" for number in (most, value))
            lines.append(f"| {_GOALS[name]} | {limit} | {figure} | {'yes' if kept else '**no**'} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    figures = row.figures
    size = f"{figures['model_bytes'] / 1e3:,.1f} kB" if "model_bytes" in figures else NONE
    if "package_bytes" in figures:
        size += f" (package {figures['package_bytes'] / 1e3:,.1f} kB)"
    shown = {
        "score": "{score:.4f}",
        "drop_points": "{drop_points:+.2f}",
        "latency_ms": "{latency_ms:.3f} ms",
        "latency_ratio": "{latency_ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f})",
        "one_thread_ratio": "{one_thread_ratio:.2f}",
    }
    cells = [text.format(**figures) if name in figures else NONE for name, text in shown.items()]
    seconds = f"{figures['seconds']:.1f} s" if "seconds" in figures else NONE
    tool = f"{row.tool}: {row.note}" if row.note else row.tool
    return "| " + " | ".join([tool, size, *cells, seconds]) + " |"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", choices=[work.name for work in WORKS])
    parser.add_argument("--quick", action="store_true", help="one per-channel method, no Olive, short timing")
    parser.add_argument(
        "--blind", action="store_true", help="give edgekit no evaluation samples to choose by"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=FileType("w"), metavar="FILE", help="- for stdout")
    options = parser.parse_args()
    limit_s = 5 if options.quick else 60
    limits = LatencyLimits(min_rounds=15, max_rounds=300, time_limit_s=limit_s, precision=0.01)
    results = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEKIT_HOME"] = home
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])  # with the children
        load_signer()  # makes a key of this run only
        host = machine()
        for subject in list_subjects(options.only or [work.name for work in WORKS]):
            results.append(benchmark(subject, limits, quick=options.quick, blind=options.blind))
            print(markdown(results[-1:], host), file=sys.stderr)
    write_json(options.json, {"machine": host, "results": [asdict(result) for result in results]})
    if options.markdown:
        options.markdown.write(markdown(results, host) + "\n")


if __name__ == "__main__":
    main()
