"""Options of one model."""

from dataclasses import field
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_runtime.dataclass_json import Count, PositiveBytes, PositiveSeconds, Range
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.system.engines import MAX_THREADS

MAX_BATCH: Final = 4096
"""The maximum rows of a run. The warm-up runs every power of two up to the configured limit."""

SwapOrder: TypeAlias = Literal["auto", "availability", "resource"]
"""Order of a swap: load the new version first, or unload the old one first."""
Rollout: TypeAlias = Literal["swap", "canary", "shadow"]
"""How a new version takes over, see `ModelOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingLimits:
    """Options for scheduling the calls of a model.

    Attributes:
        max_batch: The maximum number of rows in a batch. 1 disables batching. Batching requires a model whose
            rows do not affect each other's outputs, see `rows_are_independent`.
        max_delay_s: How long a call may wait for other calls to join its batch. With 0, only calls that are
            already waiting for a session are batched.
        max_waiting: The maximum number of waiting calls. Further calls are refused.
        levels: The number of priority levels. Level 1 is the most urgent.
        default_level: The priority level of calls that do not state one.
        max_passes: How many batches may skip a level with waiting calls before its oldest call runs.
        short_s: A model runs on the event loop if an inference takes less than this time. 0 means never.
        max_run_s: The time limit of a run with one call. For a batch, it is multiplied by the number of
            calls. A longer run is stopped, and its calls are refused. 0 means no limit.

    Raises:
        ValueError: `default_level` is not a level.
    """

    max_batch: Annotated[int, Range(1, MAX_BATCH)] = 1
    max_delay_s: float = 0.0
    max_waiting: Annotated[int, Range(1, 1 << 20)] = 128
    levels: Annotated[int, Range(1, 256)] = 3
    default_level: int = 2
    max_passes: Count = 8
    short_s: float = 200e-6
    max_run_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.default_level <= self.levels:
            raise ValueError(f"expected default_level within 1..levels, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Options of the worker processes of a model.

    Attributes:
        processes: The number of workers. Each serves a part of the connections.
        standby: Whether another worker loads the model and is ready to take over.
        hang_s: A worker is restarted if it sends no heartbeat for this time.
        start_timeout_s: The time limit for a worker to load its model.
        max_crashes: The number of consecutive crashes after which the version is rejected.
        healthy_s: The number of crashes is reset after a worker has served for this time.
        max_delay_s: The longest delay before a crashed worker is restarted.
        max_data_bytes: The memory limit of a worker (RLIMIT_DATA), or None. Beyond it, the engine reports an
            error or crashes.
        niceness: The niceness of the workers, from 0 to 19.
        oom_score: The OOM score adjustment, from 0 to 1000. When memory runs out, the kernel first kills the
            processes with the highest score.
    """

    processes: Annotated[int, Range(1, 64)] = 1
    standby: bool = False
    hang_s: PositiveSeconds = 30.0
    start_timeout_s: PositiveSeconds = 120.0
    max_crashes: Count = 5
    healthy_s: PositiveSeconds = 60.0
    max_delay_s: PositiveSeconds = 30.0
    max_data_bytes: PositiveBytes | None = None
    niceness: Annotated[int, Range(0, 19)] = 0
    oom_score: Annotated[int, Range(0, 1000)] = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorOptions:
    """The settings of a model that the governor may change to keep the device within its limits.

    Attributes:
        deadline_ms: The limit of the 99th latency percentile, from arrival to response, or None.
        variants: The variants of the package to choose from, in order of preference. Empty means all.
        threads: The numbers of threads to choose from. Empty means only the number that the package states.
        batches: The batch sizes to choose from, each at most `scheduling.max_batch`.

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
    """Options of one model, in the table `[models.NAME]`.

    Attributes:
        latest: The number of newest versions to serve if `specific` is empty.
        specific: The versions to serve, or empty to serve the newest ones.
        swap: Whether a swap loads the new version first (`availability`) or unloads the old one first
            (`resource`). `auto` chooses by the free memory.
        threads: The number of threads per inference, or None for the number that the package states.
        load_timeout_s: The time limit to open, test and warm up a version. A version that exceeds it is
            rejected. The default is 120 s, or longer if TensorRT must build its engine.
        instances: The maximum number of simultaneous inferences. With 1, the result of `tune` on this machine
            is used if there is one.
        isolated: Whether the model runs in its own worker processes. This is the default if its inputs could
            crash or hang the process (`find_hazard`).
        cache: Whether equal inputs are answered from the response cache.
        drift: Whether drift statistics of inputs and outputs are collected.
        keep_loaded: Whether the model stays loaded when other models need memory.
        rollout: `swap` replaces the version in use at once. `canary` first sends a share of the calls to the
            new version. `shadow` first sends copies of a share of the calls to the new version.
        canary: Options of a canary rollout.
        shadow: Options of a shadow rollout.
        gates: The gates of a canary or shadow rollout.
        scheduling: Options for scheduling calls. With a `max_batch` of 1, the result of `tune` is used if
            there is one.
        isolation: Options of the worker processes.
        governor: What the governor may change, or None for nothing.
        max_sequences: The maximum number of simultaneous sequences of a model with states. The states of all
            of them count towards the memory cap.
        sequence_idle_s: A sequence ends after this time without a request.

    Raises:
        ValueError: Two options conflict.
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
    sequence_idle_s: PositiveSeconds = 60.0

    @property
    def trial(self) -> CanaryOptions | ShadowOptions:
        """The options `canary` or `shadow`, depending on `rollout`. Not meaningful for `swap`."""
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
