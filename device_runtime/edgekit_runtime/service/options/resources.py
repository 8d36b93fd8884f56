"""Options of resources that all models share, such as memory, the response cache and power."""

from typing import TYPE_CHECKING, Annotated

from edgekit_runtime.dataclass_json import Count, PositiveBytes, Range
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from edgekit_runtime.power.governor.settings import DeviceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Limits for decoding pictures and sound.

    Attributes:
        max_pixels: The maximum number of pixels of a picture. It is checked before decoding.
        max_waiting: The maximum number of requests whose files are waiting or being decoded. Further
            requests are refused.
    """

    max_pixels: int = 25_000_000
    max_waiting: Annotated[int, Range(1, 1 << 16)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory cap of all models together.

    Attributes:
        max_bytes: The limit of the estimated memory of all loaded models, or None for no limit.
        load_wait_s: How long a request waits for its model to be loaded again before it gets status 503.
        max_waiting: The maximum number of requests that wait for such loads. Further requests get status 503.
    """

    max_bytes: PositiveBytes | None = None
    load_wait_s: float = 10.0
    max_waiting: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of the response cache.

    Attributes:
        max_bytes: The size limit of all cached outputs.
        max_input_bytes: The size limit of the inputs of a cached call. Hashing larger inputs would block the
            event loop, for about 1 ms per MiB.
    """

    max_bytes: PositiveBytes = 8 << 20
    max_input_bytes: int = 256 << 10


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """Limits of the shared memory that clients register.

    Attributes:
        max_region_bytes: The size limit of all regions together.
        allows_posix: Whether clients may register POSIX segments by name. If True, any client of this user
            can register any segment of this user.
    """

    max_regions: int = 64
    max_region_bytes: int = 1 << 30
    allows_posix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLimits:
    """Limits of drift statistics.

    Attributes:
        budget_s: The mean time per call that the statistics may take.
        window: The number of sampled calls after which the weight of earlier calls is halved.
    """

    budget_s: Annotated[float, Range(1e-9, 10**9)] = 2e-6
    window: Count = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Options of the sensors, and the limits of power, temperature and battery of the whole device.

    Attributes:
        sysfs: The sysfs folder. In a container, the folder where the sysfs of the host is mounted.
        period_s: The interval at which sensors are read and the governor decides.
        power_w: The limit of the mean power over `window_s`, or None.
        temperature_c: The temperature limit of the hottest zone, or None.
        battery_floor: The battery charge that must remain after `battery_hours` of service, 0 to 1, or None.
        idle_w: The initial estimate of the power without requests. The governor refines it.
        window_s: The time over which the power is averaged. With 0, the governor only chooses settings whose
            expected power is at most `power_w`.

    Raises:
        ValueError: A value is out of range.
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
        """Return the limits for a service that started at `now_s` on the governor's clock."""
        # Imported here: most services have no governor.
        from edgekit_runtime.power.governor.settings import BatteryLimit, DeviceLimits

        battery = None
        if self.battery_floor is not None:
            battery = BatteryLimit(self.battery_floor, now_s + self.battery_hours * 3600)
        return DeviceLimits(self.power_w, self.temperature_c, battery, self.window_s)
