"""The endpoints for the fleet's agent: the settings from the fleet, and the latest log lines.

The agent writes the settings to a file, which the service watches. Settings in the service's configuration
take precedence.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.errors import ConfigError, RequestError
from edgekit_runtime.protocol.device_settings import find_fault
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.response import make_json
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.options.resources import Power
from edgekit_runtime.system.atomic_files import read_stamp
from edgekit_runtime.system.recent_log import MAX_LINES, read_recent

_MAX_FILE_BYTES: Final = 16 << 10
_LIMITS: Final = {"power-w": "power_w", "temperature-c": "temperature_c", "battery-floor": "battery_floor"}
_FIXED: Final = "this device's owner has fixed it in the service's configuration"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SettingsFile:
    settings: Mapping[str, str]


class FleetHandler:
    """Applies the fleet's settings from the agent's file, and handles the agent's requests.

    Attributes:
        problems: A dict from the key of each setting in the file to the reason why it was not applied, or an
            empty string if it was applied.
    """

    def __init__(self, path: Path, config: ServiceConfig, limit_power: Callable[[Power], None]) -> None:
        """Create a handler that has not read the file yet.

        `path` is the agent's file, which may be missing. `limit_power` is a function that changes the
        governor's limits.
        """
        self._path, self._config, self._limit_power = path, config, limit_power
        self._stamp: tuple[int, ...] = ()
        self.problems: dict[str, str] = {}
        self._default_level = logging.getLogger("edgekit_runtime").level

    def look(self) -> None:
        """Apply the settings file if it changed, and set `problems`.

        Without a file, the settings of the configuration apply.
        """
        stamp = read_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            with self._path.open("rb") as file:
                desired = from_json(_SettingsFile, file.read(_MAX_FILE_BYTES), str(self._path)).settings
        except FileNotFoundError:
            desired = {}
        except (OSError, ConfigError) as cause:
            _logger.warning("the fleet's settings stay as they are: %s", cause)
            return
        self.problems = {key: self._find_problem(key, value) for key, value in desired.items()}
        heeded = {key: value for key, value in desired.items() if not self.problems[key]}
        level = heeded.get("log-level", "").upper()
        logging.getLogger("edgekit_runtime").setLevel(level or self._default_level)
        changes: dict[str, Any] = {
            field: float(heeded[key]) for key, field in _LIMITS.items() if key in heeded
        }
        self._limit_power(dataclasses.replace(self._config.power, **changes))
        _logger.info("settings of the fleet: %s", ", ".join(map("=".join, sorted(heeded.items()))) or "none")

    def _find_problem(self, key: str, value: str) -> str:
        if fault := find_fault(key, value):
            return fault
        if key == "log-level":
            return _FIXED if self._config.log.level else ""
        if key not in _LIMITS:
            return "the service has no such setting"
        if getattr(self._config.power, _LIMITS[key]) is not None:
            return _FIXED
        if all(options.governor is None for options in self._config.models.values()):
            return "no model of this device has a governor, which would keep the limit"
        return ""

    def find(self, parts: list[str]) -> tuple[tuple[str, ...], Any] | None:
        """Return the allowed methods and the action for the segments of a path, or None for other paths."""
        match parts:
            case ["v2", "fleet", "settings"]:
                return ("GET",), self._respond_settings
            case ["v2", "fleet", "log"]:
                return ("GET",), self._respond_log
        return None

    def _respond_settings(self, connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        _check_user(connection)
        self.look()
        connection.respond(*make_json({"settings": self.problems}))

    def _respond_log(self, connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        _check_user(connection)
        connection.respond(*make_json({"lines": read_recent(MAX_LINES)}))


def _check_user(connection: Connection) -> None:
    if not connection.is_own_user:
        raise RequestError(403, "only the user of the service and root may ask this, over the Unix socket")
