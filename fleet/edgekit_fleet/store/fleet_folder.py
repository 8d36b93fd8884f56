"""The folder of a fleet on the manager's machine, and the settings in it."""

import contextlib
import fcntl
import ipaddress
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from edgekit_fleet.store.database import Store, open_store, sqlite_url
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, from_json, to_plain
from edgekit_runtime.errors import ConfigError, FleetError, OutputError
from edgekit_runtime.system.atomic_files import make_folders, write_atomically
from edgekit_runtime.system.paths import find_state_folder

_SETTINGS: Final = "fleet.json"
_JOINED: Final = "joined"
_LOCK: Final = "running.lock"
_PORT: Final = Range(1, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """The settings of a fleet, which do not change while the manager runs.

    Attributes:
        host: The address on which the broker and the web server listen. With 127.0.0.1, only this machine can
            connect.
        names: The DNS names and addresses under which devices find this machine. Enrolment codes contain the
            first of them, and certificates contain all.
        console_certificate, console_key: The PEM files of a certificate that browsers trust. If empty, the
            console uses a certificate of the fleet's authority, or plain HTTP if `is_local`.
        trusted_proxies: The addresses or networks of proxies in front of the console and the web server,
            whose `X-Forwarded-For` and `X-Forwarded-Proto` are trusted.
        requires_second_factor: Whether each user with a password needs a one-time code.
        sign_on_proxies: The addresses or networks of proxies that log users in, see `access.sign_on`. Empty
            for none.
        sign_on_headers: The prefix of the headers in which those proxies name the user.
        sign_on_roles: The roles of the groups in those headers, each as `GROUP=ROLE`.
        sign_on_secret: The path of a file with a secret that those proxies also send, or empty.
        store_url: The URL of the database. If it is empty, the fleet uses SQLite in its folder.
        brokers: The `HOST:PORT` of each external broker for devices. If empty, the fleet runs a broker.
        artifacts_storage: The storage to which the signed repository is copied, see `ArtifactStorage`, or
            empty.
        artifacts_url: The URL from which devices fetch the repository, such as a CDN, or empty for the
            fleet's own server.
        encrypts: Whether releases are encrypted by default.
        desired_life_s: How long a desired document is valid. A device that gets no newer one reports `stale`
            after this time.
    """

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ("127.0.0.1",)
    broker_port: Annotated[int, _PORT] = 8883
    web_port: Annotated[int, _PORT] = 8443
    console_port: Annotated[int, _PORT] = 8444
    console_certificate: str = ""
    console_key: str = ""
    trusted_proxies: tuple[str, ...] = ()
    requires_second_factor: bool = False
    sign_on_proxies: tuple[str, ...] = ()
    sign_on_headers: str = "X-Auth-Request"
    sign_on_roles: tuple[str, ...] = ()
    sign_on_secret: str = ""
    store_url: str = ""
    brokers: tuple[str, ...] = ()
    artifacts_storage: str = ""
    artifacts_url: str = ""
    encrypts: bool = False
    desired_life_s: float = 7 * 86_400.0
    certificate_life_s: float = 365 * 86_400.0

    def __post_init__(self) -> None:
        for address in self.brokers:
            split_address(address)
        if not self.names:
            raise ConfigError(
                "names is empty, expected the name or address under which devices find the fleet"
            )
        for name in self.names:
            if "[" in name or "/" in name or (":" in name and not _is_address(name)):
                raise ConfigError(
                    f"name {name!r}: expected a DNS name or an address, without port or brackets"
                )
        if not _is_address(self.host):
            raise ConfigError(f"host is {self.host!r}, expected an address such as 0.0.0.0 or ::1")
        for proxy in (*self.trusted_proxies, *self.sign_on_proxies):
            if not _is_network(proxy):
                raise ConfigError(f"proxy {proxy!r}: expected an address or a network, such as 10.0.0.0/24")
        for pair in self.sign_on_roles:
            if not re.fullmatch(r"[^,=]+=(viewer|operator|admin)", pair):
                raise ConfigError(f"{pair!r}: expected GROUP=ROLE, with viewer, operator or admin")
        if self.artifacts_url and not self.artifacts_url.startswith("https://"):
            raise ConfigError(f"artifacts URL is {self.artifacts_url!r}, expected https://...")
        if self.artifacts_storage and not self.artifacts_url:
            raise ConfigError(
                f"artifacts are copied to {self.artifacts_storage}; name the URL from which devices fetch"
                " them with --artifacts-url"
            )
        if bool(self.console_certificate) != bool(self.console_key):
            raise ConfigError("the console needs both --console-certificate and --console-key, or neither")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the fleet."""
        return self.host in ("127.0.0.1", "::1")

    @property
    def broker_addresses(self) -> tuple[str, ...]:
        """The `HOST:PORT` of each broker for devices."""
        return self.brokers or (f"{bracket(self.names[0])}:{self.broker_port}",)

    @property
    def artifacts(self) -> str:
        """The URL from which devices fetch the repository, without a trailing slash."""
        return self.artifacts_url.rstrip("/") or f"https://{self.web_address}/artifacts"

    @property
    def web_address(self) -> str:
        """The `HOST:PORT` of the web server for devices."""
        return f"{bracket(self.names[0])}:{self.web_port}"


@dataclass(frozen=True, slots=True)
class FleetFolder:
    """The paths of a fleet's files."""

    path: Path

    @property
    def identity(self) -> Path:
        """The folder of the authority and of the certificates of servers and managers."""
        return self.path / "identity"

    @property
    def broker(self) -> Path:
        return self.path / "broker"

    @property
    def uploads(self) -> Path:
        """The folder of uploaded packages that are not released yet.

        Raises:
            FleetError: This is the folder of an additional manager, which makes no releases.
        """
        self.check_repository()
        return self.path / "uploads"

    @property
    def repository(self) -> Path:
        """The folder of the TUF repository, which the web server serves."""
        return self.path / "repository"

    @contextlib.contextmanager
    def hold(self, *, joins: bool) -> Iterator[bool]:
        """Lock the folder while a manager runs. Yield True if no other manager has locked it.

        If this manager joins a fleet and no other manager has locked the folder, the fleet was started on
        another machine. The folder is then marked as a copy, and releases can only be made on that machine.

        Args:
            joins: Whether this manager joins a fleet that already has a manager.

        Raises:
            ConfigError: The folder is a marked copy, and this manager does not join.
            OutputError: The folder cannot be written.
        """
        make_folders(self.path, 0o700)
        marker = self.path / _JOINED
        try:
            file = (self.path / _LOCK).open("wb")
        except OSError as cause:
            raise OutputError(f"cannot write {self.path / _LOCK}: {cause}") from cause
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                is_alone = False
            if joins and is_alone:
                marker.touch()
            fcntl.flock(file, fcntl.LOCK_SH)
            if marker.exists() and not joins:
                raise ConfigError(
                    f"{self.path} is a copy for a further manager; start it with --join. Only if the machine"
                    f" where the fleet began never comes back, delete {marker}: releases are then made here"
                )
            yield is_alone

    @property
    def is_running(self) -> bool:
        try:
            with (self.path / _LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    @property
    def has_joined(self) -> bool:
        """Whether this is the folder of an additional manager."""
        return (self.path / _JOINED).exists()

    def check_repository(self) -> None:
        """Check that the repository in this folder is the one that devices use.

        Raises:
            FleetError: This is the folder of an additional manager.
        """
        if self.has_joined:
            raise FleetError(
                "this manager has joined a fleet; releases are made and withdrawn on the machine where the"
                " fleet began, or with --server and its address"
            )

    @property
    def repository_keys(self) -> Path:
        """The folder of the keys that sign the repository and desired documents."""
        return self.path / "repository-keys"

    @property
    def has_settings(self) -> bool:
        """Whether the folder contains a fleet."""
        return (self.path / _SETTINGS).exists()

    def read_settings(self) -> FleetSettings:
        """Read the settings.

        Raises:
            ConfigError: There is no fleet, other users may read the folder, or the file is malformed.
        """
        path = self.path / _SETTINGS
        self._check_private()
        try:
            data = path.read_bytes()
        except FileNotFoundError as cause:
            raise ConfigError(f"{self.path} holds no fleet; `edgekit fleet up` makes one") from cause
        except OSError as cause:
            raise ConfigError(f"cannot read {path}: {cause}") from cause
        return from_json(FleetSettings, data, str(path))

    def write_settings(self, settings: FleetSettings) -> None:
        """Write the settings. The first call also creates the folder, and the SQLite store if it is used.

        Raises:
            ConfigError: Other users may read the folder, or `database.open_store` failed.
            OutputError: The file cannot be written, or `database.open_store` failed.
        """
        make_folders(self.path, 0o700)
        self._check_private()
        if not self.has_settings and not settings.store_url:  # a file that is missing later was lost
            open_store(sqlite_url(self.database)).close()
        with write_atomically(self.path / _SETTINGS, mode=0o600) as file:
            file.write(encode_json(to_plain(settings)) + b"\n")

    def _check_private(self) -> None:
        """Refuse an existing folder that all users of this machine may read.

        A folder of another owner is accepted, such as the mounted volume of a container.
        """
        with contextlib.suppress(OSError):
            status = self.path.stat()
            if status.st_uid == os.geteuid() and status.st_mode & 0o007:
                raise ConfigError(
                    f"{self.path} holds keys and secrets, and others may read it (mode"
                    f" {status.st_mode & 0o777:04o}); run: chmod 700 {shlex.quote(str(self.path))}"
                )

    @property
    def database(self) -> Path:
        """The path of the SQLite store, which is used if `store_url` is empty."""
        return self.path / "fleet.db"

    def open_store(self) -> Store:
        """Open the store of the fleet.

        Raises:
            ConfigError: The SQLite file is missing, or `read_settings` or `database.open_store` failed.
            OutputError: `database.open_store` failed.
        """
        url = self.read_settings().store_url
        if not url and not (self.database.exists() and self.database.stat().st_size):
            raise ConfigError(
                f"the store {self.database} is gone, and with it all desired versions; restore a backup"
            )
        return open_store(url or sqlite_url(self.database))


def default_folder() -> FleetFolder:
    """Return the folder that commands use by default."""
    return FleetFolder(find_state_folder() / "fleet")


def split_address(address: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[HOST]:PORT` into the host without brackets and the port.

    Raises:
        ConfigError: The address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) not in _PORT:
        raise ConfigError(f"broker {address!r}: expected HOST:PORT, such as broker.example:8883")
    return host.strip("[]"), int(port)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def bracket(name: str) -> str:
    """Return a host name or address for use before `:PORT`, with brackets around an IPv6 address."""
    return f"[{name}]" if ":" in name else name
