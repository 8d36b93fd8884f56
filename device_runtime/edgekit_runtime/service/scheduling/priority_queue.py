"""A queue with priority levels for the calls that wait for one model.

The oldest call of the highest level is next. A level that was skipped `max_passes` times comes first once, so
that no level starves. The queue does not run or answer calls, and does not read a clock.
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
    """A waiting call.

    Attributes:
        since_s: The time of arrival on the scheduler's clock.
        level: The priority level. 1 is the highest.
        rows: The size of the first dimension of the inputs, or 1 if calls are not batched.
        kind: Calls with the same kind may run in one batch. A call with the kind None runs alone.
    """

    call: Call
    since_s: float
    level: int
    rows: int
    size_bytes: int
    kind: Hashable | None


class PriorityQueue:
    """A queue with priority levels. The calls of each level are in the order of arrival.

    Attributes:
        rows: The number of rows of all waiting calls.
        next_deadline_s: A lower bound of the deadlines of all waiting calls, initially infinity.
    """

    __slots__ = ("_levels", "_max_bytes", "_max_passes", "_passes", "next_deadline_s", "rows")

    def __init__(self, levels: int, max_passes: int, max_bytes: float = math.inf) -> None:
        """Create an empty queue.

        Args:
            levels: The number of priority levels, at least 1.
            max_passes: How many batches may run in a row while a call of a lower level waits.
            max_bytes: The size limit of the inputs of a batch.
        """
        self._levels: tuple[deque[Queued], ...] = tuple(deque() for _ in range(levels))
        self._passes = [0] * levels
        self._max_passes, self._max_bytes = max_passes, max_bytes
        self.rows = 0
        self.next_deadline_s = _NEVER

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def push(self, queued: Queued) -> None:
        """Append a call to its level."""
        self._levels[queued.level - 1].append(queued)
        self.rows += queued.rows
        if queued.call.deadline_s is not None:
            self.next_deadline_s = min(self.next_deadline_s, queued.call.deadline_s)

    @property
    def oldest_s(self) -> float:
        """The arrival time of the oldest waiting call. The queue must not be empty."""
        return min(level[0].since_s for level in self._levels if level)

    def choose(self, max_rows: int) -> list[Queued]:
        """Return the next batch without removing it. The batch is empty if no call waits.

        The batch starts with the next call. Calls of the same kind join it, higher levels first, up to
        `max_rows` rows and `max_bytes` of inputs in total. A call with more rows runs alone.
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

        Lower levels whose oldest call is not in the batch are counted as skipped, see `max_passes`.
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
        """Remove and return the calls whose deadlines have passed."""
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
        """Remove and return the calls whose clients have disconnected."""
        unwanted = [queued for level in self._levels for queued in level if queued.call.is_unwanted()]
        for index, level in enumerate(self._levels):
            self._keep(index, [queued for queued in level if queued not in unwanted])
        self.rows -= sum(queued.rows for queued in unwanted)
        return unwanted

    def displace(self, level: int) -> Queued | None:
        """Remove and return the newest call of the lowest level below `level`, or None if there is none."""
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
