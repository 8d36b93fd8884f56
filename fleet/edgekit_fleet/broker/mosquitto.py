"""Runs mosquitto as the fleet's own broker: its configuration, process and restarts.

The broker stores nothing on disk. The state of the fleet is in the store, and restored messages would be
outdated. A client's certificate determines its name and its MQTT client identifier, so no device can take
over the connection of another one. A device can only publish its own documents, and only read documents that
are addressed to it.
"""

import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from edgekit_fleet.identity.authority import TLS_1_2_CIPHERS, Authority
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings, split_address
from edgekit_fleet.store.shards import MOST_MANAGERS
from edgekit_runtime.agent.documents import MAX_DOCUMENT_BYTES, Kind, topic
from edgekit_runtime.errors import ConfigError, TransportError
from edgekit_runtime.system.atomic_files import make_folders, write_atomically
from edgekit_runtime.system.child_process import ChildProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_START_S: Final = 10.0
_MAX_PAUSE_S: Final = 30.0
_STABLE_S: Final = 60.0
_MAX_FILES: Final = 1 << 16
_ACL: Final = "acl"
_WRITTEN_BY_DEVICES: Final[tuple[Kind, ...]] = ("hello", "reported", "event", "logs")
_READ_BY_DEVICES: Final[tuple[Kind, ...]] = ("desired",)
_log = logging.getLogger(__name__)

_CONFIGURATION: Final = """\
# Written by `edgekit fleet up` at each start; changes are lost.
per_listener_settings false
# Where root starts it; else it stays who it is.
user root
listener {port} {host}
cafile {authority}
certfile {certificate}
keyfile {key}
crlfile {crl}
tls_version tlsv1.2
ciphers {ciphers}
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
acl_file {acl}
persistence false
message_size_limit {size}
max_packet_size {packet}
max_inflight_messages 1000
max_queued_messages 50000
max_keepalive 3600
log_dest stderr
log_type error
log_type warning
"""


def write_configuration(folder: FleetFolder, settings: FleetSettings, authority: Authority) -> Path:
    """Write the files for mosquitto into the fleet's broker folder, and return the path of `mosquitto.conf`.

    To run the broker on another machine, copy only this folder, which has no keys of the authority.

    Raises:
        OutputError: The folder cannot be written.
        ConfigError: A path contains a line break.
    """
    make_folders(folder.broker, 0o700)
    acl, path = folder.broker / _ACL, folder.broker / "mosquitto.conf"
    pair = authority.pair("server")
    certificate, key, issuer = (_copy(path, folder.broker) for path in (*pair, authority.certificate_path))
    text = _CONFIGURATION.format(
        port=settings.broker_port,
        host=settings.host,
        authority=issuer.absolute(),
        certificate=certificate.absolute(),
        key=key.absolute(),
        crl=_copy(authority.crl, folder.broker).absolute(),
        ciphers=TLS_1_2_CIPHERS,
        acl=acl.absolute(),
        size=MAX_DOCUMENT_BYTES,
        packet=2 * MAX_DOCUMENT_BYTES,
    )
    if len(text.splitlines()) != len(_CONFIGURATION.splitlines()):
        raise ConfigError(f"{folder.path}: a folder with a line break in its name cannot hold a fleet")
    _write_acl(acl, authority)
    with write_atomically(path, mode=0o600) as file:
        file.write(text.encode())
    return path


def _write_acl(path: Path, authority: Authority, silent: Collection[str] = ()) -> None:
    lines = []
    for number in range(MOST_MANAGERS):
        lines += [f"user {authority.name_manager(number)}", "topic readwrite ek/v1/#", ""]
    for device in sorted(silent):
        lines += [
            f"user {device}",
            *(f"topic deny {topic(device, kind)}" for kind in _WRITTEN_BY_DEVICES),
            "",
        ]
    lines += [f"pattern write {topic('%u', kind)}" for kind in _WRITTEN_BY_DEVICES]
    lines += [f"pattern read {topic('%u', kind)}" for kind in _READ_BY_DEVICES]
    with write_atomically(path, mode=0o600) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def write_revoked(authority: Authority, serials: Iterable[str], folder: Path) -> None:
    """Write the list of revoked certificates into the broker's folder. It takes effect after `reload`.

    `serials` are all revoked serial numbers, in hexadecimal digits.

    Raises:
        OutputError: The folder cannot be written.
    """
    authority.write_crl(serials)
    _copy(authority.crl, folder)


def _copy(path: Path, folder: Path) -> Path:
    with write_atomically(folder / path.name, mode=0o600) as file:
        file.write(path.read_bytes())
    return folder / path.name


class Mosquitto:
    """A running mosquitto, which is stopped at the end of the `with` block."""

    def __init__(self, configuration: Path, settings: FleetSettings, authority: Authority) -> None:
        """Start the broker, and wait until it answers.

        Raises:
            ConfigError: mosquitto is not installed.
            TransportError: mosquitto does not start, for example because the port is taken.
        """
        if shutil.which("mosquitto") is None and not Path("/usr/sbin/mosquitto").exists():
            raise ConfigError("mosquitto is not installed; on Debian: apt install mosquitto")
        self._configuration = configuration
        self._settings = settings
        self._authority = authority
        self._pause_s = 1.0
        _allow_many_files()
        self._start()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()

    @property
    def pid(self) -> int:
        """The process id of mosquitto, which changes at each restart."""
        return self._child.pid

    def reload(self) -> None:
        """Make the broker reload its certificates, revocation list and rights. Connections are kept."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGHUP)

    def silence(self, devices: Collection[str]) -> None:
        """Make the broker drop the messages of these devices, and accept those of all others.

        A device that floods the broker would otherwise fill the manager's queue, and messages of other
        devices would be lost.

        Raises:
            OutputError: The access control list cannot be written.
        """
        _write_acl(self._configuration.parent / _ACL, self._authority, devices)
        self.reload()

    def restart_if_ended(self) -> bool:
        """Restart the broker if it has ended. Return True if it was restarted.

        If the broker keeps ending soon after its start, the pause before the next start doubles each time.

        Raises:
            TransportError: The broker does not start.
        """
        if self._child.wait(0) is None:
            return False
        if time.monotonic() - self._started_at > _STABLE_S:
            self._pause_s = 1.0
        if time.monotonic() - self._started_at < self._pause_s:
            return False
        _log.error("mosquitto ended %s; starting it again", self._child.explain_end())
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        self._child.close()
        self._start()
        return True

    def _start(self) -> None:
        self._started_at = time.monotonic()
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
        self._child = ChildProcess(
            "edgekit_fleet.broker.mosquitto_child",
            str(self._configuration),
            variables={"PATH": path},
            own_session=True,
        )
        context = ssl.create_default_context(cafile=self._authority.certificate_path)
        context.check_hostname = False
        context.load_cert_chain(*self._authority.pair("manager"))
        limit = time.monotonic() + _START_S
        while time.monotonic() < limit:
            if self._child.wait(0.02) is not None:
                break
            if self._answers(context):
                return
        reason = self._child.last_line or "it did not answer"
        self._child.close()
        raise TransportError(
            f"mosquitto does not start on {self._settings.host}:{self._settings.broker_port}: {reason};"
            " choose another port with --broker-port if that one is taken"
        )

    def _answers(self, context: ssl.SSLContext) -> bool:
        """Return whether a TLS handshake with our certificates succeeds, which fails with other brokers."""
        host = own_address(self._settings)
        address = (host, self._settings.broker_port)
        with contextlib.suppress(OSError), socket.create_connection(address, 2.0) as plain:
            context.wrap_socket(plain).close()
            return True
        return False


def list_brokers(settings: FleetSettings) -> tuple[tuple[str, int], ...]:
    """Return the host and port of each broker, as seen from this machine."""
    if settings.brokers:
        return tuple(map(split_address, settings.brokers))
    return ((own_address(settings), settings.broker_port),)


def own_address(settings: FleetSettings) -> str:
    """Return the address at which this machine reaches its own servers."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - compared


def _allow_many_files() -> None:
    """Raise the limit of open files for the broker, which needs one for each device."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft < max_files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))
