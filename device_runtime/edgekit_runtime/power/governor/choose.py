"""Chooses the settings of all models. This module does no I/O.

The priorities are, in this order: meet the deadlines, stay within the power budget, lose as little accuracy
as possible over all models, and use as little power as possible. If one plan is below the budget and the next
better plan is above it, they alternate, so that the mean power is close to the budget. The energy used above
the budget is limited. Requests are rejected only if no plan is below the budget.

Source: C. Imes et al., POET, RTAS 2015 (two neighbouring settings alternate to meet a goal between them); H.
Hoffmann, JouleGuard, SOSP 2015 (accuracy is traded for energy); R. Schreier and G. C. Temes, Understanding
Delta-Sigma Data Converters, 2005, chapter 2 (the error of the alternation is bounded); Intel SDM vol. 3,
"Package RAPL Domain" (a power limit is a mean over a window).
"""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Final

from edgekit_runtime.power.governor.budget import Charge, Heat
from edgekit_runtime.power.governor.forecast import Forecast, Learned
from edgekit_runtime.power.governor.plan import Option, Plan, choose_turns, make_frontier
from edgekit_runtime.power.governor.settings import Decision, DeviceLimits, Load, ModelSetting, Profile
from edgekit_runtime.records import dataclass

TICK_S: Final = 1.0  # from one decision to the next
DWELL_S: Final = 2.0  # length of a turn. A plan far over the budget gets only one tick
MOST_BUSY: Final = 0.85  # largest share of time that an engine is busy while requests are refused
LEAST_ADMIT: Final = 0.05  # a device that accepts no request would never learn that it can
MOST_SWING: Final = 0.03  # share of the window's energy that a turn may draw over the budget
_KEPT_DEADLINE: Final = 0.9  # a setting is entered only if its forecast is within this share of the deadline
_SAVING: Final = 0.05  # least share of watts that is a reason to change at equal accuracy
_REPAY_S: Final = 10.0  # time in which shedding repays overdrawn energy


@dataclass(frozen=True, slots=True)
class GovernorModel:
    """The governor's state of one model.

    Attributes:
        caution: The fraction of the deadline to keep in reserve, because requests missed the deadline.
        decision: The current decision, or None before the first one.
    """

    profile: Profile
    learned: Learned = field(default_factory=Learned)
    load: Load = field(default_factory=Load)
    caution: float = 0.0
    decision: Decision | None = None

    def forecasts(self) -> dict[ModelSetting, Forecast]:
        """Return a dict from each setting to its forecast under the current load."""
        return {
            setting: self.learned.forecast(setting, self.load, self.profile) for setting in self.profile.costs
        }

    def is_in_time(self, setting: ModelSetting, forecast: Forecast) -> bool:
        """Return whether a setting meets the deadline.

        A setting that is not in use must meet it with a margin of 10 %. Without a deadline, the setting must
        answer requests at least as fast as they arrive.
        """
        if self.profile.deadline_s is None:
            return forecast.latency_s < math.inf
        is_in_force = self.decision is not None and self.decision.setting == setting
        share = (1.0 if is_in_force else _KEPT_DEADLINE) * (1 - self.caution)
        return forecast.latency_s <= self.profile.deadline_s * share


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of the governor.

    Attributes:
        idle_w: The power of the device without requests, in watts.
        models: A dict from model names to their states, in a fixed order.
        credit_j: The unused energy budget of the last window in joules. Negative if more energy was used.
        blind: The fraction of the power limit to keep in reserve, because power could not be measured.
        since_s: The time of the last change of a setting, on a monotonic clock.
    """

    idle_w: float
    models: Mapping[str, GovernorModel] = field(default_factory=dict, hash=False)
    heat: Heat = field(default_factory=Heat)
    charge: Charge = field(default_factory=Charge)
    credit_j: float = 0.0
    blind: float = 0.0
    since_s: float = -math.inf

    def allowed_w(self, limits: DeviceLimits) -> float:
        """Return the lowest of the power budgets in watts, or infinity if there is none."""
        power_w = None if limits.power_w is None else limits.power_w * (1 - self.blind)
        budgets = (power_w, self.heat.budget_w, self.charge.budget_w)
        return min((budget for budget in budgets if budget is not None), default=math.inf)


def most_credit_j(allowed_w: float, limits: DeviceLimits) -> float:
    """Return how many joules above the budget may be used before a plan with less power must run.

    This limits the mean power over any `limits.window_s`. The result is 0 if `allowed_w` is infinite.
    """
    return MOST_SWING * limits.window_s * allowed_w if allowed_w < math.inf else 0.0


def choose(state: State, limits: DeviceLimits, now_s: float) -> dict[str, Decision]:
    """Return a dict from model names to the decisions to apply. `state` is not changed.

    `state` must have at least one model, and `now_s` is the time on the clock of `state.since_s`.
    """
    options = {name: _list_options(model) for name, model in state.models.items()}
    frontier = make_frontier(options.values(), state.idle_w)
    allowed_w = state.allowed_w(limits)
    most_j = most_credit_j(allowed_w, limits)
    lower, upper = choose_turns(frontier, allowed_w, allowed_w + most_j / TICK_S)
    if lower is None:
        admit = _admit(frontier[0], allowed_w, state)
        return _decide(frontier[0], state, options, admit=admit, why="no setting holds the limit")
    turn_s = DWELL_S if upper is None or (upper.power_w - allowed_w) * DWELL_S <= most_j else TICK_S
    best = lower if upper is None or not _is_turn_of(upper, lower, allowed_w, state, turn_s) else upper
    current = _find_current(state, options)
    if current is not None and current.power_w <= max(allowed_w, (upper or lower).power_w):
        alike = current.loss == best.loss and current.power_w - best.power_w < _SAVING * current.power_w
        best = current if alike or now_s - state.since_s < turn_s else best
    return _decide(best, state, options, why=f"better settings draw more than {allowed_w:.2f} W")


def _list_options(model: GovernorModel) -> list[Option]:
    """Return the settings that keep the deadline; if none does, all of them, with losses over 1."""
    forecasts, costs = model.forecasts(), model.profile.costs
    best = max(cost.accuracy for cost in costs.values()) or 1.0
    in_time = [
        Option(setting, forecast.power_w, 1 - costs[setting].accuracy / best)
        for setting, forecast in forecasts.items()
        if model.is_in_time(setting, forecast)
    ]
    return in_time or [
        Option(setting, forecast.power_w, 1 + _lateness(setting, forecast, model))
        for setting, forecast in forecasts.items()
    ]


def _lateness(setting: ModelSetting, forecast: Forecast, model: GovernorModel) -> float:
    """Return 0..2, growing with the latency; 1 and more if queues grow without end."""
    late_s = forecast.latency_s
    if late_s < math.inf:
        return late_s / (1 + late_s)
    each_s = model.learned.run_s(setting, model.profile) / setting.batch
    return 1 + each_s / (1 + each_s)


def _is_turn_of(upper: Plan, lower: Plan, allowed_w: float, state: State, turn_s: float) -> bool:
    """Whether a turn of `upper` leaves the credit nearer to 0 than one of `lower`."""
    after_upper_j = state.credit_j - (upper.power_w - allowed_w) * turn_s
    after_lower_j = state.credit_j + (allowed_w - lower.power_w) * turn_s
    return abs(after_upper_j) < abs(after_lower_j)


def _find_current(state: State, options: Mapping[str, list[Option]]) -> Plan | None:
    """Return the plan in force, or None if a model has no decision or misses its deadline with it."""
    plan = Plan(state.idle_w)
    for name, model in state.models.items():
        decided = None if model.decision is None else model.decision.setting
        option = next((option for option in options[name] if option.setting == decided), None)
        if option is None:
            return None
        plan = plan.add(option)
    return plan


def _admit(plan: Plan, allowed_w: float, state: State) -> float:
    """Return the share of the requests with which `plan` holds the budget, at least `LEAST_ADMIT`."""
    wanted_w = allowed_w + min(0.0, state.credit_j) / _REPAY_S - state.idle_w
    admit = wanted_w / (plan.power_w - state.idle_w) if plan.power_w > state.idle_w else 1.0
    return min(1.0, max(LEAST_ADMIT, admit))


def _decide(
    plan: Plan, state: State, options: Mapping[str, list[Option]], *, why: str, admit: float | None = None
) -> dict[str, Decision]:
    """Return the decision of each model; `admit` is the share of the requests that all accept, or None."""
    decisions = {}
    for (name, model), setting in zip(state.models.items(), plan.settings, strict=True):
        losses = {option.setting: option.loss for option in options[name]}
        share, is_late = 1.0 if admit is None else admit, losses[setting] >= 1
        if is_late:
            busy = model.load.rate_hz * model.learned.run_s(setting, model.profile) / setting.batch
            share = max(LEAST_ADMIT, min(share, MOST_BUSY / busy if busy > MOST_BUSY else 1.0))
        gives_way = admit is not None or losses[setting] > min(losses.values())
        reasons = ["no setting meets the deadline"] * is_late + [why] * gives_way
        decisions[name] = Decision(setting, share, admit is None and not is_late, "; ".join(reasons))
    return decisions
