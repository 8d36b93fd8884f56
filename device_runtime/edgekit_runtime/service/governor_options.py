"""What is configured and loaded for a governor: all that a service without one imports of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgekit_runtime.canonical import JsonValue
from edgekit_runtime.service.instances import WarmRun
from edgekit_runtime.sessions.session import Session

if TYPE_CHECKING:
    from edgekit_runtime.power.settings import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorOptions:
    """Limits of one model, and what may be changed to hold them.

    Attributes:
        power_w: mean power of the device over `window_s`, or None.
        temperature_c: of the hottest zone, or None.
        battery_floor: charge that must be left `battery_hours` after the model was loaded, 0 to 1, or None.
        battery_hours: see `battery_floor`.
        deadline_ms: from a request's arrival to its answer, for 99 of 100, or None.
        idle_w: power of the device without requests, for a start: it is learned in seconds without any.
        window_s: over which `power_w` is a mean; 0 forbids more even for a moment.
        variants: of the package to choose from, the preferred first; empty for all.
        threads: numbers of threads to choose from; empty for that of the package alone.
        batches: most rows of a run to choose from; each is at most `scheduling.max_batch`.

    Raises:
        ValueError: a value is out of range, or there is no limit.
    """

    power_w: float | None = None
    temperature_c: float | None = None
    battery_floor: float | None = None
    battery_hours: float = 8.0
    deadline_ms: float | None = None
    idle_w: float = 0.0
    window_s: float = 30.0
    variants: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if self.power_w is None and self.temperature_c is None and self.battery_floor is None:
            raise ValueError("expected at least one of power_w, temperature_c and battery_floor")
        if self.idle_w < 0:
            raise ValueError(f"idle_w is {self.idle_w}, expected 0 or more")
        if not self.batches or min((*self.batches, *self.threads)) < 1 or not self.battery_hours > 0:
            raise ValueError(
                f"expected batches and threads of at least 1 and battery_hours over 0, got {self}"
            )
        self.limits(0.0)

    def limits(self, now_s: float) -> "Limits":
        """Return the limits of a model that was loaded at `now_s`."""
        # Most services have no governor, and need nothing of `power` but sensors.
        from edgekit_runtime.power.settings import BatteryLimit, Limits

        battery = None
        if self.battery_floor is not None:
            battery = BatteryLimit(self.battery_floor, now_s + self.battery_hours * 3600)
        deadline_s = None if self.deadline_ms is None else self.deadline_ms / 1e3
        return Limits(self.power_w, self.temperature_c, battery, deadline_s, self.window_s)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWay:
    """A variant that is open with a number of threads, for a governor to choose.

    Attributes:
        variant: its name.
        threads: of one run; 0 for those of the package.
        instances: its sessions, which proved themselves.
        warm_runs: what was measured before there was traffic.
        figures: of the variant, from the manifest.
    """

    variant: str
    threads: int
    instances: tuple[Session, ...]
    warm_runs: tuple[WarmRun, ...]
    figures: Mapping[str, JsonValue]
