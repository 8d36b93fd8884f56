"""Counters, gauges and histograms of the service and of each served version.

They are used only on the event loop's thread, so there are no locks. The module `prometheus` formats them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

# From a tenth of the shortest inference to a client's patience.
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
    """A histogram with fixed bounds, and the sum of its values.

    Attributes:
        bounds: The upper bounds of the ranges, inclusive, in ascending order. The last range has no bound.
        counts: The number of values in each range. It has one entry more than `bounds`.
        total: The sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add `value` to the histogram `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """The number of values in the histogram."""
        return sum(self.counts)


class RunCount:
    """Counts engine runs that have the same number of calls and rows, and adds up their durations.

    Attributes:
        merge_s: The total time in seconds to merge calls into batches.
        infer_s: The total time in seconds in the engine.
        split_s: The total time in seconds to split the outputs.
    """

    __slots__ = ("count", "infer_s", "merge_s", "split_s")

    def __init__(self) -> None:
        self.count = 0
        self.merge_s = self.infer_s = self.split_s = 0.0

    def add(self, other: "RunCount") -> None:
        """Add the runs of `other`."""
        self.count += other.count
        self.merge_s += other.merge_s
        self.infer_s += other.infer_s
        self.split_s += other.split_s


class LaneMetrics:
    """Counts and durations of the calls of one version of a model.

    Attributes:
        queue: Seconds from the arrival of a call until it starts to run.
        compute: Seconds in the engine, per call. Each call in a batch counts the time of the whole batch.
        total: Seconds from the arrival of a call to its answer, for calls that ran.
        cached: Seconds from the arrival of a call to its answer, for calls answered from the response cache.
        runs: A dict from (calls, rows) to the `RunCount` of the runs with this number of calls and rows. If
            the first dimension of the model is fixed, each call has one row. If there are many entries, the
            numbers in new keys are rounded down to powers of 2.
        succeeded: The number of calls that ran and returned outputs.
        rows: The number of rows in the successful calls.
        failed: The number of calls that ran and returned an error.
        failed_s: The sum of the seconds from arrival to answer of the failed calls.
        shed: The number of calls refused because too many calls were waiting.
        late: The number of calls refused because their deadline had passed.
        refused: The number of calls refused for other reasons, such as wrong inputs.
        cancelled: The number of calls cancelled because the client disconnected or the service stopped.
        cache_misses: The number of calls not found in the response cache.
        waiting: The number of calls that wait now.
        last_s: The time of the last answer, on the clock of the scheduler, or None.
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
        """The number of calls answered from the response cache.

        This includes calls that waited for the result of an equal call.
        """
        return self.cached.count

    @property
    def answered(self) -> int:
        """The number of calls answered with outputs, with or without the cache."""
        return self.succeeded + self.cached.count

    def answer_histogram(self) -> Histogram:
        """Return the sum of the histograms `total` and `cached`."""
        histogram = Histogram()
        histogram.counts = [ran + hit for ran, hit in zip(self.total.counts, self.cached.counts, strict=True)]
        histogram.total = self.total.total + self.cached.total
        return histogram

    def batch_histogram(self) -> Histogram:
        """Return a histogram of the number of calls per run."""
        histogram = Histogram(_BATCH_BOUNDS)
        for (calls, _), run in self.runs.items():
            histogram.observe(calls, run.count)
        return histogram

    def note_lone(self, seconds: float, now_s: float, rows: int = 1) -> None:
        """Count a successful call that ran alone and without waiting.

        Args:
            seconds: The duration of the run.
            now_s: The time on the scheduler's clock.
            rows: The number of rows in the call.
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
        """Count one run of the engine. `RunCount` describes the durations."""
        run = self._find_run(calls, rows)
        run.count += 1
        run.merge_s += merge_s
        run.infer_s += infer_s
        run.split_s += split_s

    def note_success(
        self, queue_s: float, compute_s: float, total_s: float, now_s: float, rows: int = 1
    ) -> None:
        """Count a successful call that waited before it ran. See `queue`, `compute` and `total`."""
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
        swaps: A dict from (model, outcome) to the number of version changes with this outcome.
        energy_j: A dict from (model,) to the energy since the start in joules, without the idle energy.
        request_energy_j: A dict from (model, version) to the mean energy of a request in joules, without the
            idle energy.
        power_w: A dict from (sensor,) to the latest power in watts.
        temperature_c: A dict from (zone,) to the latest temperature in degrees Celsius.
        device: A dict from metric names to values, for all other measurements of the device.
    """

    __slots__ = ("device", "energy_j", "power_w", "request_energy_j", "swaps", "temperature_c")

    def __init__(self) -> None:
        self.swaps: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.energy_j: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.request_energy_j: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.device: dict[str, float] = {}
        self.power_w: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self.temperature_c: defaultdict[tuple[str, ...], float] = defaultdict(float)
