"""Options of one model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgekit_runtime.service.options.governor import GovernorOptions
from edgekit_runtime.service.options.isolation import Isolation
from edgekit_runtime.service.options.rollout import Rollout
from edgekit_runtime.service.options.scheduling import SchedulingLimits
from edgekit_runtime.service.options.version_policy import SwapOrder, VersionPolicy


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How one model is kept.

    Attributes:
        policy: which of its versions are served.
        swap: order of a swap, or None to choose by the memory that is free.
        threads: of one inference, or None as its package says.
        load_timeout_s: for a version to be opened, tested and run first, or it is rejected; None for 120 s,
            and for as long as TensorRT may build where it does so first.
        instances: how many inferences may run at once; 1 leaves it to what `tune` found here.
        scheduling: of its calls; a `max_batch` of 1 leaves that to what `tune` found here.
        isolation: of the process of its own that runs it, or None to run it in the service's.
        opener: what opens its packages where that is not done in this process, or None; see `Workers.open`.
        trap_opener: what opens packages whose inputs may end the process that runs them (`can_trap`), or None
            to open them as all others.
        in_process: whether it stays in the service's process whatever its packages hold.
        rollout: how a new version takes over.
        cache: whether equal inputs are answered from the response cache.
        drift: whether inputs and outputs are watched for drift.
        keep_loaded: whether it stays where the memory cap makes others go.
        governor: limits to hold by the way in which it is run, or None.
    """

    policy: VersionPolicy = field(default_factory=VersionPolicy)
    swap: SwapOrder | None = None
    threads: int | None = None
    load_timeout_s: float | None = None
    instances: int = 1
    scheduling: SchedulingLimits = field(default_factory=SchedulingLimits)
    isolation: Isolation | None = None
    opener: Callable[..., Any] | None = None
    trap_opener: Callable[..., Any] | None = None
    in_process: bool = False
    rollout: Rollout = field(default_factory=Rollout)
    cache: bool = False
    drift: bool = True
    keep_loaded: bool = False
    governor: GovernorOptions | None = None
