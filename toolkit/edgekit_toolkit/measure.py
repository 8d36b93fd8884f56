"""Measurement on this machine: latency of several sessions side by side, and peak memory of a fresh process.

It measures the host, not a target; figures of a target need that device. See `memory` for the estimate.
"""

import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.feeds import Feeds

_PROC_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """When `measure_latency` stops.

    Attributes:
        warmup_rounds: rounds that are run first and not counted.
        min_rounds: rounds that are counted whatever the time.
        max_rounds: most rounds that are counted.
        time_limit_s: no round starts later than this after the first, the warm-up included.
        precision: stop early once the 95 % interval of every median is within this share of it.
    """

    warmup_rounds: int = 2
    min_rounds: int = 5
    max_rounds: int = 200
    time_limit_s: float = 10.0
    precision: float = 0.02

    def __post_init__(self) -> None:
        if self.warmup_rounds < 0 or not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"expected warmup_rounds >= 0 and 1 <= min_rounds <= max_rounds, got {self}")
        if not self.time_limit_s > 0 or not 0 <= self.precision < 1:
            raise ValueError(f"expected time_limit_s > 0 and 0 <= precision < 1, got {self}")


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies of one session, in seconds, in the order of the rounds.

    Attributes:
        seconds: one entry a round, at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the rounds."""
        lower, upper = np.quantile(self.seconds, (0.25, 0.75))
        return float(lower), float(upper)

    def ratio_to(self, reference: "Latency") -> float:
        """Median over the rounds of this latency divided by that of `reference` in the same round.

        Both must come from one call of `measure_latency`: then a load on the machine that lasts longer than
        a round strikes both alike.
        """
        pairs = zip(self.seconds, reference.seconds, strict=True)
        return statistics.median(own / other for own, other in pairs)


def measure_latency(
    sessions: Mapping[str, Callable[[], object]],
    limits: LatencyLimits | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    seed: int = 0,
) -> dict[str, Latency]:
    """Latency of each session; a round runs each once, in an order that is drawn anew each round.

    Args:
        sessions: name -> a call that makes one inference.
        limits: when to stop; by default `LatencyLimits()`.
        clock: seconds since any moment; grows.
        seed: of the orders.
    """
    limits = limits or LatencyLimits()
    orders = np.random.default_rng(seed)
    names = list(sessions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start = clock()
    for _ in range(limits.warmup_rounds):
        _round(sessions, names, clock)
    for count in range(limits.max_rounds):
        if count >= limits.min_rounds and (
            clock() - start >= limits.time_limit_s
            or all(_is_settled(values, limits.precision) for values in seconds.values())
        ):
            break
        order = [names[index] for index in orders.permutation(len(names))]
        for name, elapsed_s in _round(sessions, order, clock).items():
            seconds[name].append(elapsed_s)
    return {name: Latency(tuple(values)) for name, values in seconds.items()}


def _round(
    sessions: Mapping[str, Callable[[], object]], order: Sequence[str], clock: Callable[[], float]
) -> dict[str, float]:
    elapsed_s = {}
    for name in order:
        begin = clock()
        sessions[name]()
        elapsed_s[name] = clock() - begin
    return elapsed_s


def _is_settled(seconds: Sequence[float], precision: float) -> bool:
    """Whether the 95 % interval of the median is within `precision` of it on both sides.

    Source: H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1: the interval between the
    order statistics n/2 -+ 1.96 sqrt(n)/2 holds the median of any distribution.
    """
    count = len(seconds)
    reach = 1.96 * math.sqrt(count) / 2
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    if low < 0 or high >= count:
        return False
    ordered = sorted(seconds)
    median = statistics.median(ordered)
    return ordered[high] - median <= precision * median and median - ordered[low] <= precision * median


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bounds of the process in which memory is measured.

    Attributes:
        runs: inferences; the second can need more than the first.
        time_limit_s: for the whole process.
    """

    runs: int = 3
    time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        if self.runs < 1 or not self.time_limit_s > 0:
            raise ValueError(f"expected runs >= 1 and time_limit_s > 0, got {self}")


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Largest resident memory of a process that loads and runs one model.

    Attributes:
        total_bytes: of the whole process, interpreter and engine included.
        engine_bytes: of a process that runs a session of one Relu in place of the model.
    """

    total_bytes: int
    engine_bytes: int

    @property
    def model_bytes(self) -> int:
        """What the model adds to the bare engine."""
        return self.total_bytes - self.engine_bytes


def measure_peak_memory(
    model: bytes | Path, feeds: Feeds, *, threads: int = 1, limits: MemoryLimits | None = None
) -> PeakMemory:
    """Peak memory of a fresh process on this machine that loads `model` from a file and runs it.

    Args:
        model: content or path of an ONNX model.
        feeds: input name -> array, one for each input.
        threads: of one inference, at least 1.
        limits: by default `MemoryLimits()`.

    Raises:
        BackendError: the process died or took too long, or this system has no /proc.
    """
    limits = limits or MemoryLimits()
    engine_bytes = measure_engine_bytes(threads)
    return PeakMemory(_peak_bytes(model, feeds, threads, limits), engine_bytes)


@functools.cache
def measure_engine_bytes(threads: int = 1) -> int:
    """Peak memory of a bare engine on this machine: imports, and a session of one Relu that runs once.

    Measured once a process and number of threads: the engine that is imported does not change meanwhile.

    Raises:
        BackendError: as for `measure_peak_memory`.
    """
    feeds: Feeds = {"x": np.zeros(1, np.float32)}
    return _peak_bytes(_trivial_model(), feeds, threads, MemoryLimits())


def _trivial_model() -> bytes:
    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"}
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "trivial", [value["x"]], [value["y"]])
    # The oldest versions that suffice, so that any engine loads it.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=7)
    content: bytes = model.SerializeToString()
    return content


def _peak_bytes(
    model: bytes | Path, feeds: Mapping[str, NDArray[Any]], threads: int, limits: MemoryLimits
) -> int:
    if not _PROC_STATUS.exists():
        raise BackendError("peak memory is read from /proc/self/status, which this system has not; use Linux")
    try:
        return _measure_child(model, feeds, threads, limits)
    except OSError as error:
        raise BackendError(
            f"measuring memory needs temporary files: {error}; free space or set TMPDIR"
        ) from error


def _measure_child(
    model: bytes | Path, feeds: Mapping[str, NDArray[Any]], threads: int, limits: MemoryLimits
) -> int:
    with tempfile.TemporaryDirectory(prefix="edgekit-memory-") as name:
        folder = Path(name)
        if isinstance(model, bytes):
            (folder / "model.onnx").write_bytes(model)
            model = folder / "model.onnx"
        paths = {}
        for index, (input_name, array) in enumerate(feeds.items()):
            paths[input_name] = str(folder / f"{index}.npy")
            np.save(paths[input_name], array, allow_pickle=False)
        request = {"model": str(model.resolve()), "feeds": paths, "threads": threads, "runs": limits.runs}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        return _run_child(folder / "request.json", limits)


def _run_child(request: Path, limits: MemoryLimits) -> int:
    # The child imports what this process imports, and nothing that lies in the working folder.
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "edgekit_toolkit.measure_child", str(request)],
            capture_output=True,
            text=True,
            check=False,
            timeout=limits.time_limit_s,
            cwd=request.parent,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"measuring memory took longer than {limits.time_limit_s:g} s; raise MemoryLimits.time_limit_s"
        ) from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        raise BackendError(f"the process that loads and runs the model was ended by {name}{hint}")
    if done.returncode > 0:
        raise BackendError(f"the process that loads and runs the model failed: {done.stderr.strip()}")
    return int(json.loads(done.stdout)["peak_bytes"])
