"""Counts, gauges and histograms, cheap to change; each object owns those that describe it.

Nothing here is locked: only the thread of the event loop changes or reads it. `prometheus` writes the text
when it is requested.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

# From a tenth of the shortest model to a client's patience.
LATENCY_BOUNDS_S: Final = (
    10e-6,
    25e-6,
    50e-6,
    100e-6,
    250e-6,
    500e-6,
    1e-3,
    2.5e-3,
    5e-3,
    10e-3,
    25e-3,
    50e-3,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
MAX_KINDS: Final = 256  # of runs
_BATCH_BOUNDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class Histogram:
    """Counts of values by range, and their sum.

    Attributes:
        bounds: upper ends of the ranges, in rising order. A value equal to an end belongs to that range. The
            last range has no upper end.
        counts: number of values in each range; one entry more than `bounds`.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as often as `times` says."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


class RunCount:
    """Count and times of the engine's runs with the same numbers of calls and rows.

    Attributes:
        merge_s, infer_s, split_s: seconds spent on merging calls into a batch, in the engine, and on
            splitting the outputs; summed over the runs.
    """

    __slots__ = ("count", "infer_s", "merge_s", "split_s")

    def __init__(self) -> None:
        self.count = 0
        self.merge_s = self.infer_s = self.split_s = 0.0

    def add(self, other: "RunCount") -> None:
        """Count the runs of `other`, too."""
        self.count += other.count
        self.merge_s += other.merge_s
        self.infer_s += other.infer_s
        self.split_s += other.split_s


class LaneMetrics:
    """Counts and times of one version of a model.

    Attributes:
        queue: seconds from a call's arrival to its beginning.
        compute: seconds in the engine, for each call. Each call of a batch counts the time of the batch.
        total: seconds from a call's arrival to its answer, of calls that ran.
        cached: seconds from a call's arrival to its answer, of calls answered from the response cache.
        runs: (calls, rows) in a run -> count of such runs. If the model's first dimension is fixed, each call
            has one row. After `MAX_KINDS` different pairs, new ones are rounded down to powers of two.
        succeeded: calls that ran and were answered with outputs.
        rows: number of rows in those calls.
        failed: calls that ran and were answered with an error.
        failed_s: seconds from arrival to answer of the failed calls, summed.
        shed: calls refused since too many waited.
        late: calls refused since their deadline had come.
        refused: calls refused for other reasons, such as wrong inputs, or a model that is being unloaded.
        cancelled: calls that were not run or were stopped, since their client had gone or the service ends.
        cache_misses: calls that the response cache did not hold.
        waiting: calls that wait now.
        last_s: when the engine or the cache last answered a call, on the clock of the scheduler, or None.
    """

    def __init__(self, model: str, version: str) -> None:
        self.model, self.version = model, version
        self.queue, self.compute = Histogram(), Histogram()
        self.total, self.cached = Histogram(), Histogram()
        self._lone = RunCount()
        self.runs = {(1, 1): self._lone}
        self.succeeded = self.failed = self.shed = self.late = self.refused = self.cancelled = self.rows = 0
        self.cache_misses = self.waiting = 0
        self.failed_s = 0.0
        self.last_s: float | None = None

    @property
    def cache_hits(self) -> int:
        """Calls answered from the response cache, some after waiting for the result of an equal call."""
        return self.cached.count

    @property
    def answered(self) -> int:
        """Calls that were answered with outputs, from the cache or not."""
        return self.succeeded + self.cached.count

    def answer_histogram(self) -> Histogram:
        """Return a histogram of `total` and `cached` together."""
        histogram = Histogram()
        histogram.counts = [ran + hit for ran, hit in zip(self.total.counts, self.cached.counts, strict=True)]
        histogram.total = self.total.total + self.cached.total
        return histogram

    def batch_histogram(self) -> Histogram:
        """Return a histogram of the runs by number of calls."""
        histogram = Histogram(_BATCH_BOUNDS)
        for (calls, _), run in self.runs.items():
            histogram.observe(calls, run.count)
        return histogram

    def note_lone(self, seconds: float, now_s: float, rows: int = 1) -> None:
        """Count a call that ran at once and alone, and succeeded.

        `now_s`: time on the scheduler's clock.
        """
        index = bisect_left(LATENCY_BOUNDS_S, seconds)
        self.queue.counts[0] += 1
        compute, total = self.compute, self.total
        lone = self._lone if rows == 1 else self._find_run(1, rows)
        compute.counts[index] += 1
        compute.total += seconds
        total.counts[index] += 1
        total.total += seconds
        lone.count += 1
        lone.infer_s += seconds
        self.succeeded += 1
        self.rows += rows
        self.last_s = now_s

    def note_run(self, calls: int, rows: int, merge_s: float, infer_s: float, split_s: float) -> None:
        """Count one run of the engine for `calls` calls with `rows` rows in total; times as in `RunCount`."""
        run = self._find_run(calls, rows)
        run.count += 1
        run.merge_s += merge_s
        run.infer_s += infer_s
        run.split_s += split_s

    def note_success(
        self, queue_s: float, compute_s: float, total_s: float, now_s: float, rows: int = 1
    ) -> None:
        """Count a call that waited, ran and was answered with outputs; see the class for the times."""
        self.queue.observe(queue_s)
        self.compute.observe(compute_s)
        self.total.observe(total_s)
        self.succeeded += 1
        self.rows += rows
        self.last_s = now_s

    def note_hit(self, total_s: float, now_s: float) -> None:
        """Count a call that was answered from the response cache."""
        self.cached.observe(total_s)
        self.last_s = now_s

    def note_failure(self, total_s: float, now_s: float) -> None:
        """Count a call that ran and was answered with an error."""
        self.failed += 1
        self.failed_s += total_s
        self.last_s = now_s

    def _find_run(self, calls: int, rows: int) -> RunCount:
        run = self.runs.get((calls, rows))
        if run is None:
            if len(self.runs) >= MAX_KINDS:  # clients choose the rows of their calls
                calls, rows = (1 << (number.bit_length() - 1) for number in (calls, rows))
            run = self.runs.setdefault((calls, rows), RunCount())
        return run


class ServiceMetrics:
    """Counts and measurements of the whole service.

    Attributes:
        swaps: (model, outcome) -> changes of a model's version; outcomes such as `swapped` or `rolled_back`.
        energy_j: (model,) -> joules above idle, summed since the start, where measured.
        request_energy_j: (model, version) -> mean joules above idle per request, where measured.
        power_w: (sensor,) -> watts now.
        temperature_c: (zone,) -> degrees Celsius now.
        device: name of a metric -> its value, for all other figures of the device.
    """

    __slots__ = ("device", "energy_j", "power_w", "request_energy_j", "swaps", "temperature_c")

    def __init__(self) -> None:
        self.swaps: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.energy_j: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.request_energy_j: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.device: dict[str, float] = {}
        self.power_w: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.temperature_c: defaultdict[tuple[str, ...], float] = defaultdict(float)
