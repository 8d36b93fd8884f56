"""What a worker process of its own costs a model, and what its crash costs everybody.

    scripts/python benchmarks/service_crash.py [--crashes 10]

- Latency: the same small model in the service's process and in a worker of the same service; blocks of
  requests take turns, client and server on one core.
- Memory: proportional set size of the service and of its worker.
- Return: SIGSEGV to the worker; seconds until its model is answered again by a client that asks every 5 ms,
  without and with a worker that stands by, and while it has a new version on trial. Meanwhile 4 clients ask
  another model: all of their answers are counted, and those that were not right or did not come are lost.

Every figure is of this machine and this run.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner

from edgekit_runtime import Client
from edgekit_runtime.errors import RequestError, TransportError
from edgekit_toolkit.packaging.signing_keys import StatementSigner
from service_latency import MODEL, ROOT, pin, take_turns, write

CLIENTS = 4
X = np.random.default_rng(0).random((1, 1, 8, 8), np.float32)


def main() -> None:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of the comparison")
    parser.add_argument("--crashes", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        signer = make_packages(folder)
        with serve(folder, standby=False) as (process, path):
            result: dict[str, Any] = measure_cost(process, path, arguments.seconds)
        for standby in (False, True):
            with serve(folder, standby=standby) as (process, path):
                key = "return with standby" if standby else "return"
                workers = 1 + standby
                result[key] = measure_returns(process, path, arguments.crashes, workers)
        with serve(folder, standby=False, rollout="canary") as (process, path):
            begin = begin_trials(folder, path, signer)
            result["return in a canary"] = measure_returns(process, path, arguments.crashes, 1, begin)
    print(json.dumps(result, indent=2))


def make_packages(folder: Path) -> StatementSigner:
    """Write the small model twice: as `inside`, and as `worker` to be isolated; return who signs."""
    key = Ed25519PrivateKey.generate()
    (folder / "keys").mkdir()
    (folder / "keys" / "bench.pub.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    signer = StatementSigner(CryptoSigner(key))
    for name in ("inside", "worker"):
        write(folder, name, MODEL.read_bytes(), X.shape, signer)
    return signer


def begin_trials(folder: Path, path: str, signer: StatementSigner) -> Callable[[], None]:
    """Return what puts a new version on trial, each time another one."""
    numbers = itertools.count(2)

    def begin() -> None:
        write(folder, "worker", MODEL.read_bytes(), X.shape, signer, f"{next(numbers)}.0.0")
        with Client(path) as client:
            client.load("worker")
            for _ in range(100):
                client.infer("worker", {"image": X})

    return begin


@contextmanager
def serve(
    folder: Path, *, standby: bool, rollout: str = "swap"
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run the service; yields its process and its Unix socket."""
    path, config = str(folder / "bench.sock"), folder / "config.toml"
    config.write_text(
        f"[models.worker]\nisolated = true\nrollout = '{rollout}'\n[models.worker.isolation]\n"
        f"standby = {str(standby).lower()}\nmax_crashes = 1000\nmax_delay_s = 1e-3\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "edgekit_runtime.cli", "serve", "--package", str(folder)),
            *("--config", str(config)),
            *("--keys", str(folder / "keys"), "--unix-socket", path, "--port", "0"),
        ],
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": str(ROOT / "device_runtime"),
            "PYTHONPYCACHEPREFIX": str(folder / "compiled"),  # as what pip installed is
        },
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready at" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, path
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def workers_of(process: "subprocess.Popen[str]") -> list[int]:
    """Process ids of the workers, the oldest first."""
    return [
        int(pid)
        for thread in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (thread / "children").read_text().split()
    ]


def measure_cost(process: "subprocess.Popen[str]", path: str, seconds: float) -> dict[str, Any]:
    """Latency and memory of both ways."""
    (worker,) = workers_of(process)
    before = os.sched_getaffinity(0)
    with Client(path) as one, Client(path) as other:
        ask_inside, ask_worker = one.bind("inside", {"image": X}), other.bind("worker", {"image": X})
        for pid in (process.pid, worker):
            pin(pid)
        times = take_turns({"inside": ask_inside, "worker": ask_worker}, seconds)
        os.sched_setaffinity(0, before)
        result: dict[str, Any] = {
            way: {
                "p50_us": round(float(np.quantile(taken, 0.5)), 1),
                "p99_us": round(float(np.quantile(taken, 0.99)), 1),
            }
            for way, taken in times.items()
        }
    result["pss_mb"] = {"service": pss_mb(process.pid), "worker": pss_mb(worker)}
    return result


def measure_returns(
    process: "subprocess.Popen[str]",
    path: str,
    crashes: int,
    workers: int,
    begin: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Seconds of each return, and how the other model's clients fared."""
    done = threading.Event()
    counts: list[tuple[int, int]] = []
    askers = [threading.Thread(target=_ask_on, args=(path, done, counts)) for _ in range(CLIENTS)]
    for asker in askers:
        asker.start()
    returns, refused = [], 0
    with Client(path) as client:
        for _ in range(crashes):
            wait_until(lambda: len(workers_of(process)) == workers)
            time.sleep(2.0)  # so that the one that stands by has loaded the model
            begin()
            wait_until(lambda: len(workers_of(process)) == workers)  # nothing is being verified
            client.infer("worker", {"image": X})
            pid = workers_of(process)[0]
            began_s = time.perf_counter()
            os.kill(pid, signal.SIGSEGV)
            while Path(f"/proc/{pid}").exists():
                time.sleep(1e-3)
            while True:
                try:
                    client.infer("worker", {"image": X})
                    break
                except (RequestError, TransportError):
                    refused += 1
                    time.sleep(5e-3)
            returns.append(time.perf_counter() - began_s)
    done.set()
    for asker in askers:
        asker.join()
    return {
        "seconds": {"median": round(statistics.median(returns), 3), "max": round(max(returns), 3)},
        "crashes": crashes,
        "refused": refused,
        "other_model": {
            "answers": sum(right for right, _ in counts),
            "lost": sum(lost for _, lost in counts),
        },
    }


def _ask_on(path: str, done: threading.Event, counts: list[tuple[int, int]]) -> None:
    right = lost = 0
    with Client(path) as client:
        expected = client.infer("inside", {"image": X})
        while not done.is_set():
            try:
                found = client.infer("inside", {"image": X})
                same = all(np.array_equal(found[name], expected[name]) for name in expected)
                right, lost = right + same, lost + (not same)
            except (RequestError, TransportError):
                lost += 1
            time.sleep(1e-3)
    counts.append((right, lost))


def wait_until(condition: Any) -> None:
    """Wait for at most a minute."""
    end_s = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end_s:
            raise SystemExit("the workers did not come back within a minute")
        time.sleep(0.01)


def pss_mb(process: int) -> float:
    """Memory that a process answers for: its own, and its share of what it shares."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    (kilobytes,) = (int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return round(kilobytes / 1024, 1)


if __name__ == "__main__":
    main()
