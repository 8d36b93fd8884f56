"""Chooses the plan for the next request from a cut table and the current conditions.

The choice takes microseconds and uses no clock, numpy or I/O. `link_estimate` estimates the conditions.

Example: at 8 Mbit/s, `local` takes 50 ms and `cut2-int8` takes 40 ms, so `cut2-int8` runs. Then the bandwidth
falls to 5 Mbit/s, and `cut2-int8` takes 52 ms. `local` is now better by 4 %, but a switch requires 10 %, so
`cut2-int8` remains in use. While `local` is better, the required gain shrinks to 5 % after four decisions and
3.5 % after six, and then `local` runs. It would run at once if `cut2-int8` exceeded the latency limit, or if
the server reported a high load.
"""

import math
from collections.abc import Collection
from typing import Final

from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, predict_s
from edgekit_runtime.offload.objectives import OBJECTIVES
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.records import dataclass

HYSTERESIS: Final = 0.10  # a plan must at first be better than the current one by this share
LOADED: Final = 0.95  # devices stay local if a server's load is as high
_PATIENCE: Final = 4  # decisions after which the hysteresis is halved
_LEAST_GAIN: Final = 1e-4  # least gain of a switch, as a share: less is rounding
_MBIT: Final = 1e6
_MS: Final = 1e3


@dataclass(frozen=True, slots=True)
class Preference:
    """The objective and the limit for the choice of a plan.

    Attributes:
        objective: name of the objective, as in a cut table.
        deadline_s: limit of the latency for the objectives energy and capacity, or None for the table's
            limit.
        plan: name of a plan that takes precedence over all others, or None.
    """

    objective: str = "latency"
    deadline_s: float | None = None
    plan: str | None = None


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best of the plans that were not chosen.

    Attributes:
        cost: see `PlanChoice`.
        predicted_s: predicted latency of a request in seconds, infinity if the plan cannot run now.
    """

    name: str
    predicted_s: float
    cost: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    """The chosen plan, and the reasons for the choice.

    Attributes:
        cost: tuple by which plans are compared: (0, cost in seconds or joules), or (1, latency) if the plan
            exceeds the latency limit.
        predicted_s: predicted latency of a request, in seconds.
        limit_s: limit of the latency for the objectives energy and capacity.
        other: the best other plan, or None. It may be slightly better than `plan`.
        challenges: number of consecutive decisions in which another plan was better, but not by enough for a
            switch.
        cause: why no plan that needs the server was considered, or empty.
        is_forced: whether the plan was requested by name.
    """

    plan: OffloadPlan
    predicted_s: float
    conditions: Conditions
    cost: tuple[float, float] = (0.0, 0.0)
    objective: str = "latency"
    limit_s: float = math.inf
    other: RunnerUp | None = None
    challenges: int = 0
    cause: str = ""
    is_forced: bool = False

    @property
    def reason(self) -> str:
        own = self._judge(self.predicted_s, self.cost)
        if self.is_forced:
            return f"{self.plan.name} was asked for by name" + (f"; {self.cause}" if self.cause else "")
        if self.cause:
            return f"{self.cause}; {self.plan.name} takes {own}"
        link, other = self.conditions.link, self.other
        rule = OBJECTIVES[self.objective]
        goal = rule.goal
        if math.isfinite(self.limit_s) and rule.keeps_limit:
            goal += f" within {self.limit_s * _MS:.3g} ms"
        if other is None or link is None:
            return f"{goal}: {self.plan.name} takes {own}; there is no other plan"
        text = f"the link has {link.up_bits_per_s / _MBIT:.3g} Mbit/s; {goal}: {self.plan.name} takes {own}, "
        text += f"{other.name} {self._judge(other.predicted_s, other.cost)}"
        return text + ", which is too little better to switch yet" * (other.cost < self.cost)

    def _judge(self, predicted_s: float, cost: tuple[float, float]) -> str:
        duration = f"{predicted_s * _MS:.3g} ms"
        if not math.isfinite(predicted_s):
            return "for ever"
        if cost[0]:
            return f"{duration}, too late"
        rule = OBJECTIVES[self.objective]
        return rule.figure.format(cost=(cost[1] - predicted_s * rule.tie) * _MS, duration=duration)


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
    """Return the next plan.

    The plan with the lowest cost is chosen, but a plan that replaces the current plan must be better by 10 %.
    The required gain shrinks while the other plan stays better: 5 % after four decisions, 2.5 % after eight.

    Args:
        table: the plans.
        conditions: the conditions under which the plans are compared.
        current: the previous decision, or None.
        preference: what to optimise, by default the objective of the table.
        usable: names of the plans whose server part answers correctly, or None for all.
        server_load: load of the server as a share of its capacity. If it is at least `LOADED`, the model
            runs on the device.
        cause: why no server can be used now, or empty.
    """
    preference = preference or Preference(table.objective)
    objective, limit_s = _find_goal(table, preference)
    if not cause and server_load >= LOADED:
        cause = f"the server says that it is loaded ({server_load:.2f})"
    if not cause and conditions.link is None:
        cause = "there is no link to the server"
    plans, cause = _list_plans(table, preference.plan, usable, cause)
    seconds = {plan.name: predict_s(plan, conditions) for plan in plans}
    if preference.plan is not None and plans[0].name == preference.plan:
        return PlanChoice(
            plan=plans[0],
            predicted_s=seconds[plans[0].name],
            conditions=conditions,
            cause=cause,
            is_forced=True,
        )
    costs = {
        plan.name: _cost(plan, conditions, seconds[plan.name], (objective, limit_s, table.radio_w or 0.0))
        for plan in plans
    }
    best = min(plans, key=lambda plan: costs[plan.name])
    chosen, challenges = best, 0
    if current is not None and best.name != current.plan.name and current.plan.name in costs:
        chosen, challenges = _resist(best, current, costs)
    other = min((plan.name for plan in plans if plan is not chosen), key=costs.__getitem__, default=None)
    return PlanChoice(
        plan=chosen,
        predicted_s=seconds[chosen.name],
        conditions=conditions,
        cost=costs[chosen.name],
        objective=objective,
        limit_s=limit_s,
        other=None if other is None else RunnerUp(other, seconds[other], costs[other]),
        challenges=challenges,
        cause=cause,
    )


def _find_goal(table: CutTable, preference: Preference) -> tuple[str, float]:
    """Return the objective, and the latency that is good enough, in seconds."""
    objective = preference.objective
    if "radio_w" in OBJECTIVES[objective].needs and table.radio_w is None:
        objective = "latency"  # no energy is known
    limit_s = table.latency_limit_s if preference.deadline_s is None else preference.deadline_s
    return objective, math.inf if limit_s is None else limit_s


def _list_plans(
    table: CutTable, forced: str | None, usable: Collection[str] | None, cause: str
) -> tuple[list[OffloadPlan], str]:
    """Return the plans that can run, or the plan requested by name, and why the others cannot.

    If the device cannot run the model, plans with a server that failed or is loaded are returned too. If the
    server has proved no plan at all, all are returned; a session lets it prove one before it sends anything.
    If the requested plan cannot run, plans that change no answer are returned, if there are any.
    """
    local = table.local
    proved = [
        plan for plan in table.plans if plan.tail is not None and (usable is None or plan.name in usable)
    ]
    plans = proved if local is None else [local, *([] if cause else proved)]
    if not cause and not proved and any(plan.tail for plan in table.plans):
        cause = "the server has not proved a plan that can run now"
    if forced is not None:
        if forced not in {plan.name for plan in table.plans}:
            names = ", ".join(plan.name for plan in table.plans)
            cause = (
                f"the package has no plan '{forced}' for this request, which was asked for; it has {names}"
            )
        elif forced not in {plan.name for plan in plans}:
            cause = cause or f"the server has not proved '{forced}' yet, which was asked for"
        forced_plans = [plan for plan in plans if plan.name == forced]
        exact = [plan for plan in plans if plan.head is None and not plan.media]
        plans = forced_plans or (exact or plans if local is None else [local])
    return plans or list(table.plans), cause


def _resist(
    best: OffloadPlan, current: PlanChoice, costs: dict[str, tuple[float, float]]
) -> tuple[OffloadPlan, int]:
    """Return the current plan or `best`, and for how many choices in a row `best` was slightly better."""
    is_late, cost = costs[current.plan.name]
    best_is_late, best_cost = costs[best.name]
    share = HYSTERESIS * 0.5 ** (current.challenges / _PATIENCE)
    if best_is_late < is_late or best_cost < cost * (1 - max(share, _LEAST_GAIN)) or not math.isfinite(cost):
        return best, 0
    return current.plan, current.challenges + (1 if best_cost < cost else 0)


def _cost(
    plan: OffloadPlan, conditions: Conditions, predicted_s: float, goal: tuple[str, float, float]
) -> tuple[float, float]:
    """Return a cost, see `PlanChoice`; `goal` is objective, limit on latency, watts of the radio."""
    objective, limit_s, radio_w = goal
    rule = OBJECTIVES[objective]
    cost = rule.cost(plan, conditions, predicted_s=predicted_s, limit_s=limit_s, radio_w=radio_w)
    if rule.keeps_limit and not math.isfinite(cost):
        return 1.0, predicted_s
    return 0.0, cost + predicted_s * rule.tie if rule.tie else cost  # infinity times 0 is no number
