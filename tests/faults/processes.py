"""Faults, each in processes of its own, and a count of what came of them."""

import ctypes
import json
import logging
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Fault = TypeVar("Fault")
WORKERS = 2
_PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """What came of faults.

    Attributes:
        counts: transition and kind -> faults.
        wrong: transition, kind and what was wrong.
        all: how many there are; 0 where that is not known.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    all: int = 0


def try_all(
    faults: Sequence[Fault],
    try_fault: Callable[[int, Fault], list[str] | None],
    name: Callable[[Fault], tuple[str, str]],
    limit_s: float,
    most: int | None,
) -> Outcome:
    """Return what comes of faults, in a random order that is always the same, until the time is over.

    Args:
        faults: all of them.
        most: only so many of them.
        try_fault: takes the number of the worker; returns what is wrong, None where the fault never came.
        name: transition and kind of a fault.
        limit_s: see above.
    """
    end_s, outcome = time.monotonic() + limit_s, Outcome(all=len(faults))
    shuffled = random.Random(0).sample(faults, len(faults))[:most]  # no secret
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def work(number: int) -> None:
        try:
            for fault in shuffled[number::WORKERS]:
                if time.monotonic() > end_s:
                    break
                found.put((*name(fault), try_fault(number, fault)))
        finally:
            found.put(None)

    workers = [context.Process(target=work, args=(number,)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    running = WORKERS
    while running:
        taken = found.get()
        if taken is None:
            running -= 1
        elif taken[2] is not None:
            outcome.counts[taken[:2]] += 1
            outcome.wrong += [(*taken[:2], problem) for problem in taken[2]]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0, "a worker has ended: its error is above"
    return outcome


def end_with(parent: int) -> None:
    """Make the kernel kill this process when process `parent`, which has forked it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def fork(work: Callable[[], object]) -> Any:
    """Return what `work` returns in a process of its own; None where that was killed, as ordered."""
    near, far = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        try:
            end_with(parent)
            logging.disable(logging.CRITICAL)
            with os.fdopen(far, "w") as file:
                try:
                    result = work()
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    place = f"{Path(where.filename).name}:{where.lineno}"
                    result = True, [f"{type(error).__name__}: {error} ({place})"]
                json.dump(result, file)
        finally:
            os._exit(0)
    os.close(far)
    with os.fdopen(near) as file:
        sent = file.read()
    os.waitpid(child, 0)
    return json.loads(sent) if sent else None
