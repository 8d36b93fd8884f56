"""A limit of failed attempts, so that nobody guesses passwords, codes or tokens."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_FAILURES_A_MINUTE: Final = 20
_MAX_KEYS: Final = 10_000


class FailureLimit:
    """Refuses an address or a name that has failed too often in the last minute; any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def allows(self, key: str) -> bool:
        """Return whether a request of the address or name is looked at."""
        begin, count = self._failures.get(key, (0.0, 0))
        return count < _FAILURES_A_MINUTE or self._clock() - begin >= 60

    def count(self, key: str) -> None:
        """Count one failure."""
        with self._one_at_a_time:
            begin, count = self._failures.pop(key, (self._clock(), 0))
            if self._clock() - begin >= 60:
                begin, count = self._clock(), 0
            self._failures[key] = (begin, count + 1)
            if len(self._failures) > _MAX_KEYS:
                self._failures.popitem(last=False)

    def forgive(self, key: str) -> None:
        """Take back one failure: what was counted before it was looked at has succeeded."""
        with self._one_at_a_time:
            begin, count = self._failures.get(key, (0.0, 0))
            if count:
                self._failures[key] = (begin, count - 1)
