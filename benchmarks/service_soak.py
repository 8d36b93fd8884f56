"""The service at full load while versions are swapped: failed requests, memory over time, p99 against steady.

    PYTHONPATH=device_runtime:toolkit .venv/bin/python benchmarks/service_soak.py
        [--minutes 10] [--swaps 1000] [--clients 16] [--swap-every 3] [--steady 20] [--json FILE]

One service process serves models/tiny/digits_cnn.onnx to clients that ask without a pause, in as many
processes as there are cores. Each swap writes a new version and asks the service to load it
(`swap = "availability"`).

1. fresh: PSS of the service after its first load and some traffic.
2. steady: p99 of a request without swaps.
3. swaps: `--swaps` of them, back to back; failed requests, p99 in all of that time, PSS after the first 100.
4. soak: `--minutes` with a swap every `--swap-every` seconds; PSS every second, with its slope.
5. steady again: p99, since the machine may have changed meanwhile.

A request fails if it is answered by an error, with wrong outputs, or not at all. "over steady" is against the
mean of both steady phases. Under five minutes the slope says nothing and is not judged. Figures are of this
machine and this run: compare ratios. It ends with exit code 1 where a goal is missed.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from securesystemslib.signer import CryptoSigner

from edgekit_runtime import Client
from edgekit_runtime.archive import write_package
from edgekit_runtime.entries import Artifact, BackendChoice
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_toolkit.sign import StatementSigner

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny" / "digits_cnn.onnx"
SHAPE = (1, 1, 8, 8)
PHASES = ("fresh", "steady", "swaps", "soak", "steady again")
BOUNDS_S = 1e-5 * 1.02 ** np.arange(0, 800)  # 10 us to 75 s, in steps of 2 %
MOST_ERRORS = 20
MEMORY_SWAPS = 100
LEAST_MINUTES = 5.0  # under it, one allocation decides the slope
WARM_SHARE = 0.2  # of the soak's time, which its slope leaves out
CONFIG = '[models.small]\nswap = "availability"\n'


def main() -> int:
    """Run all phases, print what was found and return whether a goal was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--swap-every", type=float, default=3.0, help="seconds, in the soak")
    parser.add_argument("--steady", type=float, default=20.0, help="seconds without swaps")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), arguments)
    report(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(found["goals"].values()) else 1


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    versions = Versions(folder)
    versions.write()
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "cores": len(os.sched_getaffinity(0))}
    with (
        serve(folder) as (process, path),
        Client(path) as control,
        asking(path, arguments.clients, versions) as load,
    ):
        load.begin("fresh", 2.0)
        fresh_kib = pss_kib(process)
        load.begin("steady", arguments.steady)
        found["swaps"] = swap_often(control, process, versions, load, arguments.swaps)
        found["soak"] = soak(control, process, versions, load, arguments)
        load.begin("steady again", arguments.steady)
    phases = load.results
    steady = sum(phases[name]["p99_us"] for name in ("steady", "steady again")) / 2
    found["phases"] = phases
    found["errors"] = load.errors
    found["fresh_pss_kib"] = fresh_kib
    ratio = phases["swaps"]["p99_us"] / steady
    found["swap_p99_over_steady"] = ratio
    found["soak_p99_over_steady"] = phases["soak"]["p99_us"] / steady
    memory = found["swaps"]["pss_kib_after_100"] / fresh_kib
    found["memory_after_100_swaps_over_fresh"] = memory
    failed = sum(phase["failed"] for phase in phases.values())
    found["goals"] = {
        "0 failed requests": failed == 0 and not load.errors,
        "p99 of swaps at most 1.5 x steady": ratio <= 1.5,
        "memory after 100 swaps within 10 % of fresh": memory <= 1.1,
    }
    if arguments.minutes >= LEAST_MINUTES:
        found["goals"]["soak grows by less than 10 % an hour"] = found["soak"]["slope_share_per_hour"] <= 0.1
    return found


# The service


class Versions:
    """Packages of one model under growing versions, the last two of which are kept."""

    def __init__(self, folder: Path) -> None:
        key = Ed25519PrivateKey.generate()
        keys = folder / "keys"
        keys.mkdir()
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (keys / "bench.pub.pem").write_bytes(public)
        self._signer = StatementSigner(CryptoSigner(key))
        self._folder = folder / "packages"
        self._folder.mkdir()
        self._count = 0
        self.values = np.random.default_rng(0).random(SHAPE, np.float32)
        with_session = OrtSession(MODEL.read_bytes(), OrtOptions(threads=1))
        (self._given,), (self._got,) = with_session.inputs, with_session.outputs
        self.expected = with_session.run({self._given.name: self.values})[self._got.name]
        with_session.close()

    @property
    def input_name(self) -> str:
        """Of the model."""
        return self._given.name

    def write(self) -> str:
        """Write the next version, drop the one before the last, and return it."""
        self._count += 1
        version = f"{self._count}.0.0"
        contents = {
            "model.onnx": MODEL.read_bytes(),
            "golden/in.bin": self.values.tobytes(),
            "golden/out.bin": self.expected.tobytes(),
        }
        manifest = Manifest(
            name="small",
            version=version,
            target="x86-64",
            inputs=(self._given,),
            outputs=(self._got,),
            artifacts=tuple(
                Artifact(
                    path,
                    len(data),
                    hashlib.sha256(data).hexdigest(),
                    "model" if path == "model.onnx" else "golden",
                )
                for path, data in sorted(contents.items())
            ),
            backend=BackendChoice("ort", "model.onnx", {"threads": 1}),
            golden=Golden(
                (GoldenInput(self._given.name, "float32", SHAPE, "golden/in.bin"),),
                (GoldenOutput(self._got.name, "float32", self.expected.shape, "golden/out.bin", 1e-4, 1e-4),),
            ),
        )
        write_package(self._folder / f"small-{self._count}.edgepkg", manifest, contents, self._signer)
        (self._folder / f"small-{self._count - 2}.edgepkg").unlink(missing_ok=True)
        return version


@contextmanager
def serve(folder: Path) -> Iterator[tuple[int, str]]:
    """Run the service; yields its process id and its Unix socket."""
    path = str(folder / "soak.sock")
    (folder / "service.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--package", str(folder / "packages")]
    command += ["--keys", str(folder / "keys"), "--config", str(folder / "service.toml")]
    log = (folder / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--unix-socket", path, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "device_runtime")},
        cwd=folder,
        stderr=log,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_ready(process, path, folder / "log")
        yield process.pid, path
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def wait_until_ready(process: "subprocess.Popen[bytes]", path: str, log: Path) -> None:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with Client(path) as client:
                if client.ready("small"):
                    return
        except EdgekitError:  # noqa: PERF203  # not yet
            time.sleep(0.05)
    raise SystemExit(f"the service did not start: {log.read_text()[-2000:]}")


def pss_kib(process: int) -> int:
    """Return the proportional memory of a process, in KiB."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise SystemExit("no Pss in smaps_rollup")


# The clients


@dataclass
class Load:
    """Clients in processes of their own.

    Attributes:
        results: name of a phase -> its figures, complete at the end.
        errors: the first few messages.
    """

    phase: "Synchronized[int]"
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def begin(self, name: str, seconds: float) -> None:
        """Count for the phase `name`, and go on so for `seconds`."""
        self.phase.value = PHASES.index(name)
        begin_s = time.monotonic()
        time.sleep(seconds)
        self.seconds[name] = time.monotonic() - begin_s


@contextmanager
def asking(path: str, clients: int, versions: Versions) -> Iterator[Load]:
    """Ask from `clients` connections until the end of the block; results are there after it."""
    context = multiprocessing.get_context("spawn")
    load = Load(context.Value("i", 0))
    over = context.Event()
    workers = max(1, min(clients, len(os.sched_getaffinity(0))))
    started = []
    for number in range(workers):
        near, far = context.Pipe()
        count = clients // workers + (number < clients % workers)
        question = (versions.input_name, versions.values, versions.expected)
        process = context.Process(
            target=ask, args=(path, count, question, load.phase, over, far), daemon=True
        )
        process.start()
        started.append((process, near))
    for _, near in started:
        near.recv()
    try:
        yield load
    finally:
        over.set()
        counts, failed = np.zeros((len(PHASES), len(BOUNDS_S) + 1), np.int64), np.zeros(len(PHASES), np.int64)
        for process, near in started:
            if near.poll(60):
                more, lost, errors = near.recv()
                counts += more
                failed += lost
                load.errors += errors
            else:
                load.errors.append("a client process did not end")
            process.join(10)
        load.errors = load.errors[:MOST_ERRORS]
        load.results = {
            name: describe(counts[index], int(failed[index]), load.seconds.get(name, 0.0))
            for index, name in enumerate(PHASES)
        }


def ask(
    path: str,
    clients: int,
    question: tuple[str, NDArray[Any], NDArray[Any]],
    phase: "Synchronized[int]",
    over: Any,
    pipe: "Connection[Any, Any]",
) -> None:
    """Ask without a pause on `clients` threads; in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    counts, failed = np.zeros((len(PHASES), len(BOUNDS_S) + 1), np.int64), np.zeros(len(PHASES), np.int64)
    errors: list[str] = []
    lock = threading.Lock()
    name, values, expected = question

    def run() -> None:
        own, lost = np.zeros_like(counts), np.zeros_like(failed)
        client = Client(path)
        while not over.is_set():
            now, begin_s = phase.value, time.perf_counter()
            try:
                (answer,) = client.infer("small", {name: values}).values()
                check(answer, expected)
            except EdgekitError as error:
                lost[now] += 1
                with lock:
                    if len(errors) < MOST_ERRORS:
                        errors.append(f"{PHASES[now]}: {type(error).__name__}: {error}"[:300])
                client.close()
                client = Client(path)
                continue
            own[now, np.searchsorted(BOUNDS_S, time.perf_counter() - begin_s)] += 1
        client.close()
        with lock:
            np.add(counts, own, counts)
            np.add(failed, lost, failed)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    pipe.send("asking")
    for thread in threads:
        thread.join()
    pipe.send((counts, failed, errors))


def check(answer: NDArray[Any], expected: NDArray[Any]) -> None:
    """Return where an answer is right."""
    if not np.allclose(answer, expected, 1e-3, 1e-3):
        raise EdgekitError(f"wrong outputs: {answer}")


def describe(counts: NDArray[np.int64], failed: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one phase."""
    total = int(counts.sum())
    cumulative = np.cumsum(counts)

    def quantile(share: float) -> float:
        if not total:
            return float("nan")
        index = int(np.searchsorted(cumulative, share * total))
        return round(float(BOUNDS_S[min(index, len(BOUNDS_S) - 1)]) * 1e6, 1)

    highest = int(np.flatnonzero(counts)[-1]) if total else 0
    return {
        "requests": total,
        "failed": failed,
        "seconds": round(seconds, 1),
        "requests_per_s": round(total / seconds) if seconds else None,
        "p50_us": quantile(0.5),
        "p99_us": quantile(0.99),
        "p99.9_us": quantile(0.999),
        "max_us": round(float(BOUNDS_S[min(highest, len(BOUNDS_S) - 1)]) * 1e6, 1),
    }


# The phases


def swap(control: Client, versions: Versions) -> float:
    """Swap to a new version, and return how long the service took, in seconds."""
    version = versions.write()
    begin_s = time.perf_counter()
    control.load("small")
    seconds = time.perf_counter() - begin_s
    served = control.metadata("small")["versions"]
    if served != [version]:
        raise SystemExit(f"the service serves {served} after a swap to {version}")
    return seconds


def swap_often(control: Client, process: int, versions: Versions, load: Load, swaps: int) -> dict[str, Any]:
    """Swap back to back, and return how long that took and what memory did."""
    load.phase.value = PHASES.index("swaps")
    begin_s = time.monotonic()
    seconds, after = [], 0
    for number in range(1, swaps + 1):
        seconds.append(swap(control, versions))
        if number == min(MEMORY_SWAPS, swaps):
            time.sleep(1.0)
            after = pss_kib(process)
        if number % 100 == 0:
            print(f"{number} swaps, PSS {pss_kib(process) / 1024:.1f} MiB", file=sys.stderr, flush=True)
    load.seconds["swaps"] = time.monotonic() - begin_s
    return {
        "count": swaps,
        "swap_ms_median": round(1e3 * float(np.median(seconds)), 2),
        "swap_ms_max": round(1e3 * max(seconds), 2),
        "pss_kib_after_100": after,
        "pss_kib_at_the_end": pss_kib(process),
    }


def soak(
    control: Client, process: int, versions: Versions, load: Load, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Swap now and then, look at the memory every second, and return its course."""
    load.phase.value = PHASES.index("soak")
    begin_s = time.monotonic()
    samples: list[tuple[float, int]] = []
    next_swap_s, swaps = arguments.swap_every, 0
    while (now_s := time.monotonic() - begin_s) < 60 * arguments.minutes:
        if now_s >= next_swap_s:
            swap(control, versions)
            swaps += 1
            next_swap_s += arguments.swap_every
        samples.append((now_s, pss_kib(process)))
        time.sleep(1.0)
    load.seconds["soak"] = time.monotonic() - begin_s
    times, sizes = np.array(samples).T if samples else (np.zeros(1), np.array([pss_kib(process)]))
    is_warm = times >= WARM_SHARE * times[-1]
    enough = int(is_warm.sum()) > 2
    slope = float(np.polyfit(times[is_warm], sizes[is_warm], 1)[0]) if enough else 0.0  # KiB a second
    step = max(1, len(samples) // 60)
    return {
        "swaps": swaps,
        "pss_mib_median": round(float(np.median(sizes)) / 1024, 2),
        "pss_mib_range": [round(float(sizes.min()) / 1024, 2), round(float(sizes.max()) / 1024, 2)],
        "slope_kib_per_minute": round(60 * slope, 2),
        "slope_share_per_hour": round(3600 * slope / float(np.median(sizes)), 4),
        "pss_mib_over_time": [[round(t), round(size / 1024, 2)] for t, size in samples[::step]],
    }


def report(found: dict[str, Any]) -> None:
    """Print what was found for people."""
    print(f"{'phase':13} {'requests':>9} {'failed':>6} {'req/s':>7} {'p50':>8} {'p99':>8} {'max us':>9}")
    for name, phase in found["phases"].items():
        print(
            f"{name:13} {phase['requests']:9} {phase['failed']:6} {phase['requests_per_s'] or 0:7}"
            f" {phase['p50_us']:8} {phase['p99_us']:8} {phase['max_us']:9}"
        )
    soaked = found["soak"]
    swapped = found["swap_p99_over_steady"]
    print(f"p99 over steady: swaps {swapped:.2f}, soak {found['soak_p99_over_steady']:.2f}")
    print(
        f"PSS: fresh {found['fresh_pss_kib'] / 1024:.1f} MiB, after {MEMORY_SWAPS} swaps"
        f" {found['memory_after_100_swaps_over_fresh']:.3f} of that; soak {soaked['pss_mib_range']} MiB,"
        f" slope {soaked['slope_kib_per_minute']} KiB a minute"
    )
    for line in found["errors"]:
        print(f"error: {line}")
    for goal, is_met in found["goals"].items():
        print(f"{'met' if is_met else 'MISSED'}: {goal}")


if __name__ == "__main__":
    sys.exit(main())
