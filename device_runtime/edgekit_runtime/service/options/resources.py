"""Options of what all models share: memory, caches, drift statistics, sensors and power."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekit_runtime.power.governor.settings import DeviceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What all models may take together.

    Attributes:
        max_bytes: of all models that are loaded, by what their packages say; None for no cap.
        load_wait_s: how long a request waits for a model that was unloaded for others, until it gets a 503.
        max_waiting: requests that wait so at once; further ones get a 503.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int | None = None
    load_wait_s: float = 10.0
    max_waiting: int = 128

    def __post_init__(self) -> None:
        if (
            (self.max_bytes is not None and self.max_bytes < 1)
            or self.load_wait_s < 0
            or self.max_waiting < 0
        ):
            raise ValueError(
                f"expected max_bytes over 0, load_wait_s and max_waiting of 0 or more, got {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Bounds of a response cache.

    Attributes:
        max_bytes: of all answers that it keeps.
        max_input_bytes: calls with larger inputs pass by: hashing takes about 1 ms a MiB, on the loop's
            thread.
    """

    max_bytes: int = 8 << 20
    max_input_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_input_bytes < 0:
            raise ValueError(f"expected max_bytes >= 1 and max_input_bytes >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """How much memory clients may register.

    Attributes:
        max_regions: at one time.
        max_region_bytes: of all of them together.
        allows_posix: whether segments may be registered by their name alone, which any client of this user
            can do.
    """

    max_regions: int = 64
    max_region_bytes: int = 1 << 30
    allows_posix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLimits:
    """How much is looked at.

    Attributes:
        budget_s: mean time per call.
        window: calls that were looked at after which all so far lose half their weight.
    """

    budget_s: float = 2e-6
    window: int = 4096

    def __post_init__(self) -> None:
        if not self.budget_s > 0 or self.window < 1:
            raise ValueError(f"expected budget_s > 0 and window >= 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Sensors of the device, and the limits that hold for all of it.

    Attributes:
        sensors: whether they are looked for.
        sysfs: root of the tree that the kernel shows, such as that of the host in a container.
        period_s: between two readings and two decisions.
        power_w: mean power of the device over `window_s`, or None.
        temperature_c: of the hottest zone, or None.
        battery_floor: charge that must be left `battery_hours` after the start, 0 to 1, or None.
        battery_hours: see `battery_floor`.
        idle_w: power of the device without requests, for a start: it is learned in seconds without any.
        window_s: over which `power_w` is a mean; 0 forbids more even for a moment.

    Raises:
        ValueError: a value is out of range.
    """

    sensors: bool = True
    sysfs: str = "/sys"
    period_s: float = 1.0
    power_w: float | None = None
    temperature_c: float | None = None
    battery_floor: float | None = None
    battery_hours: float = 8.0
    idle_w: float = 0.0
    window_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0.05 <= self.period_s <= 60:
            raise ValueError(f"period_s is {self.period_s}, expected 0.05 to 60")
        if not (self.idle_w >= 0 and self.battery_hours > 0):
            raise ValueError(
                f"expected idle_w of at least 0 and battery_hours over 0, got {self.idle_w} and"
                f" {self.battery_hours}"
            )
        if self.is_limited:
            self.limits(0.0)

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to hold."""
        return (self.power_w, self.temperature_c, self.battery_floor) != (None, None, None)

    def limits(self, now_s: float) -> "DeviceLimits":
        """Return the limits of a device that began to serve at `now_s`."""
        # Most services have no governor, and need nothing of `power` but sensors.
        from edgekit_runtime.power.governor.settings import BatteryLimit, DeviceLimits

        battery = None
        if self.battery_floor is not None:
            battery = BatteryLimit(self.battery_floor, now_s + self.battery_hours * 3600)
        return DeviceLimits(self.power_w, self.temperature_c, battery, self.window_s)
