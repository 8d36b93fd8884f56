"""A whole fleet on one machine: authority, repository, store, broker, web server and manager."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.manager.control_loop import ControlLoop, Decide, local_parts
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.store import lease
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.web.server import WebServer
from edgekit_runtime.errors import ConfigError

_LOCAL_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFleet:
    """What `start` has started.

    Attributes:
        folder, settings, store, authority, broker: of the fleet.
        loop: the manager, which `run` runs.
        is_new: whether the fleet was made just now.
    """

    folder: FleetFolder
    settings: FleetSettings
    store: Store
    authority: Authority
    broker: Mosquitto
    loop: ControlLoop
    is_new: bool

    async def run(self, stop: asyncio.Event) -> None:
        """Manage the fleet until `stop` is set.

        Raises:
            UnavailableError: another manager has taken over.
            TransportError: the broker cannot be reached.
        """
        await self.loop.run(stop)


def open_authority(folder: FleetFolder, settings: FleetSettings) -> Authority:
    """Return the authority, with a certificate of the servers for their names; makes what is missing.

    Raises:
        ConfigError: a file is malformed.
        OutputError: the folder cannot be written.
    """
    authority = Authority(folder.identity)
    authority.make_server(tuple(dict.fromkeys((*settings.names, *_LOCAL_NAMES))))
    return authority


@contextlib.contextmanager
def start(
    folder: FleetFolder, settings: FleetSettings, decide: Decide | None = None
) -> Iterator[RunningFleet]:
    """Start a fleet, and end all of it with the block; makes what is missing.

    Args:
        folder: of the fleet.
        settings: kept in the folder.
        decide: instead of the rollouts, for tests.

    Raises:
        ConfigError: the settings are wrong, or mosquitto is missing.
        UnavailableError: another manager is in charge.
        TransportError: a port is taken.
        OutputError: the folder cannot be written.
    """
    if settings.host not in ("127.0.0.1", "::1") and settings.names == ("127.0.0.1",):
        raise ConfigError(
            f"{settings.host} is reachable from elsewhere, but devices would be sent to 127.0.0.1; name this"
            " machine with --name"
        )
    is_new = not folder.has_settings
    folder.write_settings(settings)
    authority = open_authority(folder, settings)
    repository = TufRepository(folder.repository, folder.repository_keys)
    if not repository.exists:
        repository.create(time.time())
    with contextlib.ExitStack() as parts:
        store = folder.open_store()
        parts.callback(store.close)
        with store.transaction() as session:
            lease.check_free(session, time.time())  # before it finds its own ports taken
        configuration = write_configuration(folder, settings, authority)
        broker = parts.enter_context(Mosquitto(configuration, settings, authority))
        parts.enter_context(WebServer(store, folder, settings, authority))
        decide = decide or RolloutRunner().turn
        loop = ControlLoop(local_parts(store, settings, authority, broker, decide), repository)
        yield RunningFleet(
            folder=folder,
            settings=settings,
            store=store,
            authority=authority,
            broker=broker,
            loop=loop,
            is_new=is_new,
        )
