"""Results of the quantization benchmark: rows, what was asked of ours, and the tables that show them."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

# Slack of a comparison with a goal: scores are shares of a few hundred samples in floating point.
EPSILON = 1e-9
NONE = "\N{EN DASH}"  # in a cell without a figure
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
    """All rows of one work.

    Attributes:
        work: its name.
        metric: of the scores.
        samples: for calibration and evaluation.
        rows: the first is the fp32 source.
        goals: what was asked of ours: figure -> (limit, value, kept).
    """

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


def machine() -> dict[str, str | float]:
    """What the figures were taken on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores_used": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **_versions("numpy", "onnx", "onnxruntime", "pillow"),
    }


def _versions(*packages: str) -> dict[str, str]:
    found = ((package, next(iter(distributions(name=package)), None)) for package in packages)
    return {package: distribution.version for package, distribution in found if distribution}


def markdown(results: Sequence[Result], host: Mapping[str, str | float]) -> str:
    """The tables of docs/benchmarks/quantization.md."""
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
