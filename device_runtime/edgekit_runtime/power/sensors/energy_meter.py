"""Measures the energy of a request by a fixed rule.

The energy above the idle power is divided among the models in proportion to the time for which their engines
ran. The energy of a request is the energy of its model divided by the number of requests. It is known only
after power and idle power were measured on this device, and is never estimated. It includes the energy of
other programs that ran at the same time.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.records import dataclass

_IDLE_BUSY_SHARE: Final = 0.01  # under this an interval counts as idle
_IDLE_GAIN: Final = 0.1  # weight of a new idle interval. Leakage changes within a minute
_IDLE_SAMPLES: Final = 5  # idle intervals before the idle power counts as measured


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a model since the last tick: the time its engine ran, and how many requests it answered."""

    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class EnergyShare:
    """A model's share of the energy above idle in one interval.

    Attributes:
        requests: The number of requests, at least 1.
    """

    joules: float
    requests: int

    @property
    def per_request_j(self) -> float:
        """The mean energy of a request, in joules."""
        return self.joules / self.requests


@dataclass(slots=True, kw_only=True)
class EnergyMeter:
    """Divides the measured energy among the models.

    Attributes:
        idle_w: The power without work in watts, or None if it was not measured yet.
    """

    idle_w: float | None = None
    _at_s: float | None = None
    _pending: dict[str, Work] = field(default_factory=dict)
    _idle_seen: int = 0
    _joules: dict[str, float] = field(default_factory=dict)
    _requests: dict[str, int] = field(default_factory=dict)

    def add(self, readings: Readings, work: Mapping[str, Work]) -> dict[str, EnergyShare]:
        """Add the work of the models to the current interval. Each new reading ends an interval.

        Args:
            readings: The latest readings. If they are the same as before, only the work is added.
            work: A dict from model names to their work since the last call.

        Returns:
            A dict from each model with requests to its share of the interval that ended. Empty if no interval
            ended, the device was idle, or its energy or idle power was not measured.
        """
        for name, model_work in work.items():
            before = self._pending.get(name, Work(0.0, 0))
            self._pending[name] = Work(
                before.busy_s + model_work.busy_s, before.requests + model_work.requests
            )
        if readings.at_s == self._at_s:
            return {}
        self._at_s = readings.at_s
        done, self._pending = self._pending, {}
        return self._share_out(readings, done)

    def _share_out(self, readings: Readings, work: Mapping[str, Work]) -> dict[str, EnergyShare]:
        energy_j, seconds = readings.interval_j, readings.interval_s
        if energy_j is None or seconds <= 0:
            return {}
        busy_s = sum(model_work.busy_s for model_work in work.values())
        if busy_s < _IDLE_BUSY_SHARE * seconds:
            self._learn_idle(energy_j / seconds)
            return {}
        if self.idle_w is None or self._idle_seen < _IDLE_SAMPLES:
            return {}
        above_j = max(0.0, energy_j - self.idle_w * seconds)
        shares = {name: above_j * model_work.busy_s / busy_s for name, model_work in work.items()}
        for name, model_work in work.items():
            self._joules[name] = self._joules.get(name, 0.0) + shares[name]
            self._requests[name] = self._requests.get(name, 0) + model_work.requests
        return {
            name: EnergyShare(shares[name], model_work.requests)
            for name, model_work in work.items()
            if model_work.requests
        }

    def request_j(self, model: str) -> float | None:
        """Return the mean energy above idle of all requests to `model` in joules, or None if not measured."""
        requests = self._requests.get(model, 0)
        return self._joules[model] / requests if requests else None

    def _learn_idle(self, power_w: float) -> None:
        self._idle_seen += 1
        self.idle_w = power_w if self.idle_w is None else self.idle_w + _IDLE_GAIN * (power_w - self.idle_w)
