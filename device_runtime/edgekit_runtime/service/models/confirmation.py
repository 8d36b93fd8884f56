"""Records in the slots that a loaded version works, after it has served for some time.

The delay is needed because some faulty versions crash only when they serve requests.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Final

from edgekit_runtime.errors import EdgekitError, UnavailableError
from edgekit_runtime.service.models.source import Source
from edgekit_runtime.service.serving.served_version import Served

_WAITS_TO_RECORD: Final = 6  # as long as for a confirmation, after a record that failed

_logger = logging.getLogger(__name__)


class Confirmations:
    """The versions that wait for confirmation. Used on the event loop's thread."""

    def __init__(self, source: Source, disk: Executor) -> None:
        self._source, self._disk = source, disk
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._crashed: set[tuple[str, str]] = set()
        self._confirmed: set[tuple[str, str]] = set()  # and serving since then

    def schedule(self, fresh: Iterable[Served]) -> None:
        """Confirm versions after they have served for `Source.confirm_after_s` seconds."""
        for served in fresh:
            self._confirm_after(served.loaded.manifest.name, served.version, self._source.confirm_after_s)

    def postpone(self, name: str, version: str) -> None:
        """Restart the waiting time of a version after a crash."""
        if (name, version) in self._timers:
            self._timers[name, version].cancel()
            self._confirm_after(name, version, self._source.confirm_after_s)
            self._crashed.add((name, version))

    def cancel(self, old: Iterable[Served]) -> None:
        """Cancel the confirmation of versions that have stopped serving."""
        for served in old:
            self._end_wait(served.loaded.manifest.name, served.version)

    def confirm_all(self) -> None:
        """Confirm all waiting versions now, except those that crashed while waiting."""
        for name, version in list(self._timers):
            if (name, version) in self._crashed:
                self._end_wait(name, version)
            else:
                self.confirm(name, version)

    def confirm(self, name: str, version: str) -> None:
        self._end_wait(name, version)
        self._confirmed.add((name, version))
        self._disk.submit(self._record, asyncio.get_running_loop(), name, version)

    def _confirm_after(self, name: str, version: str, delay_s: float) -> None:
        confirm = functools.partial(self.confirm, name, version)
        self._timers[name, version] = asyncio.get_running_loop().call_later(delay_s, confirm)

    def _end_wait(self, name: str, version: str) -> None:
        self._crashed.discard((name, version))
        self._confirmed.discard((name, version))
        timer = self._timers.pop((name, version), None)
        if timer is not None:
            timer.cancel()

    def _record(self, loop: asyncio.AbstractEventLoop, name: str, version: str) -> None:
        try:
            self._source.confirm(name, version)
        except UnavailableError as error:
            # Else it would count as begun and never confirmed, and be rejected for that at a later start.
            _logger.warning("%s %s serves well, but this cannot be recorded yet: %s", name, version, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._record_later, name, version)
        except EdgekitError as error:
            _logger.warning("%s %s serves well, but this cannot be recorded: %s", name, version, error)

    def _record_later(self, name: str, version: str) -> None:
        if (name, version) in self._confirmed:  # it still serves
            self._confirm_after(name, version, max(1.0, _WAITS_TO_RECORD * self._source.confirm_after_s))
