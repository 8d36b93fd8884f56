"""Clients that ask a service without a pause, in processes of their own, and what they count by phase."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError

BOUNDS_S = 1e-5 * 1.02 ** np.arange(0, 800)  # 10 us to 75 s, in steps of 2 %
MOST_ERRORS = 20
Question = tuple[str, NDArray[Any], NDArray[Any]]
"""The input's name, its values, and the output that is right."""


@dataclass
class Load:
    """Clients in processes of their own.

    Attributes:
        names: of all phases.
        counts: [phases, ranges of time] answers; at the end, as all that follows.
        failed: [phases] requests.
        errors: the first few messages.
    """

    phase: "Synchronized[int]"
    names: tuple[str, ...]
    counts: NDArray[np.int64]
    failed: NDArray[np.int64]
    errors: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = 0.0

    def begin(self, name: str, seconds: float = 0.0) -> None:
        """End the phase before, count for the phase `name`, and return after `seconds`."""
        self.end()
        self.phase.value = self.names.index(name)
        time.sleep(seconds)

    def end(self) -> None:
        now_s = time.monotonic()
        self.seconds[self.names[self.phase.value]] = now_s - self._since_s
        self._since_s = now_s

    def describe(self, what: str) -> dict[str, Any]:
        """Return the figures of a phase, or of all whose first word is `what`."""
        chosen = [index for index, name in enumerate(self.names) if what in (name, name.split()[0])]
        seconds = sum(self.seconds.get(self.names[index], 0.0) for index in chosen)
        return describe(self.counts[chosen].sum(0), int(self.failed[chosen].sum()), seconds)


@contextmanager
def asking(path: str, clients: int, question: Question, names: tuple[str, ...]) -> Iterator[Load]:
    """Ask from `clients` connections until the end of the block; results are there after it."""
    context = multiprocessing.get_context("spawn")
    load = Load(context.Value("i", 0), names, *zeros(len(names)))
    over = context.Event()
    workers = max(1, min(clients, len(os.sched_getaffinity(0))))
    started = []
    for number in range(workers):
        near, far = context.Pipe()
        count = clients // workers + (number < clients % workers)
        process = context.Process(
            target=ask, args=(path, count, question, (load.phase, names), over, far), daemon=True
        )
        process.start()
        started.append((process, near))
    for _, near in started:
        near.recv()
    load.end()  # of the time before the first phase
    try:
        yield load
    finally:
        load.end()
        over.set()
        for process, near in started:
            if near.poll(60):
                more, lost, errors = near.recv()
                load.counts += more
                load.failed += lost
                load.errors += errors
            else:
                load.errors.append("a client process did not end")
            process.join(10)
        load.errors = load.errors[:MOST_ERRORS]


def zeros(phases: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return no answers [phases, ranges of time] and no failures [phases]."""
    return np.zeros((phases, len(BOUNDS_S) + 1), np.int64), np.zeros(phases, np.int64)


def ask(
    path: str,
    clients: int,
    question: Question,
    phases: "tuple[Synchronized[int], tuple[str, ...]]",
    over: Any,
    pipe: "Connection[Any, Any]",
) -> None:
    """Ask without a pause on `clients` threads; in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    phase, names = phases
    counts, failed = zeros(len(names))
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
                        errors.append(f"{names[now]}: {type(error).__name__}: {error}"[:300])
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
