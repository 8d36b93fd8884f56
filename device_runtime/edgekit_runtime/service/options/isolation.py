"""Options of a model that runs in worker processes of its own."""

import math
from dataclasses import dataclass
from typing import Final

MAX_PROCESSES: Final = 64


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
