"""Options of what all models share: memory, response cache, drift statistics, sensors and power."""

from typing import TYPE_CHECKING, Annotated

from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from edgekit_runtime.power.governor.settings import DeviceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Bounds of photographs and sound that the service decodes.

    Attributes:
        max_pixels: most pixels of a picture, checked before it is decoded.
        max_waiting: most requests whose files are being decoded or wait for that; further ones are refused.
    """

    max_pixels: int = 25_000_000
    max_waiting: Annotated[int, Range(1, 1 << 16)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory cap of all models together.

    Attributes:
        max_bytes: limit of the estimated memory of all loaded models; None for no cap.
        load_wait_s: how long a request may wait while its unloaded model is loaded again. Then it gets a 503.
        max_waiting: most requests that wait for such loads; further ones get a 503.
    """

    max_bytes: Annotated[int | None, Range(1, 1 << 50)] = None
    load_wait_s: float = 10.0
    max_waiting: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Bounds of a response cache.

    Attributes:
        max_bytes: size limit of all outputs that it keeps.
        max_input_bytes: calls with larger inputs are not cached: hashing takes about 1 ms per MiB on the
            thread of the event loop.
    """

    max_bytes: Annotated[int, Range(1, 1 << 50)] = 8 << 20
    max_input_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """Bounds of the shared memory that clients register.

    Attributes:
        max_region_bytes: size limit of all regions together.
        allows_posix: whether clients may register POSIX segments by name. Then any client of this user
            can register any segment of this user.
    """

    max_regions: int = 64
    max_region_bytes: int = 1 << 30
    allows_posix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLimits:
    """Bounds of the time and the window of drift statistics.

    Attributes:
        budget_s: mean time per call that the statistics may take.
        window: number of sampled calls after which the weight of earlier calls is halved.
    """

    budget_s: Annotated[float, Range(1e-9, 10**9)] = 2e-6
    window: Annotated[int, Range(1, (1 << 31) - 1)] = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Sensors of the device, and the limits of power, temperature and battery of the whole device.

    Attributes:
        sysfs: folder with the kernel's sysfs; in a container, the folder where the host's sysfs is mounted.
        period_s: time between two readings, and between two decisions of the governor.
        power_w: limit of the mean power over `window_s`, or None.
        temperature_c: limit of the hottest zone, or None.
        battery_floor: battery charge to be left after `battery_hours` of service, 0 to 1, or None.
        idle_w: first estimate of the power without requests; the governor learns the real one.
        window_s: time over which the mean power is taken; with 0, no setting may take more than `power_w`.

    Raises:
        ValueError: the governor cannot hold such a limit.
    """

    sensors: bool = True
    sysfs: str = "/sys"
    period_s: Annotated[float, Range(0.05, 60)] = 1.0
    power_w: float | None = None
    temperature_c: float | None = None
    battery_floor: float | None = None
    battery_hours: Annotated[float, Range(0.001, 10**6)] = 8.0
    idle_w: float = 0.0
    window_s: float = 30.0

    def __post_init__(self) -> None:
        if self.is_limited:
            self.limits(0.0)

    @property
    def is_limited(self) -> bool:
        return (self.power_w, self.temperature_c, self.battery_floor) != (None, None, None)

    def limits(self, now_s: float) -> "DeviceLimits":
        """Return the limits for a service that starts at `now_s`, on the governor's clock."""
        # Imported here: most services have no governor.
        from edgekit_runtime.power.governor.settings import BatteryLimit, DeviceLimits

        battery = None
        if self.battery_floor is not None:
            battery = BatteryLimit(self.battery_floor, now_s + self.battery_hours * 3600)
        return DeviceLimits(self.power_w, self.temperature_c, battery, self.window_s)
