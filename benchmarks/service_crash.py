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

import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tests.waiting import wait_for

from edgekit_runtime import Client
from edgekit_runtime.errors import RequestError, TransportError
from edgekit_runtime.package.archive import Sign
from edgekit_toolkit.packaging.signing_keys import load_signer
from processes import list_children, read_memory
from results import make_parser
from service_latency import pin, take_turns
from serving import INPUT, MODEL, SHAPE, Service, serving, write_signed

CLIENTS = 4
X = np.random.default_rng(0).random(SHAPE, np.float32)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the comparison")
    parser.add_argument("--crashes", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sign = load_signer(folder=folder / "keys")
        for model in ("inside", "worker"):  # the same one; the second is to be isolated
            write_signed(folder, model, MODEL.read_bytes(), {INPUT: X}, sign)
        with serve(folder, standby=False) as service:
            result: dict[str, Any] = measure_cost(service, arguments.seconds)
        for standby in (False, True):
            with serve(folder, standby=standby) as service:
                key = "return with standby" if standby else "return"
                result[key] = measure_returns(service, arguments.crashes, 1 + standby)
        with serve(folder, standby=False, rollout="canary") as service:
            begin = begin_trials(folder, service, sign)
            result["return in a canary"] = measure_returns(service, arguments.crashes, 1, begin)
    print(json.dumps(result, indent=2))


def begin_trials(folder: Path, service: Service, sign: Sign) -> Callable[[], None]:
    """Return what puts a new version on trial, each time another one."""
    numbers = itertools.count(2)

    def begin() -> None:
        version = f"{next(numbers)}.0.0"
        write_signed(folder, "worker", MODEL.read_bytes(), {INPUT: X}, sign, version=version)
        with Client(service.path) as client:
            client.load("worker")
            for _ in range(100):
                client.infer("worker", {INPUT: X})

    return begin


def serve(folder: Path, *, standby: bool, rollout: str = "swap") -> AbstractContextManager[Service]:
    config = (
        f"[models.worker]\nisolated = true\nrollout = '{rollout}'\n[models.worker.isolation]\n"
        f"standby = {str(standby).lower()}\nmax_crashes = 1000\nmax_delay_s = 1e-3\n"
    )
    return serving(folder, folder, config=config)


def measure_cost(service: Service, seconds: float) -> dict[str, Any]:
    (worker,) = list_children(service.pid)
    before = os.sched_getaffinity(0)
    with Client(service.path) as one, Client(service.path) as other:
        ask_inside, ask_worker = one.bind("inside", {INPUT: X}), other.bind("worker", {INPUT: X})
        for pid in (service.pid, worker):
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
    result["pss_mb"] = {"service": pss_mb(service.pid), "worker": pss_mb(worker)}
    return result


def measure_returns(
    service: Service, crashes: int, workers: int, begin: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    done = threading.Event()
    counts: list[tuple[int, int]] = []
    askers = [threading.Thread(target=_ask_on, args=(service.path, done, counts)) for _ in range(CLIENTS)]
    for asker in askers:
        asker.start()
    returns, refused = [], 0
    with Client(service.path) as client:
        for _ in range(crashes):
            wait_for(lambda: len(list_children(service.pid)) == workers)
            time.sleep(2.0)  # so that the one that stands by has loaded the model
            begin()
            wait_for(lambda: len(list_children(service.pid)) == workers)  # nothing is being verified
            client.infer("worker", {INPUT: X})
            pid = list_children(service.pid)[0]
            began_s = time.perf_counter()
            os.kill(pid, signal.SIGSEGV)
            while Path(f"/proc/{pid}").exists():
                time.sleep(1e-3)
            while True:
                try:
                    client.infer("worker", {INPUT: X})
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
        expected = client.infer("inside", {INPUT: X})
        while not done.is_set():
            try:
                found = client.infer("inside", {INPUT: X})
                same = all(np.array_equal(found[name], expected[name]) for name in expected)
                right, lost = right + same, lost + (not same)
            except (RequestError, TransportError):
                lost += 1
            time.sleep(1e-3)
    counts.append((right, lost))


def pss_mb(process: int) -> float:
    """Memory that a process answers for: its own, and its share of what it shares."""
    return round(read_memory(process)["Pss"] / 2**20, 1)


if __name__ == "__main__":
    main()
