"""Decides when a server is probed: after a fault, and while requests do not measure the link.

A probe runs on a thread of its own, so a request never waits for one. Pure: clock and chance are arguments.

Source: Nygard, "Release It!", 2nd edition, section 5.2; back-off with full jitter as in Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from typing import Final

_FIRST_S: Final = 0.5
_MOST_S: Final = 60.0
_MOST_STEPS: Final = 16
_LEAST_PAUSE_S: Final = 0.25
_SHARE: Final = 0.05  # of the time since the server was left, between two probes
_LINK_SHARE: Final = 5  # a probe takes the link for at most one part of so many
_BUSY_S: Final = 0.1  # how long a probe waits for a request to end before it is sent beside it


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


class ProbeSchedule:
    """When the link is probed. The pause grows with the time since a plan with the server was left.

    So a better link is noticed after a twentieth of the time that it was bad, and the number of probes grows
    only with the logarithm of that time. From 20 minutes on there is one a minute.

    Attributes:
        due_s: when the next probe may be sent.
    """

    __slots__ = ("_left_s", "due_s")

    def __init__(self, now_s: float) -> None:
        """Begin with a probe that is due."""
        self._left_s, self.due_s = now_s, float("-inf")

    def restart(self, now_s: float) -> None:
        """Probe often again: a plan that had answered is left."""
        self._left_s = now_s
        self.due_s = min(self.due_s, now_s + _LEAST_PAUSE_S)

    def note_probe(self, now_s: float, took_s: float) -> None:
        """Take that a probe has ended."""
        pause_s = max(_SHARE * (now_s - self._left_s), (_LINK_SHARE - 1) * took_s, _LEAST_PAUSE_S)
        self.due_s = now_s + min(pause_s, _MOST_S)

    def is_due(self, now_s: float, *, is_busy: bool) -> bool:
        """Return whether to probe now; rather between requests than beside one."""
        return now_s >= self.due_s + (_BUSY_S if is_busy else 0.0)
