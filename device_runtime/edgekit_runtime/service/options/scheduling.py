"""The limits of one model's scheduling."""

import math
from dataclasses import dataclass
from typing import Annotated, Final

from edgekit_runtime.service.options.ranges import Range

MAX_BATCH: Final = 4096
"""Of one run: the warm-up runs all powers of two up to what is configured."""


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
