"""The service at full load while versions are swapped: failed requests, memory over time, p99 against steady.

    scripts/python benchmarks/service_soak.py
        [--minutes 10] [--swaps 1000] [--clients 16] [--swap-every 3] [--steady 2] [--json FILE]

One service process serves models/tiny/digits_cnn.onnx to clients that ask without a pause, in as many
processes as there are cores. Each swap moves a new version into the folder and asks the service to load it
(`swap = "availability"`); the packages are made before, as making them takes a core that clients and service
need.

1. fresh: own memory of the service after its first load and some traffic.
2. in turn, until all `--swaps` are done: `--steady` seconds without swaps, then 20 swaps back to back.
   Failed requests, p99 of both, own memory after each twenty.
3. soak: `--minutes` with a swap every `--swap-every` seconds; own memory every second, with its slope.

A request fails if it is answered by an error, with wrong outputs, or not at all. The p99 of each twenty is
divided by that of the steady seconds on both sides, as the machine changes from minute to minute; the goal
is judged by the median of these. Under five minutes of soak its slope says nothing and is not judged. Figures
are of this machine and this run: compare ratios. It ends with exit code 1 where a goal is missed.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime import Client
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.packaging.signing_keys import load_signer
from processes import read_memory
from results import make_parser, write_json
from serving import INPUT, MODEL, SHAPE, serving, write_signed
from soak_clients import Load, Question, asking

Feeds = dict[str, NDArray[Any]]
BLOCK_SWAPS = 20
MEMORY_SWAPS = 100
LEAST_MINUTES = 5.0  # under it, one allocation decides the slope
WARM_SHARE = 0.2  # of the soak's time, which its slope leaves out
CONFIG = '[models.small]\nswap = "availability"\n'


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--swap-every", type=float, default=3.0, help="seconds, in the soak")
    parser.add_argument("--steady", type=float, default=2.0, help="seconds without swaps, each time")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), arguments)
    report(found)
    write_json(arguments.json, found)
    return 0 if all(found["goals"].values()) else 1


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    versions = Versions(folder)
    soak_swaps = math.ceil(60 * arguments.minutes / arguments.swap_every)
    versions.make(1 + arguments.swaps + soak_swaps)
    versions.publish()
    blocks = -(-arguments.swaps // BLOCK_SWAPS)
    pairs = [f"{what} {block}" for block in range(blocks) for what in ("steady", "swaps")]
    names = ("fresh", *pairs, f"steady {blocks}", "soak")
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    with (
        serving(folder, versions.folder, config=CONFIG) as service,
        Client(service.path) as control,
        asking(service.path, arguments.clients, versions.question, names) as load,
    ):
        load.begin("fresh", 2.0)
        found["fresh_own_kib"] = own_kib(service.pid)
        found["swaps"] = swap_often(control, service.pid, versions, load, arguments)
        found["soak"] = soak(control, service.pid, versions, load, arguments)
    found["phases"] = {what: load.describe(what) for what in ("fresh", "steady", "swaps", "soak")}
    found["errors"] = load.errors
    return judge(found, load, arguments)


def judge(found: dict[str, Any], load: Load, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `found` with what its figures mean for the goals."""
    ratios = []
    for block in range(len(found["swaps"]["own_kib"])):
        around = [load.describe(f"steady {index}")["p99_us"] for index in (block, block + 1)]
        ratios.append(2 * load.describe(f"swaps {block}")["p99_us"] / sum(around))
    found["swap_p99_over_steady"] = {
        "median": round(float(np.median(ratios)), 3),
        "of_each_block": [round(ratio, 2) for ratio in ratios],
    }
    found["soak_p99_over_steady"] = found["phases"]["soak"]["p99_us"] / found["phases"]["steady"]["p99_us"]
    memory = [size / found["fresh_own_kib"] for size in found["swaps"]["own_kib"]]
    early = memory[min(MEMORY_SWAPS // BLOCK_SWAPS, len(memory)) - 1]
    found["memory_over_fresh"] = {"after_100": round(early, 4), "after_all": round(memory[-1], 4)}
    failed = sum(phase["failed"] for phase in found["phases"].values())
    found["goals"] = {
        "0 failed requests": failed == 0 and not found["errors"],
        "p99 of swaps at most 1.5 x steady": found["swap_p99_over_steady"]["median"] <= 1.5,
        f"memory after {MEMORY_SWAPS} swaps within 10 % of fresh": early <= 1.1,
        f"memory after {arguments.swaps} swaps within 10 % of fresh": memory[-1] <= 1.1,
    }
    if arguments.minutes >= LEAST_MINUTES:
        found["goals"]["soak grows by less than 10 % an hour"] = found["soak"]["slope_share_per_hour"] <= 0.1
    return found


# The service


class Versions:
    """Packages of one model under growing versions, of which the service finds the last two.

    Attributes:
        folder: where the service looks.
        sign: makes the envelopes of all packages.
        question: what clients ask, and the right answer.
    """

    def __init__(self, folder: Path) -> None:
        self.sign = load_signer(folder=folder / "keys")
        self.folder, self._made = folder / "packages", folder / "made"
        self.folder.mkdir()
        self._made.mkdir()
        self._count = self._last = 0
        values = np.random.default_rng(0).random(SHAPE, np.float32)
        (expected,) = OrtSession(MODEL, OrtOptions(threads=1)).run({INPUT: values}).values()
        self.question: Question = INPUT, values, expected

    def publish(self) -> str:
        """Put the next version where the service looks, drop the one before the last, and return it."""
        self._count += 1
        name = f"small-{self._count}.edgepkg"
        (self._made / name).rename(self.folder / name)
        (self.folder / f"small-{self._count - 2}.edgepkg").unlink(missing_ok=True)
        return f"{self._count}.0.0"

    def make(self, count: int, model: bytes = MODEL.read_bytes()) -> None:
        for _ in range(count):
            self._last += 1
            feeds, version = {INPUT: self.question[1]}, f"{self._last}.0.0"
            path = write_signed(self._made, "small", model, feeds, self.sign, version=version)
            path.rename(self._made / f"small-{self._last}.edgepkg")

    def write(
        self, name: str, model: bytes, feeds: Feeds | None = None, expected: Feeds | None = None
    ) -> None:
        """Put a package of another model where the service looks; by default one with the same input."""
        write_signed(
            self.folder, name, model, feeds or {INPUT: self.question[1]}, self.sign, expected=expected
        )


def own_kib(process: int) -> int:
    """Return the memory of a process in KiB that is its own, and so does not hang on what else runs here."""
    return read_memory(process)["Anonymous"] // 1024


# The phases


def swap(control: Client, versions: Versions) -> float:
    """Swap to a new version, and return how long the service took, in seconds."""
    version = versions.publish()
    begin_s = time.perf_counter()
    control.load("small")
    seconds = time.perf_counter() - begin_s
    served = control.metadata("small")["versions"]
    if served != [version]:
        raise SystemExit(f"the service serves {served} after a swap to {version}")
    return seconds


def swap_often(
    control: Client, process: int, versions: Versions, load: Load, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Swap back to back with steady seconds between the blocks; return the times and the memory."""
    load.begin("steady 0", arguments.steady)
    seconds: list[float] = []
    sizes: list[int] = []
    while len(seconds) < arguments.swaps:
        block = len(sizes)
        load.begin(f"swaps {block}")
        count = min(BLOCK_SWAPS, arguments.swaps - len(seconds))
        seconds += [swap(control, versions) for _ in range(count)]
        load.begin(f"steady {block + 1}", arguments.steady)
        sizes.append(own_kib(process))
        print(f"{len(seconds)} swaps, own memory {sizes[-1] / 1024:.1f} MiB", file=sys.stderr, flush=True)
    return {
        "count": arguments.swaps,
        "swap_ms_median": round(1e3 * float(np.median(seconds)), 2),
        "swap_ms_max": round(1e3 * max(seconds), 2),
        "own_kib": sizes,
    }


def soak(
    control: Client, process: int, versions: Versions, load: Load, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Swap now and then, look at the memory every second, and return its course."""
    load.begin("soak")
    begin_s = time.monotonic()
    samples: list[tuple[float, int]] = []
    next_swap_s, swaps = arguments.swap_every, 0
    while (now_s := time.monotonic() - begin_s) < 60 * arguments.minutes:
        if now_s >= next_swap_s:
            swap(control, versions)
            swaps += 1
            next_swap_s += arguments.swap_every
        samples.append((now_s, own_kib(process)))
        time.sleep(1.0)
    times, sizes = np.array(samples).T if samples else (np.zeros(1), np.array([own_kib(process)]))
    is_warm = times >= WARM_SHARE * times[-1]
    enough = int(is_warm.sum()) > 2
    slope = float(np.polyfit(times[is_warm], sizes[is_warm], 1)[0]) if enough else 0.0  # KiB a second
    step = max(1, len(samples) // 60)
    return {
        "swaps": swaps,
        "own_mib_median": round(float(np.median(sizes)) / 1024, 2),
        "own_mib_range": [round(float(sizes.min()) / 1024, 2), round(float(sizes.max()) / 1024, 2)],
        "slope_kib_per_minute": round(60 * slope, 2),
        "slope_share_per_hour": round(3600 * slope / float(np.median(sizes)), 4),
        "own_mib_over_time": [[round(t), round(size / 1024, 2)] for t, size in samples[::step]],
    }


def report(found: dict[str, Any]) -> None:
    print(f"{'phase':13} {'requests':>9} {'failed':>6} {'req/s':>7} {'p50':>8} {'p99':>8} {'max us':>9}")
    for name, phase in found["phases"].items():
        print(
            f"{name:13} {phase['requests']:9} {phase['failed']:6} {phase['requests_per_s'] or 0:7}"
            f" {phase['p50_us']:8} {phase['p99_us']:8} {phase['max_us']:9}"
        )
    soaked, ratios = found["soak"], found["swap_p99_over_steady"]
    print(
        f"p99 over steady: swaps {ratios['median']:.2f}, of each {BLOCK_SWAPS} {ratios['of_each_block']};"
        f" soak {found['soak_p99_over_steady']:.2f}"
    )
    memory = found["memory_over_fresh"]
    print(
        f"a swap takes {found['swaps']['swap_ms_median']} ms; own memory: fresh"
        f" {found['fresh_own_kib'] / 1024:.1f} MiB, after {MEMORY_SWAPS} swaps {memory['after_100']:.3f}"
        f" of that, after {found['swaps']['count']} {memory['after_all']:.3f}; soak"
        f" {soaked['own_mib_range']} MiB, slope {soaked['slope_kib_per_minute']} KiB a minute"
    )
    for line in found["errors"]:
        print(f"error: {line}")
    for goal, is_met in found["goals"].items():
        print(f"{'met' if is_met else 'MISSED'}: {goal}")


if __name__ == "__main__":
    sys.exit(main())
