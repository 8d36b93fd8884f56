"""Time-outs for very many connections with one timer.

A connection says until when it may stay as it is; that costs two attributes, no timer. Every tick looks only
at the connections that can be due. Ticks are counted, not read from a clock: while the loop is held up, no
client's bytes are taken, so that time counts against no client.
"""

import asyncio
from typing import Final, Protocol

TICK_S: Final = 0.5
NEVER: Final = 1 << 62


class Timed(Protocol):
    """What waits on the wheel.

    Attributes:
        expires: the tick after which `on_timeout` is called; may be put off at any time.
        looked_at: the tick at which the wheel looks at it next, `NEVER` where it does not; the wheel's own.
    """

    expires: int
    looked_at: int

    def on_timeout(self) -> None:
        """The tick has passed."""


class Wheel:
    """Buckets of connections by the tick at which to look at them.

    Attributes:
        now: the present tick.
    """

    __slots__ = ("_buckets", "_count", "_loop", "_timer", "now")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, set[Timed]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.now = 0

    def expire(self, item: Timed, after_s: float) -> None:
        """Let `item` time out in `after_s` seconds; for one whose time only gets longer, set `expires`."""
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._turn)
        item.expires = self.now + ticks(after_s)
        if item.expires < item.looked_at:
            self._put(item, item.expires)

    def drop(self, item: Timed) -> None:
        """Forget `item`."""
        bucket = self._buckets.get(item.looked_at)
        if bucket is not None:
            bucket.discard(item)
        item.looked_at = NEVER

    def close(self) -> None:
        """Stop; no item times out any more."""
        self._buckets.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _put(self, item: Timed, tick: int) -> None:
        bucket = self._buckets.get(item.looked_at)
        if bucket is not None:
            bucket.discard(item)
        item.looked_at = tick
        self._buckets.setdefault(tick, set()).add(item)

    def _turn(self) -> None:
        self.now += 1
        for item in self._buckets.pop(self.now, ()):
            item.looked_at = NEVER
            if item.expires <= self.now:
                item.on_timeout()
            elif item.expires < NEVER:
                self._put(item, item.expires)
        if self._buckets:
            self._timer = self._loop.call_later(TICK_S, self._turn)
        else:
            self._timer = None


def ticks(seconds: float) -> int:
    """Return how many ticks surely last `seconds`."""
    return int(seconds / TICK_S) + 2
