"""The server that this device may use, and its objective, stored in the configuration folder."""

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from edgekit_runtime.client.link import Address
from edgekit_runtime.dataclass_json import Range, from_plain, to_plain
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.paths import find_config_folder

_NAME: Final = "offload.json"
_MAX_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """How this device offloads.

    Attributes:
        server: address of the server, such as `https://edge-box:8443`.
        token_file: file with the token that the server requires, or None.
        ca_file: PEM file of the authority that signed the server's certificate, or None to trust the
            authorities of the system.
        prefer: `latency` or `energy`, or None for the package's objective.
        deadline_s: limit of the latency for the objectives energy and capacity, or None for the package's
            limit.
        hedge_share: maximum time of hedges on this device, as a share of the time of its requests. A hedge is
            a local run that begins because a reply is late. Four hedges are always allowed.
        timeout_s: time limit of a request if the model cannot run on this device, or if a plan is requested
            by name.
        probe_bytes_per_hour: maximum number of bytes per hour that probes send over a metered link, or None.
        plan: name of a plan to use whenever possible, for debugging, or None to choose a plan.
        insecure: whether the application's data may be sent to another machine over plain HTTP.

    Raises:
        TransportError: the address is malformed.
        ConfigError: the address is plain HTTP to another machine, without `insecure` or with a token.
    """

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    prefer: Literal["latency", "energy"] | None = None
    deadline_s: Annotated[float, Range(0, 3600)] | None = None
    hedge_share: Annotated[float, Range(0, 1)] = 0.1
    timeout_s: Annotated[float, Range(0.01, 3600)] = 10.0
    probe_bytes_per_hour: Annotated[float, Range(0, 1e12)] | None = None
    plan: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        _ = self.address

    @property
    def address(self) -> Address:
        has_token = self.token_file is not None
        return Address.parse(self.server, self.ca_file, has_token=has_token, insecure=self.insecure)

    def read_token(self) -> str | None:
        """Return the token in `token_file`, or None if no token file is set.

        Raises:
            ConfigError: the token file cannot be read, or is empty.
        """
        return None if self.token_file is None else read_token(Path(self.token_file))


def read_token(path: Path) -> str:
    """Return the token in the file at `path`, without surrounding white space.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: the token of the server cannot be read: {cause}") from cause
    if not token:
        raise ConfigError(f"{path}: is empty, expected the token of the server; copy its file here")
    return token


def find_options_file() -> Path:
    return find_config_folder() / _NAME


def read_offload_options() -> OffloadOptions | None:
    """Return the options of this device, or None if no server is set.

    Raises:
        ConfigError: the file is malformed. Set the server again.
    """
    path = find_options_file()
    try:
        data = path.read_bytes()[:_MAX_BYTES]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read: {cause}") from cause
    try:
        return from_plain(OffloadOptions, json.loads(data))
    except (ValueError, RecursionError, EdgekitError) as cause:
        raise ConfigError(f"{path}: {cause}; run `edgekit-device offload server URL` again") from cause


def write_offload_options(options: OffloadOptions | None) -> Path:
    """Store the options, or remove them if None, and return the path of the file."""
    path = find_options_file()
    if options is None:
        path.unlink(missing_ok=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path, mode=0o644) as file:  # root sets it for the service, which is another user
        file.write(json.dumps(to_plain(options), indent=2).encode())
    return path
