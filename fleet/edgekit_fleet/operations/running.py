"""Runs a whole fleet on one machine: authority, repository, store, broker, web server and manager.

The broker and the database may be on other machines, and additional managers may join.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgekit_fleet.broker.mosquitto import Mosquitto, list_brokers, write_configuration
from edgekit_fleet.identity.authority import Authority, open_authority
from edgekit_fleet.manager.control_loop import ControlLoop, Decide, ManagerParts
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import TufRepository, open_repository
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import Shards, check_free
from edgekit_fleet.web.server import serve_devices
from edgekit_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFleet:
    """The parts of a running fleet.

    Attributes:
        broker: The fleet's own broker, or None if it runs elsewhere.
        loop: The manager's loop. Call its method `run` to manage the fleet.
        is_new: Whether the fleet was just created.
    """

    folder: FleetFolder
    settings: FleetSettings
    store: Store
    authority: Authority
    broker: Mosquitto | None
    loop: ControlLoop
    is_new: bool


@contextlib.contextmanager
def start(
    folder: FleetFolder,
    settings: FleetSettings,
    decide: Decide | None = None,
    *,
    joins: bool = False,
    root_folder: Path | None = None,
) -> Iterator[RunningFleet]:
    """Start a fleet, and stop it at the end of the `with` block. Missing files are created.

    Args:
        folder: The folder of the fleet.
        settings: The settings, which are stored in the folder.
        decide: A replacement for the decisions about rollouts, for tests.
        joins: Whether this is an additional manager, which requires `store_url` and `brokers`.
        root_folder: The folder for the root keys of a new fleet, by default the folder of its other keys.

    Raises:
        ConfigError: The settings are invalid, or mosquitto is missing. See also `FleetFolder.hold`.
        UnavailableError: Another manager is active.
        TransportError: A port is taken.
        OutputError: The folder cannot be written.
    """
    _check_settings(settings, joins=joins)
    is_new = not folder.has_settings
    with contextlib.ExitStack() as parts:
        is_alone = parts.enter_context(folder.hold(joins=joins))
        if is_alone or not joins:  # else they are those of the manager that runs here
            folder.write_settings(settings)
        authority = open_authority(folder, settings)
        repository = None if joins else _open_new_repository(folder, root_folder)
        store = parts.enter_context(contextlib.closing(folder.open_store()))
        with store.transaction() as session:
            check_free(session, time.time())  # before it finds its own ports taken
        configuration, broker = write_configuration(folder, settings, authority), None
        if not settings.brokers:
            broker = parts.enter_context(Mosquitto(configuration, settings, authority))
        if not joins:
            parts.enter_context(serve_devices(store, folder, settings, authority))
        shards = Shards()
        manager = ManagerParts(
            store=store,
            settings=settings,
            authority=authority,
            key=ManagerKey(folder),
            broker=broker,
            decide=decide or RolloutRunner(shards).turn,
            shards=shards,
            brokers=list_brokers(settings),
            broker_folder=folder.broker,
            vault=None if joins else SampleVault(folder, settings),
        )
        yield RunningFleet(
            folder=folder,
            settings=settings,
            store=store,
            authority=authority,
            broker=broker,
            loop=ControlLoop(manager, repository),
            is_new=is_new,
        )


def _open_new_repository(folder: FleetFolder, root_folder: Path | None) -> TufRepository:
    repository = open_repository(folder)
    if not repository.exists:
        repository.create(time.time(), root_folder=root_folder)
    return repository


def _check_settings(settings: FleetSettings, *, joins: bool) -> None:
    if settings.host != "127.0.0.1" and settings.names == ("127.0.0.1",):
        raise ConfigError(
            f"the fleet listens on {settings.host}, but devices would be sent to 127.0.0.1; name this machine"
            " with --name"
        )
    if joins and not (settings.store_url and settings.brokers):
        raise ConfigError(
            "a further manager needs a database and brokers that all reach: --database, --broker"
        )
