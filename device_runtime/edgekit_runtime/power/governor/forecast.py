"""Forecasts the power and the latency of a setting from its stated costs and from learned factors.

Each setting has two factors, one for energy and one for running time. A factor is the ratio of observed to
stated costs. A setting that was never used gets the mean factor of the other settings, since heat, clocks and
other programs slow all models on a device alike.

Source: C. Wan et al., ALERT: Accurate Learning for Energy and Timeliness, USENIX ATC 2020, section 3 (one
slow-down factor for all settings); S. Asmussen, Applied Probability and Queues, 2nd edition, chapter XIII
(the exponential tail of a wait), for the queue.
"""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Final

from edgekit_runtime.power.governor.settings import Load, ModelSetting, Profile
from edgekit_runtime.records import dataclass

_LEAST_GAIN: Final = 0.04  # for a setting that was used long: averages out noise, follows warming up
_FORGOTTEN_S: Final = 300.0  # after this time without a reading, the next one counts as the first
_RATIO_BOUNDS: Final = (0.05, 20.0)
_NEWTON_STEPS: Final = 5
_MOST_BUSY: Final = 0.92  # share of the time. Nearer to 1, queues grow without end


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected power and latency of a setting.

    Attributes:
        power_w: The power above the idle power, in watts.
        latency_s: The 99th percentile of the time from arrival to answer. Infinite if requests arrive too
            fast.
    """

    power_w: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Factor:
    """The ratio of observed to stated costs, for each setting that was used and for all settings together.

    Attributes:
        overall: The geometric mean of the ratios, used for settings without observations.
        by_setting: A dict from each used setting to its ratio and the weight of its observations.
    """

    overall: float = 1.0
    by_setting: Mapping[ModelSetting, tuple[float, float]] = field(default_factory=dict, hash=False)

    def of(self, setting: ModelSetting) -> float:
        return self.by_setting[setting][0] if setting in self.by_setting else self.overall

    def age(self, dt_s: float) -> "Factor":
        """Return the factors after `dt_s` seconds. The weight of earlier observations decreases with time."""
        retention = max(0.0, 1 - dt_s / _FORGOTTEN_S)
        return replace(
            self,
            by_setting={
                setting: (factor, retention * count) for setting, (factor, count) in self.by_setting.items()
            },
        )

    def gain(self, setting: ModelSetting, least: float = _LEAST_GAIN) -> float:
        """Return the weight of the next observation of a setting, from `least` to 1."""
        # The forecast counts as one reading: a mean at first, later a mean that forgets.
        return max(least, 1 / (self.by_setting.get(setting, (0.0, 0.0))[1] + 2))

    def learn(self, setting: ModelSetting, ratio: float, gain: float) -> "Factor":
        """Return the factors after one observation of a setting.

        `ratio` is limited to the range 0.05 to 20. `gain` is the result of the method `gain`.
        """
        ratio = min(max(ratio, _RATIO_BOUNDS[0]), _RATIO_BOUNDS[1])
        learned_factor, count = self.of(setting), self.by_setting.get(setting, (0.0, 0.0))[1]
        factors = {
            **self.by_setting,
            setting: (learned_factor + gain * (ratio - learned_factor), min(count + 1, 1 / gain)),
        }
        return Factor(
            math.exp(sum(math.log(factor) for factor, _ in factors.values()) / len(factors)), factors
        )


@dataclass(frozen=True, slots=True)
class Learned:
    """The factors of one model on this device.

    Attributes:
        energy: The factor for the energy of a request.
        run: The factor for the time of a run.
    """

    energy: Factor = field(default_factory=Factor)
    run: Factor = field(default_factory=Factor)

    def forecast(self, setting: ModelSetting, load: Load, profile: Profile) -> Forecast:
        """Return the forecast of `setting` under `load`, assuming that all requests are accepted."""
        run_s = self.run_s(setting, profile)
        done_hz = min(load.rate_hz, setting.batch / run_s)
        cost = profile.of(setting, _fill(setting.batch, run_s, load, profile.hold_s))
        energy_j = cost.energy_j * self.energy.of(setting)
        return Forecast(done_hz * energy_j, run_s + _wait_s(setting.batch, run_s, load, profile.hold_s))

    def run_s(self, setting: ModelSetting, profile: Profile) -> float:
        """Return the expected time in seconds of one run with a full batch in `setting`."""
        return profile.costs[setting].latency_s * self.run.of(setting)

    def learn_run(
        self, setting: ModelSetting, run_s: float, fill: float | None, profile: Profile
    ) -> "Learned":
        """Return the factors after runs that took `run_s` seconds on average.

        `fill` is the mean number of requests in a run, or None if all batches were full.
        """
        ratio = run_s / profile.of(setting, setting.batch if fill is None else fill).latency_s
        return replace(self, run=self.run.learn(setting, ratio, self.run.gain(setting)))


def _fill(batch: int, run_s: float, load: Load, hold_s: float) -> float:
    """Mean number of requests in a run: those that came while the first waited or the engine was busy."""
    joined = load.rate_hz * hold_s - max(0.0, 1 - load.burstiness)  # an even stream's next one is a gap away
    return min(batch, max(1.0, 1 + joined, load.rate_hz * run_s))


def _wait_s(batch: int, run_s: float, load: Load, hold_s: float) -> float:
    """99th percentile of the time before a run: until the batch begins, or until the engine is free.

    A batch fills while the one before it runs, so the longer of the two waits counts, not both.
    """
    if load.rate_hz <= 0:
        return 0.0
    busy = load.rate_hz * run_s / batch
    if busy >= _MOST_BUSY:
        return math.inf
    others = batch - 1
    filling_s = (others + 2.33 * math.sqrt(others * load.burstiness)) / load.rate_hz
    queue_s = _queue(busy) * load.burstiness / batch * run_s
    return max(min(filling_s, hold_s), queue_s)


def _queue(busy: float) -> float:
    """99th percentile of the wait of random arrivals at an engine whose runs are alike, in runs.

    The tail of the wait is `weight * exp(-decay * runs)`. If the times between arrivals are gamma
    distributed with a burstiness other than 1, the wait is longer by about that factor: `decay` is smaller by
    exactly that factor. A batch of n is n arrivals, so their burstiness is an n-th.
    """
    if busy <= 0.01:
        return 0.0
    decay = 2 * math.log(1 / busy)  # above the root, so that Newton's steps descend to it
    for _ in range(_NEWTON_STEPS):
        remainder = busy * math.expm1(decay) - decay
        decay -= remainder / (busy * math.exp(decay) - 1)
    weight = (1 - busy) / (busy * math.exp(decay) - 1)
    return math.log(100 * weight) / decay
