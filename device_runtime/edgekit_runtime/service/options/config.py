"""The configuration of the service, and how it is read from a TOML file."""

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.http import GrpcOptions, HttpLimits, LiveOptions
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import (
    CacheLimits,
    DriftLimits,
    MediaLimits,
    ModelMemory,
    Power,
    RegionLimits,
)

DEFAULT_PORT: Final = 8000  # Triton's and KServe's
_MAX_FILE_BYTES: Final = 1 << 20


def _find_socket() -> str:
    from edgekit_runtime.system.paths import find_socket  # only where no socket is stated

    return str(find_socket())


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStreamOptions:
    """Whether and how the service runs streams that the fleet orders.

    Attributes:
        file: the file that the agent writes; empty for none. By default, a service of installed models uses
            the file in its state folder.
        allows_files: whether these streams may use `file:` sinks and `gstreamer:` sources, which can write
            any file of the service's user.
    """

    file: str | None = None
    allows_files: bool = False

    @property
    def settings_file(self) -> str:
        """Path of the file with the settings that the fleet wants, beside `file`; empty for none."""
        from edgekit_runtime.protocol.rest import SETTINGS_FILE  # only where a device may be in a fleet

        return str(Path(self.file).with_name(SETTINGS_FILE)) if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Whether and how the service stores requests as samples when the fleet orders it.

    Attributes:
        allow: whether it stores samples. If not, unsent samples are deleted.
        file: the file in which the agent writes the fleet's orders; empty for none. By default, a service of
            installed models uses `fleet/samples.json` in its state folder. Unsent samples lie beside it.
        max_mb: size limit of all unsent samples in megabytes, for all orders together.
        max_days: unsent samples that are older are deleted.
    """

    allow: bool = True
    file: str | None = None
    max_mb: Annotated[int, Range(1, 1 << 20)] = 256
    max_days: Annotated[float, Range(0.01, 3650)] = 30.0

    @property
    def max_bytes(self) -> int:
        return self.max_mb * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Addresses of the service, TLS and the token.

    Attributes:
        unix_socket: path of the Unix socket, or empty for none.
        host: address to listen on over TCP, or empty for none.
        port: port of TCP, 0 for any.
        tls_certificate, tls_key: PEM files; both or none.
        token_file: holds the token that TCP clients must send as `Authorization: Bearer`.

    Raises:
        ValueError: there is no address, or other machines could connect without TLS and a token.
    """

    unix_socket: str = field(default_factory=_find_socket)
    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65_535)] = DEFAULT_PORT
    tls_certificate: str | None = None
    tls_key: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        if not self.unix_socket and not self.host:
            raise ValueError("neither unix_socket nor host is set, so nobody can reach the service")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together, only one of them is set")
        self.check_host(self.host)

    def check_host(self, host: str) -> None:
        """Refuse an address beyond this machine without TLS and a token.

        Raises:
            ValueError: it is refused.
        """
        missing = [name for name in ("tls_certificate", "token_file") if getattr(self, name) is None]
        if host and missing and not _is_loopback(host):
            raise ValueError(
                f"host {host} can be reached from other machines, which needs"
                f" {' and '.join(missing)}; or listen on 127.0.0.1"
            )

    @property
    def is_beyond_loopback(self) -> bool:
        """Whether other machines can reach the service."""
        return bool(self.host) and not _is_loopback(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Bounds of single requests.

    Attributes:
        max_json_bytes: size limit of one request's JSON, with the tensors in it.
        max_json_response_bytes: size limit of one response's JSON; binary data and shared memory have no such
            limit.
        max_run_bytes: memory that one inference may take, estimated from its package and its inputs. By
            default, the least of 1 GiB, a quarter of the machine's memory and `memory.max_bytes`.
        drain_timeout_s: how long unloading a version waits for its calls.
        stop_timeout_s: how long requests may still run after SIGTERM.
    """

    max_json_bytes: int = 2 << 20
    max_json_response_bytes: int = 16 << 20
    max_run_bytes: int | None = None
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How log records are written to standard error.

    Attributes:
        json: whether each record is a line of JSON; otherwise it is plain text.
        level: least level of records. None means `info`, unless the fleet sets another level.
    """

    json: bool = False
    level: Literal["debug", "info", "warning", "error"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All of the configuration; each field is a table of the TOML file.

    Attributes:
        models: name of a model -> its options; a model without options has the defaults.
        streams: streams by name, which run as long as the service.
    """

    listen: Listen = field(default_factory=Listen)
    http: HttpLimits = field(default_factory=HttpLimits)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    shared_memory: RegionLimits = field(default_factory=RegionLimits)
    inference: Inference = field(default_factory=Inference)
    cache: CacheLimits = field(default_factory=CacheLimits)
    media: MediaLimits = field(default_factory=MediaLimits)
    drift: DriftLimits = field(default_factory=DriftLimits)
    memory: ModelMemory = field(default_factory=ModelMemory)
    power: Power = field(default_factory=Power)
    log: LogOptions = field(default_factory=LogOptions)
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    streams: Mapping[str, StreamOptions] = field(default_factory=dict)
    fleet_streams: FleetStreamOptions = field(default_factory=FleetStreamOptions)
    samples: SampleOptions = field(default_factory=SampleOptions)
    live: LiveOptions = field(default_factory=LiveOptions)

    def __post_init__(self) -> None:
        if self.grpc.port is not None:
            self.listen.check_host(self.grpc.host)

    def for_worker(self, name: str, options: ModelOptions) -> "ServiceConfig":
        """Return the configuration of a process that serves one model, and does not listen."""
        return dataclasses.replace(
            self,
            listen=Listen(unix_socket="-", host=""),
            grpc=GrpcOptions(),
            memory=ModelMemory(),
            models={name: options},
            streams={},
            fleet_streams=FleetStreamOptions(),
        )


def read_config(path: Path) -> ServiceConfig:
    """Return the configuration in the TOML file at `path`.

    Raises:
        ConfigError: the file is unreadable or not TOML; a value is unknown, of a wrong type or unsafe; or
            `power` sets a limit although no model has a governor.
    """
    names = [field.name for field in dataclasses.fields(ServiceConfig)]
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES)
        document = _parse_toml(text.decode("utf-8"))
        unknown = sorted(document.keys() - set(names))
        config = from_plain(ServiceConfig, {name: document[name] for name in names if name in document})
    except (OSError, ValueError, ConfigError) as cause:  # UnicodeDecodeError, TOMLDecodeError: ValueError
        raise ConfigError(f"{path}: {cause}") from cause
    if unknown:
        raise ConfigError(f"{path}: unknown tables {unknown}, known are {sorted(names)}")
    if config.power.is_limited and all(options.governor is None for options in config.models.values()):
        raise ConfigError(
            f"{path}: power: limits are held by changing how models run, and no model has a governor;"
            " add a table [models.NAME.governor], or leave the limits out"
        )
    return config


def isolate(models: Mapping[str, ModelOptions], names: Sequence[str]) -> dict[str, ModelOptions]:
    """Return the options of all models, with `isolated` set for the models in `names`.

    A model in `names` without options gets the defaults.

    Raises:
        ConfigError: `isolated` contradicts another option of such a model.
    """
    try:
        isolated = {
            name: dataclasses.replace(models.get(name, ModelOptions()), isolated=True) for name in names
        }
    except ValueError as cause:
        raise ConfigError(f"--isolate: {cause}") from cause
    return {**models, **isolated}


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]
        except ImportError as cause:
            from edgekit_runtime.system.install_hint import python_here

            raise ConfigError(
                f"reading TOML needs Python 3.11 or '{python_here()} -m pip install tomli'; or serve without"
                " --config"
            ) from cause
    document: dict[str, Any] = tomllib.loads(text)
    return document


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
