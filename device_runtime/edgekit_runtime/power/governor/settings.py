"""The values that the service and the governor exchange: settings, costs, limits, loads and decisions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class ModelSetting:
    """One way to run a model.

    Attributes:
        batch: The maximum number of requests in one run.
    """

    variant: str
    batch: int = 1
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a setting before the governor learns from measurements.

    Attributes:
        latency_s: The mean latency of one run with a full batch.
        energy_j: The energy of one request above the idle power. It may be wrong by a constant factor, which
            the governor learns, but the order of the settings should be right.
        accuracy: The accuracy, 0 to 1.
    """

    latency_s: float
    energy_j: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings that a governor may choose for one model, and the model's deadline.

    Attributes:
        costs: A dict from each setting to its costs. At least one entry.
        deadline_s: The time from arrival to answer that 99 of 100 requests must meet, or None.
        hold_s: The longest time that a request waits for its batch to fill.
    """

    costs: Mapping[ModelSetting, Cost]
    deadline_s: float | None = None
    hold_s: float = 0.0

    def of(self, setting: ModelSetting, fill: float) -> Cost:
        """Return the latency of a run with `fill` requests, and the energy of each request.

        The cost is interpolated between a full batch and the same setting with batch 1. If `costs` has no
        setting with batch 1, every run costs as much as a full batch.
        """
        full, alone = self.costs[setting], self.costs.get(replace(setting, batch=1))
        if alone is None or fill >= setting.batch:
            return full
        share = max(0.0, fill - 1) / (setting.batch - 1)
        run_s = alone.latency_s + share * (full.latency_s - alone.latency_s)
        run_j = alone.energy_j + share * (setting.batch * full.energy_j - alone.energy_j)
        return replace(full, latency_s=run_s, energy_j=run_j / max(1.0, fill))


@dataclass(frozen=True, slots=True)
class BatteryLimit:
    """The charge that the battery must have at `until_s` and later.

    Attributes:
        floor: The required charge, 0 to 1.
        until_s: The time on the governor's clock.
    """

    floor: float
    until_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise ValueError(f"expected a floor of 0 to less than 1, got {self.floor}")


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of the device for all models together. None means no limit.

    Attributes:
        power_w: The limit of the mean power over any period of `window_s`, in watts.
        temperature_c: The limit of the hottest zone, in degrees Celsius.
        window_s: The period over which the power is averaged. If 0, the expected power of every chosen
            setting is at most `power_w`.
    """

    power_w: float | None = None
    temperature_c: float | None = None
    battery: BatteryLimit | None = None
    window_s: float = 30.0

    def __post_init__(self) -> None:
        if self.power_w is not None and not 0 < self.power_w < math.inf:
            raise ValueError(f"expected power_w > 0, got {self.power_w}")
        if not 0 <= self.window_s < math.inf:
            raise ValueError(f"expected window_s >= 0, got {self.window_s}")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one model since the last tick.

    Attributes:
        rate_hz: The number of requests that arrived per second, including rejected ones.
        run_s: The mean time of one run in the current setting, without waiting. None without runs.
        burstiness: The squared coefficient of variation of the time between arrivals: 0 for a camera, 1 for
            Poisson arrivals.
        missed: The fraction of the answered requests that missed the deadline.
        fill: The mean number of requests in one run. None if batches are full or the number is unknown.
    """

    rate_hz: float = 0.0
    run_s: float | None = None
    burstiness: float = 1.0
    missed: float = 0.0
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The governor's input for one model at a tick.

    Attributes:
        running: The setting that was used since the last tick, which may differ from the decision because of
            a delay. None means that the decided setting was used.
    """

    profile: Profile
    load: Load
    running: ModelSetting | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The governor's output for one model.

    Attributes:
        admit: The fraction of the requests to accept. The others are rejected with 503 and Retry-After.
        holds: Whether all limits are expected to hold if all requests are accepted.
    """

    setting: ModelSetting
    admit: float = 1.0
    holds: bool = True
    reason: str = ""
