"""Periodic tasks of the manager, which sign the repository and delete old samples and figures."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Final

from sqlalchemy.orm import Session

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.manager.expiry import Expiry, list_expiries
from edgekit_fleet.manager.inbox import DeviceIndex
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.releases.withdrawn import list_withdrawn
from edgekit_fleet.samples.deletion import delete_unwanted
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.figures import forget_old_figures
from edgekit_runtime.errors import ConfigError, OutputError, PackageError

_REFRESH_S: Final = 600.0
_CLEAN_S: Final = 86_400.0
_FIGURES_S: Final = 3600.0
_DEVICES_AT_ONCE: Final = 200  # devices whose old figures are deleted in one upkeep
_log = logging.getLogger(__name__)


class RepositoryUpkeep:
    """Signs and cleans the repository, and deletes old samples.

    A refresh is due every ten minutes. It runs in its own task, so it does not delay the heartbeats of the
    manager's loop.
    """

    def __init__(
        self,
        repository: TufRepository | None,
        authority: Authority,
        store: Store,
        vault: SampleVault | None = None,
    ) -> None:
        """Prepare the tasks. `repository` and `vault` are None if another manager has them."""
        self._repository, self._authority, self._store = repository, authority, store
        self._vault = vault
        self._task: asyncio.Task[list[Expiry]] | None = None
        self._refreshed_at = self._cleaned_at = float("-inf")  # of the monotonic clock

    def rejoin(self) -> None:
        """Force a refresh at the next call of `begin`, because this manager has joined again."""
        self._refreshed_at = float("-inf")

    def begin(self, now: float) -> list[Expiry]:
        """Start a refresh in the background unless one is running. Return the expiries of the last refresh.

        The result is empty while a refresh is running, and after a refresh that failed or was not due. `now`
        is in seconds since 1970.
        """
        last = self._task
        if last is not None and not last.done():
            return []
        self._task = asyncio.create_task(self._refresh(now))
        return [] if last is None else last.result()

    async def close(self) -> None:
        """Cancel a running refresh, and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _refresh(self, now: float) -> list[Expiry]:
        """Sign and clean the repository if this is due. Return everything in the fleet that expires."""
        repository, clock = self._repository, time.monotonic()
        if repository is None or clock - self._refreshed_at < _REFRESH_S or not repository.exists:
            return []
        try:
            await asyncio.to_thread(repository.refresh, now)
        except OutputError as error:  # as on a full disk
            _log.error("%s; trying again", error)
            return []
        except PackageError as error:  # also a missing key; devices report `stale` if nobody repairs it
            _log.error("the repository cannot be signed again: %s", error)
        self._refreshed_at = clock
        await self._delete_samples(now)
        if clock - self._cleaned_at >= _CLEAN_S:
            await self._clean(repository, now)
        try:
            return await asyncio.to_thread(list_expiries, self._authority, repository)
        except (PackageError, ConfigError) as error:
            _log.error("%s", error)
            return []

    async def _delete_samples(self, now: float) -> None:
        if self._vault is None:
            return
        try:
            await asyncio.to_thread(delete_unwanted, self._store, self._vault, now)
        except (OutputError, OSError) as error:
            _log.error("samples are not deleted: %s; trying again", error)

    async def _clean(self, repository: TufRepository, now: float) -> None:
        try:
            removed = await asyncio.to_thread(self._remove_unused, repository, now)
        except (OutputError, PackageError) as error:  # also a missing key
            _log.error("%s", error)
            return
        self._cleaned_at = time.monotonic()
        if removed:
            _log.info("deleted %d files of the repository that nothing has named for a day", removed)

    def _remove_unused(self, repository: TufRepository, now: float) -> int:
        def find_withdrawn() -> set[str]:
            with self._store.snapshot() as session:
                return list_withdrawn(session, now - _CLEAN_S)

        repository.withdraw(find_withdrawn, now)  # a process may have been killed before it withdrew them
        return repository.remove_unused(now)


class FigureUpkeep:
    """Deletes old figures, for a few devices at a time."""

    def __init__(self, index: DeviceIndex) -> None:
        """Begin with the first device."""
        self._index = index
        self._devices: Iterator[str] = iter(())  # whose old figures are still to be deleted
        self._begun_at = float("-inf")

    def forget_next(self, session: Session, now: float) -> None:
        """Delete the old figures of the next few devices. Every hour, a new pass over all devices begins.

        `now` is in seconds since 1970.
        """
        devices = list(itertools.islice(self._devices, _DEVICES_AT_ONCE))
        if not devices and now - self._begun_at >= _FIGURES_S:
            self._begun_at, self._devices = now, iter(list(self._index.devices))
            devices = list(itertools.islice(self._devices, _DEVICES_AT_ONCE))
        if devices:
            forget_old_figures(session, devices, now)
