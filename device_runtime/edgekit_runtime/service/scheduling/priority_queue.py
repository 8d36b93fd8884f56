"""The calls that wait for one model, in levels of priority.

Next is the oldest call of the highest level that has one. A level that was passed over `max_passes` times
comes first once, so that no level starves. Nothing here runs or answers a call, or reads a clock.
"""

import math
from collections import deque
from collections.abc import Hashable
from typing import Final

from edgekit_runtime.records import dataclass
from edgekit_runtime.service.scheduling.call import Call

_NEVER: Final = float("inf")


@dataclass(slots=True, eq=False, kw_only=True)
class Queued:
    """A call that waits.

    Attributes:
        since_s: when it came, on the scheduler's clock.
        level: priority level, from 1, the highest.
        rows: size of the first dimension of its inputs; 1 where calls are not batched.
        kind: calls of one kind may run in one batch; a call of kind None runs alone.
    """

    call: Call
    since_s: float
    level: int
    rows: int
    size_bytes: int
    kind: Hashable | None


class PriorityQueue:
    """A queue with priority levels; calls of a level are in the order of arrival.

    Attributes:
        rows: number of rows in all calls that wait.
        next_deadline_s: lower bound of the deadlines, or infinity; `expire` updates it.
    """

    __slots__ = ("_levels", "_max_bytes", "_max_passes", "_passes", "next_deadline_s", "rows")

    def __init__(self, levels: int, max_passes: int, max_bytes: float = math.inf) -> None:
        """Make an empty queue.

        Args:
            levels: number of priority levels, at least 1.
            max_passes: batches in a row that may run before a waiting call of a lower level.
            max_bytes: size limit of the inputs of one batch.
        """
        self._levels: tuple[deque[Queued], ...] = tuple(deque() for _ in range(levels))
        self._passes = [0] * levels
        self._max_passes, self._max_bytes = max_passes, max_bytes
        self.rows = 0
        self.next_deadline_s = _NEVER

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def push(self, queued: Queued) -> None:
        """Add a call at the end of its level."""
        self._levels[queued.level - 1].append(queued)
        self.rows += queued.rows
        if queued.call.deadline_s is not None:
            self.next_deadline_s = min(self.next_deadline_s, queued.call.deadline_s)

    @property
    def oldest_s(self) -> float:
        """When the oldest waiting call arrived. At least one call must wait."""
        return min(level[0].since_s for level in self._levels if level)

    def choose(self, max_rows: int) -> list[Queued]:
        """Return the next batch without removing it; empty if no call waits.

        The next call is in the batch. Calls of the same kind join it, higher levels first, up to `max_rows`
        rows and `max_bytes` of inputs in all. A larger call runs alone.
        """
        lead = self._lead()
        if lead is None:
            return []
        batch, rows, size_bytes = [lead], lead.rows, lead.size_bytes
        if lead.kind is None or rows >= max_rows:
            return batch
        for level in self._levels:
            for queued in level:
                has_room = (
                    rows + queued.rows <= max_rows and size_bytes + queued.size_bytes <= self._max_bytes
                )
                if queued.kind == lead.kind and queued is not lead and has_room:
                    batch.append(queued)
                    rows += queued.rows
                    size_bytes += queued.size_bytes
            if rows == max_rows:
                break
        return batch

    def remove(self, batch: list[Queued]) -> None:
        """Remove a batch that `choose` returned.

        Each lower level with waiting calls counts one more pass, see `max_passes`.
        """
        first = min(queued.level for queued in batch)
        batch_ids = set(map(id, batch))
        for index, level in enumerate(self._levels):
            if not level:
                continue
            if id(level[0]) in batch_ids:
                self._passes[index] = 0
            elif index + 1 > first:
                self._passes[index] += 1
            if len(batch) == 1 and level[0] is batch[0]:
                level.popleft()
            else:
                self._keep(index, [queued for queued in level if id(queued) not in batch_ids])
        self.rows -= sum(queued.rows for queued in batch)

    def expire(self, now_s: float) -> list[Queued]:
        """Remove and return the calls whose deadline has passed."""
        if now_s < self.next_deadline_s:
            return []
        late = []
        for index, level in enumerate(self._levels):
            is_late = [q.call.deadline_s is not None and q.call.deadline_s <= now_s for q in level]
            late += [queued for queued, over in zip(level, is_late, strict=True) if over]
            self._keep(index, [queued for queued, over in zip(level, is_late, strict=True) if not over])
        self.rows -= sum(queued.rows for queued in late)
        deadlines = [q.call.deadline_s for level in self._levels for q in level]
        self.next_deadline_s = min((d for d in deadlines if d is not None), default=_NEVER)
        return late

    def sweep(self) -> list[Queued]:
        """Remove and return the calls whose clients have gone."""
        unwanted = [queued for level in self._levels for queued in level if queued.call.is_unwanted()]
        for index, level in enumerate(self._levels):
            self._keep(index, [queued for queued in level if queued not in unwanted])
        self.rows -= sum(queued.rows for queued in unwanted)
        return unwanted

    def displace(self, level: int) -> Queued | None:
        """Remove and return the youngest call of the lowest level below `level`, or None."""
        for index in range(len(self._levels) - 1, level - 1, -1):
            if self._levels[index]:
                queued = self._levels[index].pop()
                self.rows -= queued.rows
                return queued
        return None

    def _lead(self) -> Queued | None:
        for index, level in enumerate(self._levels):
            if level and self._passes[index] >= self._max_passes:
                return level[0]
        for level in self._levels:
            if level:
                return level[0]
        return None

    def _keep(self, index: int, remaining: list[Queued]) -> None:
        if len(remaining) < len(self._levels[index]):
            self._levels[index].clear()
            self._levels[index].extend(remaining)
