"""Chooses the plan for the next request from a cut table and the conditions of the moment.

Pure, and microseconds: no clock, no numpy, no I/O. It does not estimate the conditions (`link_estimate`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.remote.cut_table import CutTable, Objective, OffloadPlan
from edgekit_runtime.remote.latency_model import (
    Conditions,
    energy_j,
    predict_s,
    reserved_server_s,
    slowest_stage_s,
)

HYSTERESIS: Final = 0.10  # a plan must be better than the current one by this share, at first
LOADED: Final = 0.95  # load of a server from which on devices stay local
_PATIENCE: Final = 4  # decisions after which half of the hysteresis is left
_LEAST_GAIN: Final = 1e-4  # of a switch, as a share: below it is rounding
_MBIT: Final = 1e6
_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class Preference:
    """What to choose for.

    Attributes:
        objective: as in a cut table.
        deadline_s: latency that is good enough, where energy or capacity counts; None for that of the table.
        plan: name of the plan to run wherever it can be used, or None to choose.
    """

    objective: Objective = "latency"
    deadline_s: float | None = None
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """A plan, and why.

    Attributes:
        plan: what to run.
        predicted_s: its latency.
        conditions: what it was chosen for.
        other: the best plan of the other kind (local or not), or None.
        other_s: its latency.
        challenges: how often in a row another plan was better than the current one, by less than a switch
            needs.
        cause: why no plan with a server was looked at, or empty.
        is_forced: whether the plan was asked for by name.
    """

    plan: OffloadPlan
    predicted_s: float
    conditions: Conditions
    other: OffloadPlan | None = None
    other_s: float = math.inf
    challenges: int = 0
    cause: str = ""
    is_forced: bool = False

    @property
    def reason(self) -> str:
        """One sentence that says why."""
        own = f"{self.plan.name} takes {self.predicted_s * _MS:.3g} ms"
        if self.is_forced:
            return f"{self.plan.name} was asked for by name"
        if self.cause:
            return f"{self.cause}; {own}"
        link = self.conditions.link
        if self.other is None or link is None:
            return f"{own}; there is no other plan"
        if math.isfinite(self.other_s):
            against = f"{self.other.name} {self.other_s * _MS:.3g} ms"
        else:
            against = f"{self.other.name} cannot be used"
        return f"the link has {link.up_bits_per_s / _MBIT:.3g} Mbit/s; {own}, {against}"


def choose(
    table: CutTable,
    conditions: Conditions,
    current: PlanChoice | None = None,
    preference: Preference | None = None,
    *,
    usable: Collection[str] | None = None,
    server_load: float = 0.0,
    cause: str = "",
) -> PlanChoice:
    """Return what to run next.

    The least cost wins, but a plan that takes over from the current one must be better by 10 %. The longer
    it stays better, the less is asked: half after four decisions, a quarter after eight.

    Args:
        table: the plans.
        conditions: what they are judged by.
        current: the decision before this one, or None.
        preference: what to choose for; by default the objective of the table.
        usable: names of the plans whose server part answers rightly; None for all.
        server_load: load of the server as a share of what it can do; over `LOADED` the device stays local.
        cause: why no server can be used now, or empty.
    """
    preference = preference or Preference(table.objective)
    local = table.local
    if not cause and server_load >= LOADED:
        cause = f"the server says that it is loaded ({server_load:.2f})"
    if not cause and conditions.link is None:
        cause = "there is no link to the server"
    plans = [
        plan
        for plan in table.plans
        if plan.tail is None or (not cause and (usable is None or plan.name in usable))
    ]
    forced = preference.plan
    if forced is not None:
        if forced not in {plan.name for plan in table.plans}:
            cause = f"the package has no plan '{forced}', which was asked for"
        elif forced not in {plan.name for plan in plans} and local is not None:
            cause = cause or f"the server has not proved '{forced}' yet, which was asked for"
        plans = [plan for plan in plans if plan.name == forced] or ([local] if local is not None else [])
    if not plans:  # the model is too large for this device, so a bad server is better than none
        plans = list(table.plans)
    seconds = {plan.name: predict_s(plan, conditions) for plan in plans}
    if forced is not None and plans[0].name == forced:
        return PlanChoice(plans[0], seconds[forced], conditions, cause=cause, is_forced=True)
    costs = {plan.name: _cost(plan, conditions, seconds[plan.name], table, preference) for plan in plans}
    best = min(plans, key=lambda plan: costs[plan.name])
    chosen, challenges = best, 0
    if current is not None and best.name != current.plan.name and current.plan.name in costs:
        chosen, challenges = _resist(best, current, costs)
    other = _find_other(plans, chosen, seconds) or (local if chosen is not local else None)
    other_s = math.inf if other is None else seconds.get(other.name, math.inf)
    return PlanChoice(chosen, seconds[chosen.name], conditions, other, other_s, challenges, cause)


def _resist(
    best: OffloadPlan, current: PlanChoice, costs: dict[str, tuple[float, float]]
) -> tuple[OffloadPlan, int]:
    """Return the plan that wins against the current one, and how often in a row that was close."""
    is_late, cost = costs[current.plan.name]
    best_is_late, best_cost = costs[best.name]
    share = HYSTERESIS * 0.5 ** (current.challenges / _PATIENCE)
    if best_is_late < is_late or best_cost < cost * (1 - max(share, _LEAST_GAIN)) or not math.isfinite(cost):
        return best, 0
    return current.plan, current.challenges + (1 if best_cost < cost else 0)


def _find_other(
    plans: list[OffloadPlan], chosen: OffloadPlan, seconds: dict[str, float]
) -> OffloadPlan | None:
    others = [plan for plan in plans if (plan.tail is None) != (chosen.tail is None)]
    return min(others, key=lambda plan: seconds[plan.name]) if others else None


def _cost(
    plan: OffloadPlan, conditions: Conditions, seconds: float, table: CutTable, preference: Preference
) -> tuple[float, float]:
    """Return a cost: 1 for what is too late (which then counts as latency), then what is to be least."""
    objective = preference.objective
    limit_s = table.latency_limit_s if preference.deadline_s is None else preference.deadline_s
    if objective == "throughput":
        return (0.0, slowest_stage_s(plan, conditions))
    if objective == "latency" or (objective == "energy" and table.radio_w is None):
        return (0.0, seconds)
    limit_s = math.inf if limit_s is None else limit_s
    if objective == "capacity":
        cost = reserved_server_s(plan, conditions, limit_s) + seconds * 1e-6  # latency breaks ties
    else:
        cost = energy_j(plan, conditions, table.radio_w or 0.0)
    return (1.0, seconds) if seconds > limit_s or not math.isfinite(cost) else (0.0, cost)
