"""Plain values between the service and the governor: settings, their costs, limits, loads and decisions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True, order=True)
class ModelSetting:
    """One way to run a model.

    Attributes:
        batch: most requests in one run.
    """

    variant: str
    batch: int = 1
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of a setting, before anything is learned here.

    Attributes:
        latency_s: mean latency of one run with a full batch.
        energy_j: energy of one request, above the idle power. A guess may be off by a constant factor, which
            the governor learns; the order of the settings should be right.
        accuracy: 0..1.
        status: origin of latency and energy.
    """

    latency_s: float
    energy_j: float
    accuracy: float
    status: Literal["measured", "estimated"] = "estimated"

    def __post_init__(self) -> None:
        if not (0 < self.latency_s < math.inf and 0 < self.energy_j < math.inf and 0 <= self.accuracy <= 1):
            raise ValueError(f"expected latency_s > 0, energy_j > 0 and accuracy 0..1, got {self}")


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings that a governor may choose for one model, and the deadline that the model must keep.

    Attributes:
        costs: costs of all settings, at least one.
        deadline_s: time limit from a request's arrival to its answer, for 99 of 100 requests; None: no such
            limit.
        hold_s: how long a request waits at most for its batch to fill.
    """

    costs: Mapping[ModelSetting, Cost]
    deadline_s: float | None = None
    hold_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.costs:
            raise ValueError("expected at least one setting, got none")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError(f"expected deadline_s > 0, got {self.deadline_s}")
        if not 0 <= self.hold_s < math.inf:
            raise ValueError(f"expected hold_s >= 0, got {self.hold_s}")

    def of(self, setting: ModelSetting, fill: float) -> Cost:
        """Return the cost of a run with `fill` requests; its energy is per request.

        It is interpolated between the cost of a full batch and the cost of the same setting with batch 1. If
        `costs` lacks a setting with batch 1, every run costs as much as a full batch.
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
    """The charge that the battery must still have at `until_s`, and from then on.

    Attributes:
        floor: the required charge, 0..1.
        until_s: time on the governor's clock.
    """

    floor: float
    until_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise ValueError(f"expected a floor of 0 to less than 1, got {self.floor}")


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of the device, for all models; None is no limit.

    Attributes:
        power_w: mean power over any `window_s`, watts.
        temperature_c: temperature of the hottest zone.
        window_s: time over which `power_w` is averaged, as in a processor's own power limit. With 0, the
            expected power of every chosen setting is within `power_w`.
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
        rate_hz: requests that arrived, refused ones included.
        run_s: mean time of one run in the current setting, without waiting; None without runs.
        burstiness: squared coefficient of variation of the times between arrivals: 0 for a camera, 1 for
            Poisson arrivals.
        missed: share of the answered requests that missed the deadline, 0..1.
        fill: mean number of requests in one run; None if batches are full, or if it is not known.
    """

    rate_hz: float = 0.0
    run_s: float | None = None
    burstiness: float = 1.0
    missed: float = 0.0
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The input of the governor for one model at a tick.

    Attributes:
        running: the setting that ran since the last tick. A decision takes effect with a delay; None means
            that the decided setting ran.
    """

    profile: Profile
    load: Load
    running: ModelSetting | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The output of the governor for one model.

    Attributes:
        admit: share of the requests to accept, 0..1; the rest is refused at once (503 with Retry-After).
        holds: whether every limit is expected to hold with all requests accepted.
    """

    setting: ModelSetting
    admit: float = 1.0
    holds: bool = True
    reason: str = ""
