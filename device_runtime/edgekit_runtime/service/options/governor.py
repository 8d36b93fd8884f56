"""What is configured and loaded for a governor: all that a service without one imports of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.service.options.ranges import Range
from edgekit_runtime.service.options.scheduling import MAX_BATCH
from edgekit_runtime.sessions.instances import WarmRun
from edgekit_runtime.sessions.options import MAX_THREADS
from edgekit_runtime.sessions.session import Session


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


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWay:
    """A variant that is open with a number of threads, for a governor to choose.

    Attributes:
        variant: its name.
        threads: of one run; 0 for those of the package.
        instances: its sessions, which proved themselves.
        warm_runs: what was measured before there was traffic.
        figures: of the variant, from the manifest.
        max_batch: rows that it may take in one run; 1 where they change each other's answers.
    """

    variant: str
    threads: int
    instances: tuple[Session, ...]
    warm_runs: tuple[WarmRun, ...]
    figures: Mapping[str, JsonValue]
    max_batch: int
