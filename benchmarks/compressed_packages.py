"""Bytes in which packages travel, with the score of their models on samples that nothing else saw.

    python benchmarks/compressed_packages.py [--only NAME] [--bytes N | --unlimited] [--json FILE]

Each model is packaged by the command line within a limit on transport. It calibrates and chooses by the
calibration samples alone; the evaluation samples score the package. The limit on the drop is mostly wide, so
that a package comes out also where its score misses the goal. Processor seconds are those of the whole run,
on one thread; `--unlimited` sets no limit on transport, for comparison.
"""

import json
import os
import resource
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekit_host.transport.package_encoder import coded_size
from edgekit_runtime.sessions import open_session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer
from judging import THREADS, Judge, open_model, read_arrays
from quantization import run_tool
from results import machine, make_parser, print_head, print_row, write_json
from works import HERE, Subject, list_subjects


@dataclass(frozen=True)
class Goal:
    """Bytes that travel, and the least score at them, 0..1."""

    transport_bytes: int
    score: float
    limits: str = "drop=90%"


GOALS = {
    "mnist5k_dscnn": Goal(6_600, 0.984),
    "ppocr_det": Goal(400_000, 0.97, "drop=3%"),
    "mobilenet_v1_025": Goal(365_000, 0.97, "drop=30%"),
    "efficientnet_lite0": Goal(3_800_000, 0.97, "drop=13%"),
    "resnet8": Goal(27_000, 0.754),
    "dscnn": Goal(9_100, 0.922),
}


def measure(subject: Subject, goal: Goal, options: Namespace, folder: Path) -> dict[str, Any]:
    """Package a model, and return the figures of the package."""
    limit = options.bytes or goal.transport_bytes
    metric = "top1" if subject.work is None else subject.work.metric
    limits = options.limits or goal.limits
    budget = f"size=1GB,{limits}" if options.unlimited else f"transport={limit}B,{limits}"
    command = [sys.executable, "-m", "edgekit_cli", "package", subject.model, "-t", "x86-64"]
    command += ["--backend", "ort", "-b", budget, *subject.options[:2], "-o", folder, "--json"]
    command += ["--search-seconds", options.search_seconds, "--threads", 1]
    if metric == "mask_iou":
        command += ["--metric", f"{HERE / 'metrics.py'}:mask_iou"]
    begin_s = count_processor_s()
    row, printed = run_tool("edgekit", [str(word) for word in command])
    processor_s = count_processor_s() - begin_s
    figures = {"model": subject.name, "limit": limit, "goal": goal.score, "processor_s": processor_s}
    if row.note:
        return {**figures, "label": row.note}
    path, trust = next(folder.glob("*.edgepkg")), TrustStore.from_folder(find_keys_folder())
    judge = Judge(read_arrays(subject.evaluation), metric, open_model(subject.model))
    report = json.loads(printed)
    return {
        **figures,
        "label": next(candidate["label"] for candidate in report["candidates"] if candidate["chosen"]),
        "package_bytes": path.stat().st_size,
        "transport_bytes": coded_size(path.read_bytes()),
        "source_score": judge.score(open_model(subject.model)),
        "score": judge.score(open_session(path, trust=trust, threads=THREADS)),
    }


def count_processor_s() -> float:
    """Return the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def list_figures(options: Namespace) -> Iterator[dict[str, Any]]:
    for subject in list_subjects(options.only or list(GOALS)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.out / subject.name if options.out else Path(temporary)
            yield measure(subject, GOALS[subject.name], options, folder)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", action="append", choices=list(GOALS))
    parser.add_argument("--bytes", type=int, help="another limit on transport")
    parser.add_argument("--unlimited", action="store_true", help="no limit on transport")
    parser.add_argument("--limits", help="limits beside that on transport")
    parser.add_argument("--search-seconds", default="60")
    parser.add_argument("--out", type=Path, help="folder for the packages")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["EDGEKIT_HOME"] = home
        load_signer()  # makes a key of this run only
        print(machine())
        print_head("model", "limit", "travels", "package", "float", "score", "goal", "form", "processor s")
        for figures in list_figures(options):
            rows.append(figures)
            counts = [f"{figures.get(key, 0):,}" for key in ("limit", "transport_bytes", "package_bytes")]
            scores = [f"{100 * figures.get(key, 0):.2f} %" for key in ("source_score", "score", "goal")]
            print_row(figures["model"], *counts, *scores, figures["label"], f"{figures['processor_s']:.0f}")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
