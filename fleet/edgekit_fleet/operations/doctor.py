"""Checks a broker with certificates of this fleet, and lists everything in the fleet that expires."""

import socket
import ssl
import tempfile
from pathlib import Path

from edgekit_fleet.broker.mosquitto import Mosquitto, write_configuration
from edgekit_fleet.broker.probe import BrokerProbe, Finding
from edgekit_fleet.identity.authority import MANAGER, Authority, open_authority
from edgekit_fleet.manager.expiry import Expiry, list_expiries
from edgekit_fleet.releases.repository import open_repository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_runtime.errors import ConfigError

_DEVICES = ("edgekit-doctor-1", "edgekit-doctor-2")


def probe_broker(authority: Authority | None, addresses: tuple[tuple[str, int], ...]) -> list[Finding]:
    """Check a broker with certificates of this fleet, and return the finding of each check.

    Args:
        authority: The authority that signs the certificates, or None to connect without TLS.
        addresses: The host and port of the broker, or of each node of a cluster.

    Raises:
        ConfigError: `authority` is None, and a broker is on another machine.
        TransportError: The broker cannot be reached, or refuses a client.
    """
    if authority is None and any(host not in ("127.0.0.1", "::1", "localhost") for host, _ in addresses):
        raise ConfigError("without TLS only a broker on this machine may be probed")

    def context_of(name: str) -> ssl.SSLContext | None:
        if authority is None:
            return None
        context = ssl.create_default_context(cafile=authority.certificate_path)
        authority.load_short_lived(context, name)
        return context

    return BrokerProbe(addresses[0], context_of, manager=MANAGER, devices=_DEVICES, nodes=addresses[1:]).run()


def find_expiries(folder: FleetFolder) -> list[Expiry]:
    """Return everything in a fleet that expires, earliest first.

    In the folder of an additional manager, this does not include the metadata of the repository.

    Raises:
        ConfigError: A certificate cannot be read.
        PackageError: The repository cannot be read.
    """
    repository = None if folder.has_joined else open_repository(folder)
    return list_expiries(Authority(folder.identity), repository)


def probe_own() -> list[Finding]:
    """Check a mosquitto with the configuration of `fleet up`, and return the findings.

    The broker is started for the checks on a free port, with its own certificate authority.

    Raises:
        ConfigError: mosquitto is not installed.
        TransportError: mosquitto does not start.
    """
    with tempfile.TemporaryDirectory(prefix="edgekit-doctor-") as path:
        folder = FleetFolder(Path(path))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            settings = FleetSettings(broker_port=free.getsockname()[1])
        authority = open_authority(folder, settings)
        with Mosquitto(write_configuration(folder, settings, authority), settings, authority):
            return probe_broker(authority, (("127.0.0.1", settings.broker_port),))
