"""The governor: learns from what is measured, keeps account of the budget, and carries `choose` out.

One governor holds the limits for one model. It is ticked once a second on any thread, always the same
one, and neither reads a clock nor a sensor.
"""

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Final

from edgekit_runtime.power.budget import Charge, Heat
from edgekit_runtime.power.choose import LEAST_ADMIT, State, choose, most_credit_j
from edgekit_runtime.power.forecast import Learned
from edgekit_runtime.power.readings import Readings
from edgekit_runtime.power.settings import Decision, Limits, Load, Profile, Setting
from edgekit_runtime.power.trust import Trust

_LOAD_GAIN: Final = 0.3
_BURSTINESS_GAIN: Final = 0.1  # one second holds too few gaps to say much
_SETTLING_S: Final = 0.9  # after a change; what is measured then belongs to both settings
_STALE_S: Final = 3.0  # readings older than this are of a sensor that hangs
_POWER_PATIENCE: Final = 15
_HEAT_PATIENCE: Final = 120  # zones step by a degree
_BLIND_S, _BLIND_SHARE = 30.0, 0.05  # without power for so long, so much of the limit is kept free
_AIM: Final = 0.995  # of the budget: turns of two settings swing by a few percent around it
_DEBT_SHARE: Final = 2.0  # of the most credit; an older debt is forgiven, a long one would starve the device
_MEASURED_SHARE: Final = 0.25  # of a used setting's power, beside what was learned: noise would become debt
_TELL_EVERY_S: Final = 60.0
_MISSED: Final = 0.01
_MORE_CAUTION, _LESS_CAUTION, _MOST_CAUTION = 0.04, 0.995, 0.5  # a step up a late second; minutes to fade

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Governor:
    """Holds limits.

    Attributes:
        profile: settings to choose from; at the start the first decision is by these costs alone.
        limits: may be replaced at any time between two ticks.
        state: what is remembered.
    """

    profile: Profile
    limits: Limits
    state: State = field(init=False)
    _at_s: float | None = field(default=None, init=False)
    _power: Trust = field(default=Trust(_POWER_PATIENCE), init=False)
    _seen_s: float = field(default=-math.inf, init=False)
    _obeyed: bool = field(default=True, init=False)
    _told_s: float = field(default=-math.inf, init=False)
    _heat: Trust = field(default=Trust(_HEAT_PATIENCE), init=False)

    def __post_init__(self) -> None:
        self.state = State(Learned(self.profile.idle_w))

    def tick(
        self, now_s: float, readings: Readings, load: Load, running: Setting | None = None
    ) -> Decision | None:
        """Take one step, about a second after the last; return what changes, or None.

        Args:
            now_s: on the clock of `readings.at_s`.
            readings: the latest; old ones count as missing.
            load: what the service counted since the last tick.
            running: what was really run since then, where a change takes its time; None: what was decided.
        """
        decided = self.state.decision
        self._obeyed = running is None or decided is None or running == decided.setting
        dt_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if now_s - readings.at_s > _STALE_S:
            readings = Readings(at_s=now_s)
        self._learn(readings, load, dt_s)
        self._account(readings, now_s, dt_s)
        before = self.state.decision
        decision = choose(self.state, replace(readings, at_s=now_s), self.limits, self.profile)
        since_s = self.state.since_s
        if before is None or before.setting != decision.setting:
            since_s = now_s
        self.state = replace(self.state, decision=decision, since_s=since_s)
        if before is None or before.holds != decision.holds:
            self._tell(decision, now_s)
        same = before is not None and (before.setting, before.admit) == (decision.setting, decision.admit)
        return None if same else decision

    @property
    def power_w(self) -> float:
        """What the device draws: measured where that can be believed, else forecast."""
        expected_w = self._expected_w()
        measured_w = self._power.latest(expected_w)
        return expected_w if measured_w is None else measured_w

    def _expected_w(self) -> float:
        decision = self.state.decision
        if decision is None:
            return self.state.learned.idle_w
        taken = replace(self.state.load, rate_hz=self.state.load.rate_hz * decision.admit)
        return self.state.learned.forecast(decision.setting, taken, self.profile).power_w

    def _tell(self, decision: Decision, now_s: float) -> None:
        if now_s - self._told_s < _TELL_EVERY_S:  # at the edge of what can be held it comes and goes
            return
        self._told_s = now_s
        if decision.holds:
            _logger.info("limits hold: %s", decision.reason or "the best setting")
        else:
            _logger.warning("limits cannot be held with all requests: %s", decision.reason)

    def _learn(self, readings: Readings, load: Load, dt_s: float) -> None:
        state, decision = self.state, self.state.decision
        if dt_s <= 0 or decision is None:
            self.state = replace(state, load=load)
            return
        gain = 1.0 if state.load.rate_hz == 0 else _LOAD_GAIN
        smooth = replace(
            load,
            rate_hz=state.load.rate_hz + gain * (load.rate_hz - state.load.rate_hz),
            burstiness=state.load.burstiness + _BURSTINESS_GAIN * (load.burstiness - state.load.burstiness),
        )
        learned, caution = state.learned, state.caution * _LESS_CAUTION
        settled = self._obeyed and readings.at_s - state.since_s >= _SETTLING_S
        self._power = self._power.see(readings.power_w, self._expected_w())
        self._heat = self._heat.see(readings.temperature_c, self._expected_w())
        self._seen_s = self._seen_s if self._power.value is None else readings.at_s
        blind = _BLIND_SHARE if readings.at_s - self._seen_s > _BLIND_S else 0.0
        measured_w = self._power.latest(self._expected_w())
        if settled and measured_w is not None:
            taken = replace(smooth, rate_hz=smooth.rate_hz * decision.admit)
            learned = learned.learn_power(decision.setting, measured_w, taken, self.profile)
        if settled and load.run_s is not None:
            learned = learned.learn_run(decision.setting, load.run_s, self.profile)
        if settled and load.missed > _MISSED and decision.holds:
            caution = min(_MOST_CAUTION, caution + _MORE_CAUTION)
        self.state = replace(state, load=smooth, learned=learned, caution=caution, blind=blind)

    def _account(self, readings: Readings, now_s: float, dt_s: float) -> None:
        limits, heat, charge = self.limits, Heat(), Charge()
        if limits.temperature_c is not None:
            heat = self.state.heat.step(limits.temperature_c, self._heat.value, self._range_w(), now_s, dt_s)
        if limits.battery is not None:
            charge = self.state.charge.step(limits.battery, readings.battery, self.power_w, now_s, dt_s)
        self.state = replace(self.state, heat=heat, charge=charge)
        allowed_w, used_w = self.state.allowed_w(limits), self._used_w()
        most_j = most_credit_j(allowed_w, limits)
        left_j = 0.0 if most_j == 0 else self.state.credit_j + (_AIM * allowed_w - used_w) * dt_s
        self.state = replace(self.state, credit_j=min(most_j, max(-_DEBT_SHARE * most_j, left_j)))

    def _used_w(self) -> float:
        decision, measured_w = self.state.decision, self.power_w
        if not self._obeyed or decision is None or decision.setting not in self.state.learned.energy.each:
            return measured_w
        expected_w = self._expected_w()
        return expected_w + _MEASURED_SHARE * (measured_w - expected_w)

    def _range_w(self) -> tuple[float, float]:
        forecasts = self.state.forecasts(self.profile)
        idle_w = self.state.learned.idle_w
        least_w = idle_w + LEAST_ADMIT * (min(one.power_w for one in forecasts.values()) - idle_w)
        return least_w, max(one.power_w for one in forecasts.values())
