"""The choice of settings: pure, so that it can be checked for every state.

Priorities, in this order: keep deadlines; keep the budget of watts; lose as little accuracy as possible over
all models (`plan`); draw as little power as possible. If one plan is under the budget and the next better one
over it, the two take turns, so that the energy drawn stays as near to the budget as possible. The swing of a
turn is bounded, and so is the excess of any window's mean over the budget. Requests are refused only if no
plan is under the budget.

Source: C. Imes et al., POET, RTAS 2015 (turns of two neighbouring settings hold a goal between them);
H. Hoffmann, JouleGuard, SOSP 2015 (energy as the goal, traded for accuracy); R. Schreier and G. C.
Temes, Understanding Delta-Sigma Data Converters, 2005, chapter 2 (turns whose error never adds up); Intel
SDM vol. 3, "Package RAPL Domain" (a power limit is a mean over a window).
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
DWELL_S: Final = 2.0  # length of a turn; a plan far over the budget gets only one tick
MOST_BUSY: Final = 0.85  # largest share of time that an engine is busy while requests are refused
LEAST_ADMIT: Final = 0.05  # a device that accepts no request would never learn that it can
MOST_SWING: Final = 0.03  # share of the window's energy that a turn may draw over the budget
_KEPT_DEADLINE: Final = 0.9  # a setting is entered only if its forecast is within this share of the deadline
_SAVING: Final = 0.05  # least share of watts that is a reason to change at equal accuracy
_REPAY_S: Final = 10.0  # time in which shedding repays overdrawn energy


@dataclass(frozen=True, slots=True)
class GovernorModel:
    """The state of one model.

    Attributes:
        caution: share of the deadline kept in reserve because requests missed it.
        decision: decision in force, or None before the first.
    """

    profile: Profile
    learned: Learned = field(default_factory=Learned)
    load: Load = field(default_factory=Load)
    caution: float = 0.0
    decision: Decision | None = None

    def forecasts(self) -> dict[ModelSetting, Forecast]:
        """Return the forecast of each setting for the present load."""
        return {
            setting: self.learned.forecast(setting, self.load, self.profile) for setting in self.profile.costs
        }

    def is_in_time(self, setting: ModelSetting, forecast: Forecast) -> bool:
        """Whether a setting keeps the deadline. A setting that is not in force needs 10 % to spare.

        Without a deadline: whether the setting answers requests at least as fast as they arrive.
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
        idle_w: power of the device without requests.
        models: by name, in a fixed order.
        credit_j: unused budget of the last window, joules; negative if overdrawn.
        blind: share of the power limit kept in reserve because power could not be measured.
        since_s: time of the last change of a setting, on a monotonic clock.
    """

    idle_w: float
    models: Mapping[str, GovernorModel] = field(default_factory=dict, hash=False)
    heat: Heat = field(default_factory=Heat)
    charge: Charge = field(default_factory=Charge)
    credit_j: float = 0.0
    blind: float = 0.0
    since_s: float = -math.inf

    def allowed_w(self, limits: DeviceLimits) -> float:
        """Return the least of all power budgets, in watts; infinity without a limit."""
        power_w = None if limits.power_w is None else limits.power_w * (1 - self.blind)
        budgets = (power_w, self.heat.budget_w, self.charge.budget_w)
        return min((budget for budget in budgets if budget is not None), default=math.inf)


def most_credit_j(allowed_w: float, limits: DeviceLimits) -> float:
    """Return the joules that a plan may draw beyond `allowed_w` before a plan of less power must run.

    So the mean power of any window of `limits.window_s` is bounded. Return 0 if `allowed_w` is infinite.
    """
    return MOST_SWING * limits.window_s * allowed_w if allowed_w < math.inf else 0.0


def choose(state: State, limits: DeviceLimits, now_s: float) -> dict[str, Decision]:
    """Return model name -> decision to put in force; `state` is not changed.

    `state` has at least one model; `now_s` is on the clock of `state.since_s`.
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
