"""The configuration of the service as a TOML file states it; errors speak of it in the file's words."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.http_limits import HttpLimits
from edgekit_runtime.service.limits import SchedulingLimits
from edgekit_runtime.service.loading import ModelOptions
from edgekit_runtime.service.sharedmem import RegionLimits
from edgekit_runtime.service.sockets import find_socket
from edgekit_runtime.service.versions import SwapOrder, VersionPolicy

DEFAULT_PORT: Final = 8000  # Triton's and KServe's
_MIN_TOKEN_CHARACTERS: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
_TYPE_NAMES: Final = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
}
_SWAPS: Final[Mapping[str, SwapOrder | None]] = {
    "auto": None,
    "availability": "availability",
    "resource": "resource",
}

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where the service can be reached.

    Attributes:
        unix_socket: path of the Unix socket, or empty for none.
        host: address to listen on over TCP, or empty for none.
        port: of TCP.
        tls_certificate, tls_key: PEM files; both or none.
        token_file: holds the token that TCP clients must send as `Authorization: Bearer`.

    Raises:
        ConfigError: an address beyond this machine without TLS and a token, or nothing to listen on.
    """

    unix_socket: str = field(default_factory=lambda: str(find_socket()))
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls_certificate: str | None = None
    tls_key: str | None = None
    token_file: str | None = None

    def __post_init__(self) -> None:
        if not self.unix_socket and not self.host:
            raise ConfigError("listen: neither unix_socket nor host is set, so nobody can reach the service")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("listen: tls_certificate and tls_key belong together, only one of them is set")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"listen: port is {self.port}, expected 0 to 65535")
        if self.host and not _is_loopback(self.host):
            missing = [name for name in ("tls_certificate", "token_file") if getattr(self, name) is None]
            if missing:
                raise ConfigError(
                    f"listen: host {self.host} can be reached from other machines, which needs"
                    f" {' and '.join(missing)}; or listen on 127.0.0.1"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Bounds of single requests.

    Attributes:
        max_json_bytes: of one request's JSON, tensors in it included.
        max_models_bytes: of all models together, estimated at three times their packages, or None; the least
            recently used ones make room for another, and come back when they are asked for.
        drain_timeout_s: how long requests under way may take after SIGTERM.
    """

    max_json_bytes: int = 8 << 20
    max_models_bytes: int | None = None
    drain_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All of the configuration; each field is a table of the TOML file.

    Attributes:
        listen: where the service can be reached.
        http: bounds of the HTTP layer.
        shared_memory: bounds of shared memory.
        inference: bounds of single requests.
        models: by name.
    """

    listen: Listen = field(default_factory=Listen)
    http: HttpLimits = field(default_factory=HttpLimits)
    shared_memory: RegionLimits = field(default_factory=RegionLimits)
    inference: Inference = field(default_factory=Inference)
    models: Mapping[str, ModelOptions] = field(default_factory=dict)


def read_config(path: Path) -> ServiceConfig:
    """Return the configuration in the TOML file at `path`.

    Raises:
        ConfigError: unreadable, not TOML, or a value is unknown, of a wrong type or unsafe.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES)
        document = _parse_toml(text.decode("utf-8"))
        models = _take_table(document, "models")
        sections: dict[str, Any] = {
            "listen": read_section(Listen, _take_table(document, "listen"), "listen"),
            "http": read_section(HttpLimits, _take_table(document, "http"), "http"),
            "shared_memory": read_section(
                RegionLimits, _take_table(document, "shared_memory"), "shared_memory"
            ),
            "inference": read_section(Inference, _take_table(document, "inference"), "inference"),
            "models": {name: _read_model(name, table) for name, table in models.items()},
        }
    except (OSError, ValueError) as cause:  # a UnicodeDecodeError or TOMLDecodeError is a ValueError
        raise ConfigError(f"{path}: {cause}") from cause
    except ConfigError as cause:
        raise ConfigError(f"{path}: {cause}") from cause
    if unknown := sorted(document):
        raise ConfigError(f"{path}: unknown tables {unknown}, known are {sorted(sections)}")
    return ServiceConfig(**sections)


def read_section(kind: type[Section], table: Mapping[str, Any], where: str) -> Section:
    """Return the dataclass `kind` with the values of a TOML table; what is missing has its default.

    Args:
        kind: its fields are of the types bool, int, float and str, or those with None.
        table: parsed.
        where: its name, for messages.

    Raises:
        ConfigError: a field is unknown or of a wrong type, or `kind` refuses a value.
    """
    # A type, or a union with None, which TOML cannot state.
    known = {known.name: _name_kind(known.type) for known in fields(kind)}  # type: ignore[arg-type]
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown setting '{name}', known are {', '.join(sorted(known))}")
        if not _is_of(value, known[name]):
            raise ConfigError(f"{where}: {name} is {value!r}, expected {_TYPE_NAMES[known[name]]}")
    try:
        return kind(**table)
    except ValueError as cause:
        raise ConfigError(f"{where}: {cause}") from cause


def read_token(path: str) -> bytes:
    """Return the value that the header `Authorization` must have.

    Raises:
        ConfigError: unreadable, too short, or readable by everybody.
    """
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123  # one descriptor for content and mode
            token, mode = file.read(4096).strip(), os.fstat(file.fileno()).st_mode
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"listen: cannot read token_file {path}: {cause}") from cause
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"listen: token_file {path} holds {len(token)} characters, expected at least"
            f" {_MIN_TOKEN_CHARACTERS} and no spaces; make one with: openssl rand -hex 32"
        )
    if mode & 0o004:
        raise ConfigError(f"listen: token_file {path} can be read by everybody; chmod 600 it")
    return f"Bearer {token}".encode("ascii")


def _read_model(name: str, table: object) -> ModelOptions:
    where = f"models.{name}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {type(table).__name__}")
    settings = dict(table)
    scheduling = read_section(
        SchedulingLimits, _take_table(settings, "scheduling", where), f"{where}.scheduling"
    )
    specific = settings.pop("specific", [])
    if not isinstance(specific, list) or not all(isinstance(version, str) for version in specific):
        raise ConfigError(f"{where}: specific is {specific!r}, expected a list of versions")
    kept = read_section(_Model, settings, where)
    return ModelOptions(
        VersionPolicy(kept.latest, tuple(specific)),
        _SWAPS[kept.swap],
        kept.threads,
        kept.instances,
        scheduling,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What a model's table states in single values."""

    latest: int = 1
    swap: str = "auto"
    threads: int | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        if min(self.latest, self.instances, self.threads or 1) < 1:
            raise ValueError("latest, threads and instances: expected at least 1")
        if self.swap not in _SWAPS:
            raise ValueError(f"swap is {self.swap!r}, expected one of {', '.join(_SWAPS)}")


def _take_table(document: dict[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    table = document.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"{where}{'.' if where else ''}{name}: expected a table, got {type(table).__name__}"
        )
    return table


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        import tomllib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]
        except ImportError as cause:
            raise ConfigError(
                "reading TOML needs Python 3.11 or 'pip install tomli'; or serve without --config"
            ) from cause
    document: dict[str, Any] = tomllib.loads(text)
    return document


def _name_kind(annotation: object) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).split(" ")[0]


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(
        value, (int, float) if kind == "float" else {"bool": bool, "int": int, "str": str}[kind]
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
