"""The governor: learns from measurements, tracks the power budget, and calls `choose`.

One governor enforces the limits of a device for all of its models. `tick` must be called once a second,
always on the same thread. It reads no clock and no sensor itself.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Final

from edgekit_runtime.power.governor.budget import Charge, Heat
from edgekit_runtime.power.governor.choose import LEAST_ADMIT, GovernorModel, State, choose, most_credit_j
from edgekit_runtime.power.governor.forecast import Learned
from edgekit_runtime.power.governor.plausibility import SensorFilter
from edgekit_runtime.power.governor.settings import Decision, DeviceLimits, ModelSetting, Seen
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.records import dataclass

_LOAD_GAINS: Final = (0.1, 0.5)  # for seconds whose number of requests chance explains, and for others
_BURSTINESS_GAIN: Final = 0.1  # one second has too few gaps to show much
_IDLE_GAIN: Final = 0.1  # weight of one second's reading
_IDLE_W: Final = 0.02  # under this share of the idle power, the models' power does not show
_NOISE_GAIN: Final = 0.05
_NOISE: Final = 0.03  # relative noise of a reading, before some were seen
_DRIFT: Final = 0.0006  # per reading: share by which warming up changes the cost of a request
_GAINS: Final = (0.006, 0.04)  # least weight of a reading, by how noisy readings are
_SETTLING_S: Final = 0.9  # after a change. Readings in this time belong to both settings
_STALE_S: Final = 3.0  # older readings mean that the sensor hangs
_POWER_PATIENCE: Final = 15
_HEAT_PATIENCE: Final = 120  # zones step by a degree
_BLIND_S, _BLIND_SHARE = 30.0, 0.025  # after this time without power, this share of the limit is kept free
_AIM: Final = 0.995  # share of the budget to aim at: turns of two settings swing by a few percent
_NOISY: Final = 0.065  # a reading with this noise counts as much as the learned factors of a used plan
_LOG_EVERY_S: Final = 60.0
_MISSED: Final = 0.005  # share of late answers at which caution is constant, half of the allowed share
_CAUTION_GAIN: Final = 0.3
_MORE_CAUTION, _MOST_CAUTION = 0.04, 0.5  # growth in a second, and maximum

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Governor:
    """Chooses the settings of all models so that the device stays within its limits.

    Attributes:
        limits: The limits. They may be replaced between two ticks.
        idle_w: The initial estimate of the power without requests, in watts.
    """

    limits: DeviceLimits
    idle_w: float = 0.0
    state: State = field(init=False)
    _at_s: float | None = field(default=None, init=False)
    _power: SensorFilter = field(default=SensorFilter(_POWER_PATIENCE), init=False)
    _heat: SensorFilter = field(default=SensorFilter(_HEAT_PATIENCE), init=False)
    _noise: float = field(default=_NOISE**2, init=False)  # mean square of a reading's relative error
    _error: float = field(default=0.0, init=False)  # relative error of the last reading
    _seen_s: float = field(default=-math.inf, init=False)
    _logged: tuple[float, bool] = field(default=(-math.inf, True), init=False)  # time, whether limits held

    def __post_init__(self) -> None:
        self.state = State(idle_w=self.idle_w)

    def tick(self, now_s: float, readings: Readings, observations: Mapping[str, Seen]) -> dict[str, Decision]:
        """Update `state` from the readings and return the decisions that changed.

        Also logs when the limits can no longer be kept, and when they can be kept again.

        Args:
            now_s: The time on the clock of `readings.at_s`.
            readings: The latest readings. If they are more than a few seconds old, they count as missing.
            observations: A dict from the name of each governed model to its load since the last tick.

        Returns:
            A dict from model names to new decisions.
        """
        dt_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if now_s - readings.at_s > _STALE_S:
            readings = Readings(at_s=now_s)
        self._update_models(observations)
        if not observations:
            return {}
        if dt_s > 0:
            self._learn(readings, observations, dt_s)
        self._account(readings, now_s, dt_s)
        decisions = choose(self.state, self.limits, now_s)
        before = {name: model.decision for name, model in self.state.models.items()}
        models = {name: replace(model, decision=decisions[name]) for name, model in self.state.models.items()}
        moved = any(was is None or was.setting != decisions[name].setting for name, was in before.items())
        self.state = replace(self.state, models=models, since_s=now_s if moved else self.state.since_s)
        self._log_limits(decisions, now_s)
        return {name: decision for name, decision in decisions.items() if decision != before[name]}

    @property
    def power_w(self) -> float:
        """The power of the device in watts. It is a forecast if there is no plausible reading."""
        expected_w = self._expected_w()
        measured_w = self._power.latest(expected_w)
        return expected_w if measured_w is None else measured_w

    def _update_models(self, observations: Mapping[str, Seen]) -> None:
        previous = self.state.models
        models = {
            name: previous.get(name, GovernorModel(observation.profile, load=observation.load))
            for name, observation in sorted(observations.items())
        }
        self.state = replace(self.state, models=models)

    def _expected_w(self) -> float:
        return self.state.idle_w + sum(_drawn_w(model) for model in self.state.models.values())

    def _log_limits(self, decisions: Mapping[str, Decision], now_s: float) -> None:
        """Log when limits cease to hold and when they hold again, at most once a minute."""
        at_s, were_held = self._logged
        failing = next(((name, decided) for name, decided in decisions.items() if not decided.holds), None)
        if were_held == (failing is None) or now_s - at_s < _LOG_EVERY_S:
            return
        self._logged = now_s, failing is None
        if failing is None:
            _logger.info("limits hold again")
        else:
            name, decision = failing
            _logger.warning("limits cannot be held with all requests: %s: %s", name, decision.reason)

    def _learn(self, readings: Readings, observations: Mapping[str, Seen], dt_s: float) -> None:
        state = self.state
        expected_w = self._expected_w()
        self._power = self._power.see(readings.power_w, expected_w)
        self._heat = self._heat.see(readings.temperature_c, expected_w)
        self._seen_s = self._seen_s if self._power.value is None else readings.at_s
        is_blind = readings.at_s - self._seen_s > _BLIND_S
        # Once power is back, each setting needs turns until all are learned again.
        blind = _BLIND_SHARE if is_blind else max(0.0, state.blind - _BLIND_SHARE * dt_s / _BLIND_S)
        settled = readings.at_s - state.since_s >= _SETTLING_S and all(
            _obeys(observations[name], model) for name, model in state.models.items()
        )
        models = {
            name: _learn_load(model, observations[name], dt_s, settled=settled)
            for name, model in state.models.items()
        }
        self.state = replace(state, models=models, blind=blind)
        measured_w = self._power.latest(self._expected_w())
        if settled and measured_w is not None:
            self._learn_power(measured_w)

    def _learn_power(self, measured_w: float) -> None:
        """Divide the error of the forecast among the models, by the uncertainty of each.

        Source: R. E. Kalman, A New Approach to Linear Filtering and Prediction Problems, 1960: the gain of a
        filter whose uncertainties are independent of each other.
        """
        state, error_w = self.state, measured_w - self._expected_w()
        drawn_w = {name: _drawn_w(model) for name, model in state.models.items()}
        if sum(drawn_w.values()) <= _IDLE_W * state.idle_w:
            self.state = replace(state, idle_w=state.idle_w + _IDLE_GAIN * error_w)
            return
        error = error_w / max(measured_w, state.idle_w)
        # By differences: a wrong forecast has the same error each time, a noisy sensor does not.
        self._noise += _NOISE_GAIN * ((error - self._error) ** 2 / 2 - self._noise)
        self._error = error
        least = min(max(_DRIFT / max(_DRIFT, math.sqrt(self._noise)), _GAINS[0]), _GAINS[1])
        in_force = {
            name: model.decision.setting
            for name, model in state.models.items()
            if model.decision is not None and drawn_w[name] > 0
        }
        models = dict(state.models)
        gains = {
            name: models[name].learned.energy.gain(chosen_setting, least)
            for name, chosen_setting in in_force.items()
        }
        doubt = sum(gain * drawn_w[name] ** 2 for name, gain in gains.items())
        for name, setting in in_force.items():
            share = gains[name] * drawn_w[name] ** 2 / doubt
            ratio = 1 + share * error_w / drawn_w[name]
            models[name] = _learn_energy(models[name], setting, ratio, gains[name])
        self.state = replace(state, models=models)

    def _account(self, readings: Readings, now_s: float, dt_s: float) -> None:
        limits, heat, charge = self.limits, Heat(), Charge()
        if limits.temperature_c is not None:
            heat = self.state.heat.step(limits.temperature_c, self._heat.value, self._range_w(), now_s, dt_s)
        if limits.battery is not None:
            charge = self.state.charge.step(limits.battery, readings.battery, self.power_w, now_s, dt_s)
        self.state = replace(self.state, heat=heat, charge=charge)
        allowed_w = self.state.allowed_w(limits)
        most_j = most_credit_j(allowed_w, limits)
        credit_j = 0.0
        if most_j > 0:
            # Energy from before the window does not count any more.
            retention = max(0.0, 1 - dt_s / limits.window_s)
            credit_j = self.state.credit_j * retention + (_AIM * allowed_w - self._used_w()) * dt_s
        # Savings for half a turn are enough; the energy of a whole turn and a half may be overdrawn.
        self.state = replace(self.state, credit_j=min(most_j / 2, max(-1.5 * most_j, credit_j)))

    def _used_w(self) -> float:
        expected_w, measured_w = self._expected_w(), self.power_w
        is_known = all(
            model.decision is not None and model.decision.setting in model.learned.energy.by_setting
            for model in self.state.models.values()
        )
        if not is_known:
            return measured_w
        if self._power.repeats:  # the sensor may be stuck; if it is steady, the forecast has learned it
            return expected_w
        # Noise would become debt, and the learned factors lag behind the load and warming up.
        return expected_w + (measured_w - expected_w) / (1 + self._noise / _NOISY**2)

    def _range_w(self) -> tuple[float, float]:
        """Return the least and the greatest power that the settings of all models can make."""
        low_w = high_w = self.state.idle_w
        for model in self.state.models.values():
            drawn = [forecast.power_w for forecast in model.forecasts().values()]
            low_w, high_w = low_w + LEAST_ADMIT * min(drawn), high_w + max(drawn)
        return low_w, high_w


def _drawn_w(model: GovernorModel) -> float:
    """Return the power above idle that a model is expected to draw."""
    if model.decision is None:
        return 0.0
    admitted_load = replace(model.load, rate_hz=model.load.rate_hz * model.decision.admit)
    return model.learned.forecast(model.decision.setting, admitted_load, model.profile).power_w


def _obeys(observation: Seen, model: GovernorModel) -> bool:
    return model.decision is not None and observation.running in (None, model.decision.setting)


def _learn_load(model: GovernorModel, observation: Seen, dt_s: float, *, settled: bool) -> GovernorModel:
    """Return the model with a smoothed load, and with new factors if it ran in one setting only."""
    load, previous = observation.load, model.load
    chance = 1 + 2 * math.sqrt(previous.rate_hz * previous.burstiness)
    gain = _LOAD_GAINS[abs(load.rate_hz - previous.rate_hz) > chance] if previous.rate_hz > 0 else 1.0
    smooth = replace(
        load,
        rate_hz=previous.rate_hz + gain * (load.rate_hz - previous.rate_hz),
        burstiness=previous.burstiness + _BURSTINESS_GAIN * (load.burstiness - previous.burstiness),
    )
    learned = Learned(model.learned.energy.age(dt_s), model.learned.run)
    caution, decision = model.caution, model.decision
    if settled and decision is not None and load.run_s is not None:
        learned = learned.learn_run(decision.setting, load.run_s, load.fill, model.profile)
    if decision is not None and decision.holds:
        # Tracks a quantile: it settles where the share of late answers is `_MISSED`.
        more = min(_MORE_CAUTION, _CAUTION_GAIN * (load.missed - _MISSED))
        caution = min(_MOST_CAUTION, max(0.0, caution + more))
    return replace(model, load=smooth, learned=learned, caution=caution)


def _learn_energy(model: GovernorModel, setting: ModelSetting, ratio: float, gain: float) -> GovernorModel:
    """Return the model after it drew `ratio` times the expected power in a setting."""
    energy = model.learned.energy
    energy = energy.learn(setting, ratio * energy.of(setting), gain)
    return replace(model, learned=replace(model.learned, energy=energy))
