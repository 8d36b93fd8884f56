"""Options of one model."""

from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.system.engines import MAX_THREADS

MAX_BATCH: Final = 4096
"""Rows of one run. The warm-up runs all powers of two up to the configured number."""

SwapOrder: TypeAlias = Literal["auto", "availability", "resource"]
"""Order of a swap: load the new version first, or unload the old one first."""
Rollout: TypeAlias = Literal["swap", "canary", "shadow"]
"""How a new version takes over, see `ModelOptions`."""

_Count: TypeAlias = Annotated[int, Range(1, (1 << 31) - 1)]
_Seconds: TypeAlias = Annotated[float, Range(0.001, 10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Scheduling of one model's calls.

    Attributes:
        max_batch: most rows that run together; 1 turns batching off. Batching needs a model whose rows do not
            change each other's outputs, see `rows_are_independent`.
        max_delay_s: longest wait of a call for other calls to join its batch. With 0, a batch is made only of
            calls that wait for a session anyway.
        max_waiting: most calls that wait; further ones are refused.
        levels: number of priority levels.
        default_level: level of calls that state none.
        max_passes: how many batches of other levels may run before a waiting level gets one.
        short_s: a model runs on the thread of the event loop if its runs take less time; 0 for never.
        max_run_s: time limit of a run, for each call in its batch; 0 for no limit. A longer run is stopped,
            and its calls are refused.

    Raises:
        ValueError: `default_level` is no level.
    """

    max_batch: Annotated[int, Range(1, MAX_BATCH)] = 1
    max_delay_s: float = 0.0
    max_waiting: Annotated[int, Range(1, 1 << 20)] = 128
    levels: Annotated[int, Range(1, 256)] = 3
    default_level: int = 2
    max_passes: _Count = 8
    short_s: float = 200e-6
    max_run_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.default_level <= self.levels:
            raise ValueError(f"expected default_level within 1..levels, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The worker processes of one model.

    Attributes:
        processes: number of workers; each serves a share of the connections.
        standby: whether one more worker loads the model and waits to take over.
        hang_s: a worker that sends no heartbeat for this time is restarted.
        start_timeout_s: time limit for a worker to load its model.
        max_crashes: the version is rejected after this number of crashes in a row.
        healthy_s: a crash after this much time in service counts as the first in a row.
        max_delay_s: longest wait before a crashed worker is restarted.
        max_data_bytes: limit of a worker's memory (RLIMIT_DATA), or None. Beyond it, the engine reports an
            error or crashes.
        niceness: niceness of the workers, 0 to 19.
        oom_score: 0 to 1000; the kernel kills processes with a higher score first if memory runs out.
    """

    processes: Annotated[int, Range(1, 64)] = 1
    standby: bool = False
    hang_s: _Seconds = 30.0
    start_timeout_s: _Seconds = 120.0
    max_crashes: _Count = 5
    healthy_s: _Seconds = 60.0
    max_delay_s: _Seconds = 30.0
    max_data_bytes: Annotated[int | None, Range(1, 1 << 50)] = None
    niceness: Annotated[int, Range(0, 19)] = 0
    oom_score: Annotated[int, Range(0, 1000)] = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorOptions:
    """The settings of one model that a governor may change to hold the limits of the device.

    Attributes:
        deadline_ms: time limit that 99 of 100 requests must keep, from arrival to response; or None.
        variants: variants of the package that it may choose, the preferred first; empty for all.
        threads: numbers of threads that it may choose; empty for the number that the package states.
        batches: batch sizes that it may choose, each at most `scheduling.max_batch`.

    Raises:
        ValueError: `batches` is empty.
    """

    deadline_ms: Annotated[float | None, Range(0.001, 10**9)] = None
    variants: tuple[str, ...] = ()
    threads: Annotated[tuple[int, ...], Range(1, MAX_THREADS)] = ()
    batches: Annotated[tuple[int, ...], Range(1, MAX_BATCH)] = (1,)

    def __post_init__(self) -> None:
        if not self.batches:
            raise ValueError("batches is empty, expected one size or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How one model is served: the table `[models.NAME]`.

    Attributes:
        latest: number of newest versions that are served if `specific` is empty.
        specific: the versions that are served; empty for the newest ones.
        swap: order of a swap; `auto` chooses by the memory that is free.
        threads: threads of one inference, or None for the number that the package states.
        load_timeout_s: time limit to open, test and warm up a version; beyond it, the version is rejected. By
            default 120 s, and longer if TensorRT must build its engine.
        instances: inferences that may run at once. With 1, the result of `tune` on this machine is used, if
            any.
        isolated: whether it runs in worker processes of its own. By default only if its inputs could crash or
            hang the process (`find_hazard`).
        cache: whether equal inputs are answered from the response cache.
        drift: whether drift statistics of inputs and outputs are collected.
        keep_loaded: whether it stays loaded when others need memory under the cap.
        rollout: `swap` replaces the version in use at once; `canary` first gives the new version a share of
            the calls; `shadow` gives it copies of a share of the calls.
        canary, shadow, gates: options of a rollout by canary or shadow.
        scheduling: how its calls are scheduled. With a `max_batch` of 1, the result of `tune` is used, if
            any.
        isolation: options of its worker processes, if it has any.
        governor: what the governor may change, or None if it may change nothing.
        max_sequences: for a model with states, most sequences at one time. The states of all of them count
            under the memory cap.
        sequence_idle_s: time without a request after which a sequence ends.

    Raises:
        ValueError: two settings exclude each other.
    """

    latest: Annotated[int, Range(1, 1000)] = 1
    specific: tuple[str, ...] = ()
    swap: SwapOrder = "auto"
    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    load_timeout_s: Annotated[float | None, Range(1e-6, 10**9)] = None
    instances: Annotated[int, Range(1, MAX_THREADS)] = 1
    isolated: bool | None = None
    cache: bool = False
    drift: bool = True
    keep_loaded: bool = False
    rollout: Rollout = "swap"
    canary: CanaryOptions = field(default_factory=CanaryOptions)
    shadow: ShadowOptions = field(default_factory=ShadowOptions)
    gates: Gates = field(default_factory=Gates)
    scheduling: SchedulingLimits = field(default_factory=SchedulingLimits)
    isolation: Isolation = field(default_factory=Isolation)
    governor: GovernorOptions | None = None
    max_sequences: Annotated[int, Range(1, 1 << 20)] = 1024
    sequence_idle_s: _Seconds = 60.0

    @property
    def trial(self) -> CanaryOptions | ShadowOptions:
        """The options `canary` or `shadow`, as `rollout` says. Meaningless for `swap`."""
        return self.canary if self.rollout == "canary" else self.shadow

    def __post_init__(self) -> None:
        if self.rollout != "swap" and (self.latest != 1 or self.specific):
            raise ValueError(
                f"rollout = {self.rollout!r} compares the newest version with the previous one, so"
                " latest and specific must not be set"
            )
        needs_one = self.rollout != "swap" or self.governor is not None
        if self.isolated and self.isolation.processes > 1 and needs_one:
            raise ValueError(
                "a canary, a shadow or a governor needs all of a model in one process, got"
                f" isolation.processes = {self.isolation.processes}; set that to 1, or leave the others out"
            )
