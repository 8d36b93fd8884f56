"""The configuration of the service, and the reader of its TOML file."""

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
    """Options of the streams that the fleet orders.

    Attributes:
        file: The path of the file in which the agent writes the streams, or empty for none. By default, a
            service with installed models uses a file in its state folder.
        allows_files: Whether these streams may use `file:` sinks and `gstreamer:` sources. Both can write any
            file that the user of the service can write.
    """

    file: str | None = None
    allows_files: bool = False

    @property
    def settings_file(self) -> str:
        """The path of the fleet's settings file in the folder of `file`, or empty if `file` is empty."""
        from edgekit_runtime.protocol.rest import SETTINGS_FILE  # only where a device may be in a fleet

        return str(Path(self.file).with_name(SETTINGS_FILE)) if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """Options of the samples that the fleet orders. A sample is a stored request.

    Attributes:
        allow: Whether samples are stored. If False, unsent samples are deleted.
        file: The path of the file in which the agent writes the orders, or empty for none. By default, a
            service with installed models uses `fleet/samples.json` in its state folder. Unsent samples are
            stored in the folder of `file`.
        max_mb: The size limit of all unsent samples together, in megabytes.
        max_days: The age in days after which unsent samples are deleted.
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
    """The addresses of the service, and its TLS and token files.

    Attributes:
        unix_socket: The path of the Unix socket, or empty for none.
        host: The TCP address to listen on, or empty for none.
        port: The TCP port, or 0 for any free port.
        tls_certificate: The PEM file of the certificate. It requires `tls_key`.
        tls_key: The PEM file of the private key. It requires `tls_certificate`.
        token_file: The file with the token that TCP clients must send as `Authorization: Bearer`.

    Raises:
        ValueError: There is no address, or other machines could connect without TLS and a token.
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
        """Check that `host` is a loopback address, or that TLS and a token are configured.

        Raises:
            ValueError: Other machines could connect without TLS and a token.
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
    """Limits of requests and inferences.

    Attributes:
        max_json_bytes: The size limit of the JSON of a request, including the tensors in it.
        max_json_response_bytes: The size limit of the JSON of a response. Binary data and shared memory are
            not limited.
        max_run_bytes: The memory limit of one inference, estimated from its package and inputs. The default
            is the minimum of 1 GiB, a quarter of the machine's memory and `memory.max_bytes`.
        drain_timeout_s: How long to wait for the calls of a version before it is unloaded.
        stop_timeout_s: How long requests may continue to run after SIGTERM.
    """

    max_json_bytes: int = 2 << 20
    max_json_response_bytes: int = 16 << 20
    max_run_bytes: int | None = None
    drain_timeout_s: float = 30.0
    stop_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Options of the log on standard error.

    Attributes:
        json: Whether each record is written as a line of JSON. The default is plain text.
        level: The lowest level that is logged. None means the level that the fleet sets, or else `info`.
    """

    json: bool = False
    level: Literal["debug", "info", "warning", "error"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """The configuration of the service. Each field is a table of the TOML file.

    Attributes:
        models: The options of models by name. Models without an entry use the defaults.
        streams: The streams by name. They run as long as the service.
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
        """Return the configuration of a worker process, which serves one model and does not listen."""
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
        ConfigError: The file cannot be read, is not TOML, or contains an unknown key or an invalid value.
            This includes a limit in `power` if no model has a governor.
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

    Models in `names` that have no options get the defaults.

    Raises:
        ConfigError: `isolated` conflicts with another option of such a model.
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
