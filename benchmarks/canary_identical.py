"""Canaries of identical and of negated versions on a busy machine: how many go back, after how many answers.

    scripts/python benchmarks/canary_identical.py
        [--runs 100] [--negated 10] [--seconds 3] [--burners 2] [--clients 4] [--share 0.5] [--isolated]

One service process serves models/tiny/digits_cnn.onnx to clients that ask without a pause, beside processes
that keep the processors busy. Each run installs a next version with `rollout = "canary"` and gates of their
defaults but for the time. First come versions with equal bytes of the model: any rollback is false. Then come
versions whose class scores are negated: every answer that a client gets of them is wrong, and counted. It
ends with exit code 1 where more than one in a hundred identical versions is rolled back, or a negated one is
not, or gave over 100 wrong answers.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

from edgekit_runtime import Client
from processes import busy_loops
from results import make_parser
from service_soak import Versions
from serving import MODEL, serving
from soak_clients import asking

CONFIG = """[models.small]
rollout = "canary"
isolated = {isolated}
canary = {{share = {share}}}
gates = {{max_duration_s = {seconds}}}
"""
SPARE_S = 60.0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--negated", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a canary")
    parser.add_argument("--burners", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--isolated", action="store_true", help="the model in a process of its own")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, busy_loops(arguments.burners):
        outcomes, wrong, load_average = measure(Path(name), arguments)
    return report(arguments, outcomes, wrong, load_average)


def negate() -> bytes:
    model = onnx.load(MODEL)
    (output,) = model.graph.output
    for node in model.graph.node:
        node.output[:] = ["before" if name == output.name else name for name in node.output]
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], [output.name]))
    data: bytes = model.SerializeToString()
    return data


def measure(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], list[int], float]:
    """Return what became of each canary, the wrong answers of each negated one, and the load."""
    versions = Versions(folder)
    versions.make(1 + arguments.runs)
    versions.make(arguments.negated, negate())
    versions.publish()
    config = CONFIG.format(
        share=arguments.share, seconds=arguments.seconds, isolated=str(arguments.isolated).lower()
    )
    names = ("start", *(f"run {number}" for number in range(arguments.runs + arguments.negated)))
    outcomes = []
    with (
        serving(folder, versions.folder, config=config) as service,
        Client(service.path) as control,
        asking(service.path, arguments.clients, versions.question, names) as load,
    ):
        for name in names[1:]:
            load.begin(name)
            outcomes.append(try_next(control, versions))
            print(f"{name}: {outcomes[-1]}", file=sys.stderr, flush=True)
        load_average = os.getloadavg()[0]
    counts = [load.describe(name)["failed"] for name in names[1:]]
    if sum(counts[: arguments.runs]):
        print(f"failed requests beside identical versions: {load.errors}", file=sys.stderr)
    return outcomes, counts[arguments.runs :], load_average


def try_next(control: Client, versions: Versions) -> str:
    """Let the service try the next version; return `promoted`, or why it was rolled back."""
    version = versions.publish()
    control.load("small")
    end_s = time.monotonic() + SPARE_S
    while time.monotonic() < end_s:
        lines: list[dict[str, Any]] = [line for line in control.index() if line["version"] == version]
        if lines and lines[0]["state"] == "UNAVAILABLE":
            return str(lines[0]["reason"])
        if control.metadata("small")["versions"] == [version]:
            return "promoted"
        time.sleep(0.1)
    raise SystemExit(f"no verdict on {version}: {control.index()}")


def report(arguments: argparse.Namespace, outcomes: list[str], wrong: list[int], load_average: float) -> int:
    alike, negated = outcomes[: arguments.runs], outcomes[arguments.runs :]
    print(f"load average {load_average:.1f}, {len(os.sched_getaffinity(0))} cores, {arguments}")
    false = len(alike) - alike.count("promoted")
    print(f"identical: {false} of {len(alike)} rolled back")
    for reason, count in Counter(each for each in alike if each != "promoted").most_common():
        print(f"  {count} {reason}")
    missed = negated.count("promoted")
    print(f"negated: {len(negated) - missed} of {len(negated)} rolled back, wrong answers {sorted(wrong)}")
    return int(false > 0.01 * len(alike) or missed > 0 or max(wrong, default=0) > 100)


if __name__ == "__main__":
    sys.exit(main())
