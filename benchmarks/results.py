"""What benchmarks share: parser of options, tables, JSON files, the machine that figures were taken on."""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

NONE = "\N{EN DASH}"  # in a cell without a figure


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the head of a benchmark as it stands."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def print_head(*names: str) -> None:
    """Print the head of a table in Markdown, whose rows come one by one; a name may be several, with bars."""
    head = " | ".join(names)
    print(f"| {head} |\n{'|---' * (head.count(' | ') + 1)}|", flush=True)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a whole table in Markdown, its columns below each other."""
    cells = [[f"{one:.3g}" if isinstance(one, float) else str(one) for one in row] for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures where the option --json asks for it."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


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
