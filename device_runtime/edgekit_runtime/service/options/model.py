"""Options of one model."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.system.machine import MAX_THREADS

MAX_BATCH: Final = 4096
"""Of one run: the warm-up runs all powers of two up to what is configured."""
MAX_PROCESSES: Final = 64  # of one model

SwapOrder: TypeAlias = Literal["auto", "availability", "resource"]
"""Of a swap: load the new version first, or unload the old one first."""


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """How the calls of one model are scheduled.

    Attributes:
        max_batch: most rows that run together; 1 turns batching off. More needs a model whose rows do not
            change each other's answers, see `rows_are_independent`.
        max_delay_s: longest that a call waits for others to share its batch. With 0, calls share a batch only
            where they had to wait anyway, and a lone one never waits.
        max_waiting: most calls that wait; further ones are shed.
        levels: of priority.
        default_level: of calls that state none.
        max_passes: how many batches in a row may go past a level that waits, before it gets one.
        short_s: models of less run on the thread of the event loop; 0 runs none there.

    Raises:
        ValueError: a field is out of range.
    """

    max_batch: Annotated[int, Range(1, MAX_BATCH)] = 1
    max_delay_s: float = 0.0
    max_waiting: Annotated[int, Range(1, 1 << 20)] = 128
    levels: Annotated[int, Range(1, 256)] = 3
    default_level: int = 2
    max_passes: int = 8
    short_s: float = 200e-6

    def __post_init__(self) -> None:
        if min(self.max_batch, self.max_waiting, self.levels, self.max_passes) < 1:
            raise ValueError(f"expected counts of at least 1, got {self}")
        if not 1 <= self.default_level <= self.levels:
            raise ValueError(f"expected default_level within 1..levels, got {self}")
        if not 0 <= self.max_delay_s < math.inf or not 0 <= self.short_s < math.inf:
            raise ValueError(f"expected finite times of at least 0, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The worker processes of one model.

    Attributes:
        processes: how many answer, each with a share of the connections.
        standby: whether one more process with the model loaded waits to take over at once.
        hang_s: a worker that shows no life for so long is ended and started again. Its event loop must turn
            in that time, which it does not while an engine keeps Python's lock.
        start_timeout_s: for a worker to load its model.
        max_crashes: so many crashes with less than `healthy_s` between them, and the version is rejected.
        healthy_s: after so long without a crash, earlier ones are forgotten.
        max_delay_s: longest wait before a worker that keeps crashing is started again.
        max_data_bytes: most memory that the worker may allocate (RLIMIT_DATA), or None for as much as there
            is; beyond it, the engine gets an error or crashes.
        niceness: how much it gives way to others, 0 to 19.
        oom_score: from 0 to 1000; the higher, the sooner it is ended where the machine has no memory left.

    Raises:
        ValueError: a value is out of range.
    """

    processes: int = 1
    standby: bool = False
    hang_s: float = 30.0
    start_timeout_s: float = 120.0
    max_crashes: int = 5
    healthy_s: float = 60.0
    max_delay_s: float = 30.0
    max_data_bytes: int | None = None
    niceness: int = 0
    oom_score: int = 200

    def __post_init__(self) -> None:
        times = (self.hang_s, self.start_timeout_s, self.healthy_s, self.max_delay_s)
        if not all(0 < seconds < math.inf for seconds in times) or self.max_crashes < 1:
            raise ValueError(f"expected finite times over 0 and max_crashes of at least 1, got {self}")
        if not 1 <= self.processes <= MAX_PROCESSES:
            raise ValueError(f"expected processes 1 to {MAX_PROCESSES}, got {self}")
        if self.max_data_bytes is not None and self.max_data_bytes <= 0:
            raise ValueError(f"expected max_data_bytes over 0, got {self}")
        if not 0 <= self.niceness <= 19 or not 0 <= self.oom_score <= 1000:
            raise ValueError(f"expected niceness 0 to 19 and oom_score 0 to 1000, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorOptions:
    """What may be changed about one model to hold the limits of the device, and what it must keep.

    Attributes:
        deadline_ms: from a request's arrival to its answer, for 99 of 100, or None.
        variants: of the package to choose from, the preferred first; empty for all.
        threads: numbers of threads to choose from; empty for that of the package alone.
        batches: most rows of a run to choose from; each is at most `scheduling.max_batch`.

    Raises:
        ValueError: a value is out of range.
    """

    deadline_ms: float | None = None
    variants: tuple[str, ...] = ()
    threads: Annotated[tuple[int, ...], Range(1, MAX_THREADS)] = ()
    batches: Annotated[tuple[int, ...], Range(1, MAX_BATCH)] = (1,)

    def __post_init__(self) -> None:
        if not self.batches or min((*self.batches, *self.threads)) < 1:
            raise ValueError(f"expected batches and threads of at least 1, got {self}")
        if self.deadline_ms is not None and not 0 < self.deadline_ms < math.inf:
            raise ValueError(f"deadline_ms is {self.deadline_ms}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How one model is kept: the table `[models.NAME]`.

    Attributes:
        latest: so many of the newest versions are served, where `specific` is empty.
        specific: these versions are served and no others.
        swap: order of a swap; `auto` chooses by the memory that is free.
        threads: of one inference, or None as its package says.
        load_timeout_s: for a version to be opened, tested and run first, or it is rejected; None for 120 s,
            and for as long as TensorRT may build where it does so first.
        instances: how many inferences may run at once; 1 leaves it to what `tune` found here.
        isolated: whether it runs in worker processes of its own; None isolates it if its inputs may end the
            process that runs it (`can_trap`).
        cache: whether equal inputs are answered from the response cache.
        drift: whether inputs and outputs are watched for drift.
        keep_loaded: whether it stays where the memory cap makes others go.
        rollout: `swap` replaces the version in use at once, `canary` first gives the new version a share of
            the calls, `shadow` copies of a share of them.
        canary, shadow, gates: of such a rollout.
        scheduling: of its calls; a `max_batch` of 1 leaves that to what `tune` found here.
        isolation: of its worker processes, if there are any.
        governor: limits to hold by the way in which it is run, or None.

    Raises:
        ValueError: two settings exclude each other.
    """

    latest: Annotated[int, Range(1, 1000)] = 1
    specific: tuple[str, ...] = ()
    swap: SwapOrder = "auto"
    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    load_timeout_s: float | None = None
    instances: Annotated[int, Range(1, MAX_THREADS)] = 1
    isolated: bool | None = None
    cache: bool = False
    drift: bool = True
    keep_loaded: bool = False
    rollout: Literal["swap", "canary", "shadow"] = "swap"
    canary: CanaryOptions = field(default_factory=CanaryOptions)
    shadow: ShadowOptions = field(default_factory=ShadowOptions)
    gates: Gates = field(default_factory=Gates)
    scheduling: SchedulingLimits = field(default_factory=SchedulingLimits)
    isolation: Isolation = field(default_factory=Isolation)
    governor: GovernorOptions | None = None

    def __post_init__(self) -> None:
        if self.rollout != "swap" and (self.latest != 1 or self.specific):
            raise ValueError(
                f"rollout = {self.rollout!r} compares the newest version with the one before, which leaves no"
                " room for latest and specific"
            )
        if self.load_timeout_s == 0:
            raise ValueError("load_timeout_s is 0, expected more: no version is loaded in no time")
        needs_one = self.rollout != "swap" or self.governor is not None
        if self.isolated and self.isolation.processes > 1 and needs_one:
            raise ValueError(
                "a canary, a shadow or a governor needs all of a model in one process, got"
                f" isolation.processes = {self.isolation.processes}; set that to 1, or leave the others out"
            )
