"""The settings of a device that its fleet may change, and their allowed values.

Values are sent as text. Both the fleet and the device reject invalid values. A setting that the device's
owner has set in the service configuration or on the agent's command line cannot be changed by the fleet.
"""

import re
from collections.abc import Mapping
from typing import Final, Literal

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

_WINDOW: Final = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]-([01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
_NUMBER: Final = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,6})?", re.ASCII)
_MAX_SHOWN: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSetting:
    """A setting that a fleet may change.

    Attributes:
        key: The name in `--config KEY=VALUE`.
        title: What the setting changes.
        values: The allowed range of numbers or the allowed words. None stands for a time window such as
            `01:00-04:00`.
        reader: The process that applies the setting. It does not need a restart.
    """

    key: str
    title: str
    values: Range | tuple[str, ...] | None
    reader: Literal["agent", "service", "both"]

    @property
    def accepted(self) -> str:
        if self.values is None:
            return "a time of day such as 01:00-04:00"
        return str(self.values) if isinstance(self.values, Range) else ", ".join(self.values)

    def accepts(self, text: str) -> bool:
        if self.values is None:
            return _WINDOW.fullmatch(text) is not None and text[:5] != text[6:]
        if isinstance(self.values, Range):
            return _NUMBER.fullmatch(text) is not None and float(text) in self.values
        return text in self.values


SETTINGS: Final[Mapping[str, DeviceSetting]] = {
    setting.key: setting
    for setting in (
        DeviceSetting(
            key="log-level",
            title="least level of lines in the logs of service and agent",
            values=("debug", "info", "warning", "error"),
            reader="both",
        ),
        DeviceSetting(
            key="month-mb",
            title="most downloads in a month, megabytes",
            values=Range(0, 1e6),
            reader="agent",
        ),
        DeviceSetting(
            key="cap-kbit-s",
            title="most bandwidth of downloads, kbit/s",
            values=Range(8, 1e7),
            reader="agent",
        ),
        DeviceSetting(
            key="window",
            title="local time of day in which models are switched, where their rollout names none",
            values=None,
            reader="agent",
        ),
        DeviceSetting(
            key="power-w",
            title="limit of the mean power of the device, watts",
            values=Range(0.1, 1e4),
            reader="service",
        ),
        DeviceSetting(
            key="temperature-c",
            title="limit of the hottest zone, degrees Celsius",
            values=Range(20, 150),
            reader="service",
        ),
        DeviceSetting(
            key="battery-floor",
            title="charge that must be left after the hours of service, 0 to 1",
            values=Range(0, 1),
            reader="service",
        ),
    )
}


def find_fault(key: str, value: str) -> str:
    """Return why a value is rejected, or an empty string if it is valid."""
    setting = SETTINGS.get(key)
    if setting is None:
        return f"there is no setting '{key[:_MAX_SHOWN]}', there are: {', '.join(SETTINGS)}"
    if not setting.accepts(value):
        return f"{key} is {value[:_MAX_SHOWN]!r}, expected {setting.accepted}"
    return ""
