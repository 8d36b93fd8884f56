"""What is configured and loaded for a governor: all that a service without one imports of it."""

import math
from dataclasses import dataclass
from typing import Annotated

from edgekit_runtime.service.options.ranges import Range
from edgekit_runtime.service.options.scheduling import MAX_BATCH
from edgekit_runtime.sessions.options import MAX_THREADS


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
