"""Accepts the documents that are signed by the manager's keys.

The root metadata of the repository names these keys. A separate process refreshes the metadata at each
download, and when this module asks for it. This module asks once a day, and when a document is signed by an
unknown key, because the manager may have a new key. The document waits until the refresh has ended.

Anybody at the broker can send documents with unknown keys. Therefore each refresh that brings no new key
doubles the pause before the next refresh, until a day has passed without such documents. After a change of
keys, all devices receive a document with the new key at the same time. Each device therefore delays its
refresh by a random time.
"""

import random
from pathlib import Path
from typing import Final

from edgekit_runtime.agent.documents import Desired
from edgekit_runtime.agent.manager_keys import ManagerKeys, read_held
from edgekit_runtime.agent.signing import UnknownKeyError, unseal

_FIRST_S: Final = (120.0, 1920.0)  # spread, because a whole site is switched on at once
_DAILY_S: Final = 86_400.0
_PAUSE_S: Final = 300.0
_LONGEST_PAUSE_S: Final = 21_600.0


class ObeyedDocuments:
    """Verifies documents, and decides when to refresh the repository's metadata. Not thread-safe."""

    def __init__(self, folder: Path, first_root: str, now_s: float) -> None:
        """Read the keys.

        Args:
            folder: the agent's folder.
            first_root: see `ManagerKeys`.
            now_s: seconds of a clock that is never set back; also for the other methods.
        """
        self._manager_keys = ManagerKeys(folder, first_root)
        self._keys = self._manager_keys.read()
        self._waiting: bytes | None = None  # the newest document by an unknown key
        wait_s = random.uniform(*_FIRST_S) if self._keys else 0.0  # noqa: S311  # no secret
        self._daily_s = now_s + wait_s
        self._next_s, self._pause_s = now_s, _PAUSE_S

    def read_held(self, envelope: str) -> Desired | None:
        """Return the document of the journal, or None if it is missing or its key is no longer trusted."""
        return read_held(envelope, self._keys)

    def unseal(self, payload: bytes, now_s: float, width_s: float) -> Desired | None:
        """Return the document in an envelope, or None if the document waits for a refresh of the metadata.

        Only the newest document with an unknown key waits. It replaces a document that is already waiting.

        Args:
            payload: the envelope.
            now_s: time of the monotonic clock.
            width_s: longest random delay of a refresh, so that devices do not all refresh at once.

        Raises:
            SignatureError: the document is malformed or forged, or its key is unknown soon after a refresh.
        """
        try:
            return unseal(payload, "desired", Desired, self._keys, "desired")
        except UnknownKeyError:
            if self._waiting is None:
                if now_s < self._next_s:
                    raise
                self._next_s = now_s + random.uniform(0.0, width_s)  # noqa: S311  # no secret
        self._waiting = payload
        return None

    def is_refresh_due(self, now_s: float) -> bool:
        """Return whether to refresh the metadata now. `now_s` is the time of the monotonic clock."""
        return now_s >= self._daily_s or (self._waiting is not None and now_s >= self._next_s)

    def follow(self) -> bool:
        """Read the manager keys again after a refresh, and return whether they have changed."""
        before, self._keys = self._keys, self._manager_keys.read()
        return before.keys() != self._keys.keys()

    def end_refresh(
        self, now_s: float, *, was_answered: bool, has_cost: bool, has_new_keys: bool
    ) -> bytes | None:
        """Record the end of a refresh. Return the document that waited for it, or None.

        Args:
            now_s: time of the monotonic clock.
            was_answered: whether the repository answered, even with invalid metadata. If not, the document
                waits for the next refresh.
            has_cost: whether bytes were received. If not, the pause between refreshes does not double.
            has_new_keys: whether the manager's keys have changed.
        """
        self._daily_s = now_s + _DAILY_S
        if has_new_keys or (self._waiting is None and now_s >= self._next_s):
            self._next_s, self._pause_s = now_s, _PAUSE_S
        elif self._waiting is not None:
            self._next_s = now_s + self._pause_s * random.uniform(0.5, 1.5)  # noqa: S311  # no secret
            if has_cost:
                self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S)
        if not was_answered and not has_new_keys:
            return None
        waiting, self._waiting = self._waiting, None
        return waiting
