"""A model whose self-test never ends beside others: their clients' p99, and how long changes of them take.

    scripts/python benchmarks/endless_load.py [--rounds 10] [--seconds 4]

One service process serves models/tiny/digits_cnn.onnx to one client that asks without a pause. In turn: some
seconds without a load, and as many in which a signed package with an endless ONNX Loop is loading
(`load_timeout_s`), with a swap of the first model in each. The goal: p99 at most twice that of before (median
of all rounds), no failed request, every swap done, and every endless load refused. Figures are of this
machine and this run: compare ratios. It ends with exit code 1 where the goal is missed.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.service.wiring_parts import make_endless_model

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError
from results import make_parser
from service_soak import CONFIG, Versions, swap
from serving import serving
from soak_clients import asking

SPARE_S = 3.0  # for the rest of a load


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), arguments.rounds, arguments.seconds)
    return report(found)


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    versions = Versions(folder)
    versions.make(2 * rounds + 1)
    versions.publish()
    feeds, outputs = {"x": np.zeros((1, 4), np.float32)}, {"y": np.zeros((1, 2), np.float32)}
    versions.write("endless", make_endless_model(), feeds, expected=outputs)
    config = f"{CONFIG}[models.endless]\nload_timeout_s = {seconds}\n"
    names = ("start", *(f"{what} {number}" for number in range(rounds) for what in ("before", "during")))
    swaps: dict[str, list[float]] = {"before": [], "during": []}
    refused: list[str] = []

    def load_endless(path: str) -> None:
        with Client(path) as client:
            try:
                client.load("endless")
            except EdgekitError as error:
                refused.append(str(error))

    with (
        serving(folder, versions.folder, config=config) as service,
        Client(service.path) as control,
        asking(service.path, 1, versions.question, names) as load,
    ):
        load.begin("start", SPARE_S)
        for number in range(rounds):
            for what in ("before", "during"):
                loading = threading.Thread(target=load_endless, args=(service.path,))
                if what == "during":
                    loading.start()
                    time.sleep(0.1 * seconds)
                load.begin(f"{what} {number}")
                begin_s = time.monotonic()
                swaps[what].append(swap(control, versions))
                time.sleep(max(0.0, 0.8 * seconds - (time.monotonic() - begin_s)))
                load.begin("start")
                if what == "during":
                    loading.join()
    described = {name: load.describe(name) for name in (*names, "before", "during")}
    ratios = [
        described[f"during {number}"]["p99_us"] / described[f"before {number}"]["p99_us"]
        for number in range(rounds)
    ]
    return {
        "phases": {what: described[what] for what in ("before", "during")},
        "ratios": ratios,
        "swaps": swaps,
        "refused": refused,
        "errors": load.errors,
    }


def report(found: dict[str, Any]) -> int:
    for name, phase in found["phases"].items():
        swap_ms = 1e3 * np.median(found["swaps"][name])
        print(
            f"{name:7} {phase['requests']:8} requests, {phase['failed']} failed, p50 {phase['p50_us']} us,"
            f" p99 {phase['p99_us']} us, swap of another model {swap_ms:.0f} ms (median)"
        )
    ratio, rounds = float(np.median(found["ratios"])), len(found["ratios"])
    print(f"p99 during over before: median {ratio:.2f}, all {[round(each, 2) for each in found['ratios']]}")
    print(f"{len(found['refused'])} of {rounds} endless loads refused; the last: {found['refused'][-1:]}")
    failed = sum(phase["failed"] for phase in found["phases"].values())
    return int(ratio > 2 or failed > 0 or bool(found["errors"]) or len(found["refused"]) != rounds)


if __name__ == "__main__":
    sys.exit(main())
