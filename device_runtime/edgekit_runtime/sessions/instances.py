"""Opens sessions of a model that run at the same time, and warms them up before the first request."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.row_independence import has_free_rows
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.tensors import Array, Shapes, find_shapes, input_bytes


def open_instances(open_one: Callable[[], Session], count: int) -> tuple[Session, ...]:
    """Return sessions for `count` simultaneous runs.

    If the session can run in several threads at once (`is_concurrent`), one session is opened and returned
    `count` times. Otherwise, `count` sessions are opened, which need `count` times the memory.

    Args:
        open_one: Opens a session.
        count: The number of simultaneous runs, at least 1.

    Raises:
        EdgekitError: `open_one` failed. All opened sessions are closed.
    """
    first = open_one()
    if getattr(first, "is_concurrent", False):
        return (first,) * count
    sessions = [first]
    try:
        while len(sessions) < count:
            sessions.append(open_one())
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return tuple(sessions)


@dataclass(frozen=True, slots=True)
class WarmRun:
    """The measurement of a run before the first request, see `warm_up`."""

    shapes: Shapes
    size_bytes: int
    seconds: float


def warm_up(
    instances: Sequence[Session],
    inputs: Mapping[str, Array],
    *,
    max_batch: int = 1,
    runs: int = 4,
) -> list[WarmRun]:
    """Run each session before the first request, and return the measurements for `Scheduler.learn`.

    Args:
        instances: The sessions of a model. Duplicates are ignored.
        inputs: The inputs of a run, such as the golden inputs.
        max_batch: The maximum number of rows in a batch. If the number of rows is free, batches of 2, 4, 8
            ... rows up to this number are run too.
        runs: The number of runs per session and batch size, at least 1. If it is more than 1, the result
            does not include the first run.

    Raises:
        DataError: The inputs do not match the model.
        BackendError: The engine failed.
    """
    sizes = [inputs, *_grow(inputs, max_batch)] if has_free_rows(instances[0]) else [inputs]
    warm_runs = []
    for session in {id(session): session for session in instances}.values():
        for batch in sizes:
            seconds = []
            for _ in range(runs):
                began_s = time.perf_counter()
                session.run(batch)
                seconds.append(time.perf_counter() - began_s)
            warm_runs += [WarmRun(find_shapes(batch), input_bytes(batch), s) for s in seconds[1:] or seconds]
    return warm_runs


def _grow(inputs: Mapping[str, Array], max_batch: int) -> list[Mapping[str, Array]]:
    rows = {len(array) for array in inputs.values()}
    if len(rows) != 1 or 0 in rows:
        return []
    count = rows.pop()
    batches: list[Mapping[str, Array]] = []
    size = 2
    while size <= max_batch:
        if size > count:
            picked = np.arange(size) % count
            batches.append({name: array[picked] for name, array in inputs.items()})
        size *= 2
    return batches


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedSetting:
    """A variant that is opened with a number of threads. A governor chooses between such settings.

    Attributes:
        threads: The number of threads per run. 0 means the number in `ModelOptions` or else in the package.
        instances: The sessions, which have passed the self-test.
        warm_runs: The runs that were measured before the first request.
        figures: The figures of the variant in the manifest.
        max_batch: The maximum number of rows per run. 1 if rows affect each other's outputs.
    """

    variant: str
    threads: int
    instances: tuple[Session, ...]
    warm_runs: tuple[WarmRun, ...]
    figures: Mapping[str, JsonValue]
    max_batch: int
