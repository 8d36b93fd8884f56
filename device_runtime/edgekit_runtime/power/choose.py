"""The choice of a setting: pure, so that it can be checked for every state.

In this order: the deadline is kept; then the budget of watts; with what both leave, accuracy is as high
as possible, then power as low as possible. Where one setting is under the budget and the next better one
over it, the two take turns: what the one leaves is saved up as credit, and the other runs while there is
some. The credit is bounded, and so is what the mean of any window can be over the budget. Only when no
setting is under the budget are requests shed.

Source: C. Imes et al., POET, RTAS 2015 (turns of two neighbouring settings hold a goal between them);
H. Hoffmann, JouleGuard, SOSP 2015 (energy as the goal, accuracy as what is traded); Intel SDM vol. 3,
"Package RAPL Domain" (a power limit is a mean over a window).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from edgekit_runtime.power.budget import Charge, Heat
from edgekit_runtime.power.forecast import Forecast, Learned
from edgekit_runtime.power.readings import Readings
from edgekit_runtime.power.settings import Decision, Limits, Load, Profile, Setting

TICK_S: Final = 1.0  # from one decision to the next
DWELL_S: Final = 2.0  # no change to more power earlier than this after the last change
KEEPING_UP: Final = 0.85  # share of its time that an engine may be busy while requests are shed
LEAST_ADMIT: Final = 0.05  # a device that takes nothing would never learn that it could again
_CREDIT_SHARE: Final = 0.03  # of the window's energy is what turns normally swing by
_MOST_CREDIT_SHARE: Final = 0.035
_KEPT_DEADLINE: Final = 0.9  # a setting must be forecast within this share of the deadline to be entered
_SAVING: Final = 0.05  # less than this share of watts is no reason to change at equal accuracy
_REPAY_S: Final = 10.0  # in which shedding makes up for what was overdrawn


@dataclass(frozen=True, slots=True)
class State:
    """All that the governor remembers.

    Attributes:
        learned: about the settings.
        load: smoothed.
        heat, charge: control of temperature and battery.
        credit_j: budget that was left over, joules; negative when overdrawn.
        caution: share of the deadline that is kept free, since answers came late.
        blind: share of the power limit that is kept free, since power could not be measured for a while.
        decision: in force, or None before the first.
        since_s: when the setting in force was taken.
    """

    learned: Learned
    load: Load = field(default_factory=Load)
    heat: Heat = field(default_factory=Heat)
    charge: Charge = field(default_factory=Charge)
    credit_j: float = 0.0
    caution: float = 0.0
    blind: float = 0.0
    decision: Decision | None = None
    since_s: float = -math.inf

    def allowed_w(self, limits: Limits) -> float:
        """Return the least of all power budgets; infinity without a limit."""
        power_w = None if limits.power_w is None else limits.power_w * (1 - self.blind)
        budgets = (power_w, self.heat.budget_w, self.charge.budget_w)
        return min((budget for budget in budgets if budget is not None), default=math.inf)

    def forecasts(self, profile: Profile) -> dict[Setting, Forecast]:
        """Return what each setting would do now."""
        return {setting: self.learned.forecast(setting, self.load, profile) for setting in profile.costs}


def most_credit_j(allowed_w: float, limits: Limits) -> float:
    """Return the most that may be saved, joules: what bounds how far a window's mean is over the limit."""
    return _MOST_CREDIT_SHARE * limits.window_s * allowed_w if allowed_w < math.inf else 0.0


def choose(state: State, readings: Readings, limits: Limits, profile: Profile) -> Decision:
    """Return what to do next.

    Args:
        state: all that is remembered.
        readings: of now; only their time is used, what they say is in the state already.
        limits: to hold.
        profile: settings to choose from.
    """
    forecasts = state.forecasts(profile)
    allowed_w = state.allowed_w(limits)
    current = None if state.decision is None else state.decision.setting
    in_time = [
        setting for setting in forecasts if _in_time(setting, forecasts[setting], current, state, limits)
    ]
    if not in_time:
        return _be_late(forecasts, allowed_w, state, profile)
    frontier = _frontier(in_time, forecasts, profile)
    under = [setting for setting in frontier if forecasts[setting].power_w <= allowed_w]
    if not under:
        return _shed(frontier[0], forecasts[frontier[0]], allowed_w, state, "no setting holds the limit")
    best = _take_turns(frontier, under[-1], forecasts, state, limits)
    if current is not None and current in in_time and best != current:
        early = readings.at_s - state.since_s < DWELL_S
        best = _stay(best, current, state, limits, profile, early=early)
    reason = "" if best == frontier[-1] else f"better settings draw more than {allowed_w:.2f} W"
    return Decision(best, reason=reason)


def _in_time(
    setting: Setting, forecast: Forecast, current: Setting | None, state: State, limits: Limits
) -> bool:
    if limits.deadline_s is None:
        return forecast.latency_s < math.inf
    share = 1.0 if setting == current else _KEPT_DEADLINE
    return forecast.latency_s <= limits.deadline_s * share * (1 - state.caution)


def _frontier(
    settings: Sequence[Setting], forecasts: Mapping[Setting, Forecast], profile: Profile
) -> list[Setting]:
    """Settings that nothing beats in power and accuracy, from the least power to the highest accuracy."""

    def order(setting: Setting) -> tuple[float, float, Setting]:
        return forecasts[setting].power_w, -profile.costs[setting].accuracy, setting

    front: list[Setting] = []
    for setting in sorted(settings, key=order):
        if not front or profile.costs[setting].accuracy > profile.costs[front[-1]].accuracy:
            front.append(setting)
    return front


def _take_turns(
    frontier: Sequence[Setting],
    lower: Setting,
    forecasts: Mapping[Setting, Forecast],
    state: State,
    limits: Limits,
) -> Setting:
    """Return the next better setting than `lower` while there is credit for it, else `lower`."""
    place = frontier.index(lower)
    if place + 1 == len(frontier):
        return lower
    upper = frontier[place + 1]
    allowed_w = state.allowed_w(limits)
    excess_w = forecasts[upper].power_w - allowed_w
    needed_j = max(_CREDIT_SHARE * limits.window_s * allowed_w, excess_w * DWELL_S)
    if needed_j > most_credit_j(allowed_w, limits):
        return lower  # even its shortest turn would be seen in the window's mean
    running = state.decision is not None and state.decision.setting == upper
    # A turn ends while there is still enough for the second that begins now.
    return upper if 0 < (excess_w * TICK_S if running else needed_j) <= state.credit_j else lower


def _stay(
    best: Setting, current: Setting, state: State, limits: Limits, profile: Profile, *, early: bool
) -> Setting:
    """Return `current` where a change now would be flapping, else `best`."""
    forecasts = state.forecasts(profile)
    now_w, then_w = forecasts[current].power_w, forecasts[best].power_w
    over_w = now_w - state.allowed_w(limits)
    if over_w > 0 and state.credit_j < over_w * TICK_S:
        return best
    alike = profile.costs[best].accuracy == profile.costs[current].accuracy
    return current if early or (alike and now_w - then_w < _SAVING * now_w) else best


def _shed(setting: Setting, forecast: Forecast, allowed_w: float, state: State, reason: str) -> Decision:
    """Return the setting with so few requests that the budget holds, as far as idling allows."""
    idle_w = state.learned.idle_w
    wanted_w = allowed_w + min(0.0, state.credit_j) / _REPAY_S - idle_w
    admit = wanted_w / (forecast.power_w - idle_w) if forecast.power_w > idle_w else 1.0
    return Decision(setting, min(1.0, max(LEAST_ADMIT, admit)), holds=False, reason=reason)


def _be_late(
    forecasts: Mapping[Setting, Forecast], allowed_w: float, state: State, profile: Profile
) -> Decision:
    """Return the setting that answers soonest, with no more requests than it can keep up with."""

    def run_s(setting: Setting) -> float:
        return state.learned.run_s(setting, profile)

    under = [setting for setting in forecasts if forecasts[setting].power_w <= allowed_w]
    if under:
        soonest = min(under, key=lambda setting: (forecasts[setting].latency_s, run_s(setting), setting))
        decision = Decision(soonest, holds=False, reason="no setting meets the deadline")
    else:
        least = min(forecasts, key=lambda setting: (forecasts[setting].power_w, run_s(setting), setting))
        reason = "no setting meets the deadline, none holds the limit"
        decision = _shed(least, forecasts[least], allowed_w, state, reason)
    busy = state.load.rate_hz * run_s(decision.setting) / decision.setting.batch
    admit = min(decision.admit, KEEPING_UP / busy) if busy > KEEPING_UP else decision.admit
    return replace(decision, admit=max(LEAST_ADMIT, admit))
