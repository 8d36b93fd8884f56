"""When the agent verifies the repository's metadata without a download, to learn the manager's keys.

It does so once a day, and when a document names an unknown key: the manager's key may have been exchanged.
Anybody at the broker can send such documents. So each of these refreshes that brings no new key doubles the
pause before the next one, until a day passes without them. No clock here: callers state the time.
"""

import random
from typing import Final

_FIRST_S: Final = (120.0, 1920.0)  # spread: a whole site is switched on at once
_DAILY_S: Final = 86_400.0
_PAUSE_S: Final = 300.0
_LONGEST_PAUSE_S: Final = 21_600.0


class MetadataRefresh:
    """Decides when the metadata is verified; one thread uses it."""

    def __init__(self, now_s: float) -> None:
        """Begin without a document that waits.

        Args:
            now_s: seconds of a clock that is never set back; also for the other methods.
        """
        self._waiting: bytes | None = None  # the newest document by an unknown key
        self._daily_s = now_s + random.uniform(*_FIRST_S)  # noqa: S311  # no secret
        self._next_s, self._pause_s = now_s, _PAUSE_S

    def hold(self, payload: bytes, now_s: float) -> bool:
        """Keep a document by an unknown key until the next refresh.

        Documents of a broker that sends many replace one another: the manager repeats its own.

        Args:
            payload: envelope of the document.
            now_s: see `__init__`.

        Returns:
            False in the pause after a refresh, which has shown that the fleet has no such key.
        """
        if self._waiting is None and now_s < self._next_s:
            return False
        self._waiting = payload
        return True

    def is_due(self, now_s: float) -> bool:
        """Return whether it is time for a refresh."""
        return now_s >= (self._daily_s if self._waiting is None else self._next_s)

    def end(self, now_s: float, *, was_answered: bool, has_new_keys: bool) -> bytes | None:
        """Note the end of a refresh; returns the document that waited for it.

        Args:
            now_s: see `__init__`.
            was_answered: whether the repository answered, be it with metadata that was refused; else the
                document goes on waiting.
            has_new_keys: whether the manager's keys have changed.
        """
        self._daily_s = now_s + _DAILY_S
        if has_new_keys or (self._waiting is None and now_s >= self._next_s):
            self._next_s, self._pause_s = now_s, _PAUSE_S
        elif self._waiting is not None:
            self._next_s, self._pause_s = now_s + self._pause_s, min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
        if not was_answered and not has_new_keys:
            return None
        waiting, self._waiting = self._waiting, None
        return waiting
