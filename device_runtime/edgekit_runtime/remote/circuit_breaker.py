"""Decides whether a server may be used: after a fault only probes go there, until one is answered rightly.

A probe runs on a thread of its own, so a request never waits for one. Pure: clock and chance are arguments.

Source: Nygard, "Release It!", 2nd edition, section 5.2; back-off with full jitter as in Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from typing import Final

_FIRST_S: Final = 0.5
_MOST_S: Final = 60.0
_MOST_STEPS: Final = 16


class CircuitBreaker:
    """Closed: requests go to the server. Open: nothing does. Half-open: one probe may.

    Attributes:
        is_closed: whether requests may go to the server.
        cause: why it is open, in a sentence.
    """

    __slots__ = ("_failures", "_retry_s", "cause", "is_closed")

    def __init__(self) -> None:
        """Begin open, and ready for the first probe."""
        self.is_closed = False
        self.cause = "the server has not answered yet"
        self._failures = 0
        self._retry_s = float("-inf")

    def may_probe(self, now_s: float) -> bool:
        """Return whether it is time for a probe."""
        return not self.is_closed and now_s >= self._retry_s

    @property
    def retry_s(self) -> float:
        """When the next probe may be sent."""
        return self._retry_s

    def succeed(self) -> None:
        """Close: the server answered rightly."""
        self.is_closed, self.cause, self._failures = True, "", 0

    def fail(self, now_s: float, cause: str, chance: float, at_least_s: float = 0.0) -> None:
        """Open, for longer with each failure in a row.

        Args:
            now_s: now.
            cause: what happened, in a sentence.
            chance: uniform in 0..1.
            at_least_s: what the server asked to wait; of that at most a minute is granted.
        """
        wait_s = min(_MOST_S, _FIRST_S * 2.0 ** min(self._failures, _MOST_STEPS))
        self._failures += 1
        self.is_closed, self.cause = False, cause
        self._retry_s = now_s + max(min(at_least_s, _MOST_S), wait_s * (0.5 + chance / 2))
