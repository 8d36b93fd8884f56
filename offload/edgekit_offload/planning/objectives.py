"""The objectives of a plan as one table: what the solver minimises, and in which unit the planner shows it.

The score of a plan is that of the device (`edgekit_runtime.offload.choose.OBJECTIVES`), so planner and device
agree. A new objective is a row there and a row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.solver import Limit
from edgekit_offload.planning.costs import (
    GraphCosts,
    PowerModel,
    energy_costs,
    latency_costs,
    pipeline_stages,
    server_costs,
)
from edgekit_offload.planning.envelope import Score
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.choose import OBJECTIVES as RULES
from edgekit_runtime.offload.cut_table import Objective, OffloadPlan
from edgekit_runtime.offload.latency_model import Conditions, predict_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    objective: Objective = "latency"
    power: PowerModel | None = None
    limits: tuple[Limit, ...] = ()
    latency_limit_s: float | None = None

    @property
    def row(self) -> "PlanObjective":
        return OBJECTIVES[self.objective]

    @property
    def kept_latency_s(self) -> float | None:
        return self.latency_limit_s if RULES[self.objective].keeps_limit else None

    @property
    def score(self) -> Score:
        """The score in the unit of the objective; infinity above the limit on latency."""
        rule, radio_w = RULES[self.objective], 0.0 if self.power is None else self.power.radio_w
        limit_s = np.inf if self.latency_limit_s is None else self.latency_limit_s

        def score(plan: OffloadPlan, conditions: Conditions) -> float:
            predicted_s = predict_s(plan, conditions)
            return 1e3 * rule.cost(
                plan, conditions, predicted_s=predicted_s, limit_s=limit_s, radio_w=radio_w
            )

        return score

    def check(self) -> None:
        """Check that all is given that the objective needs.

        Raises:
            CutError: something is missing.
        """
        for field, message in self.row.needs:
            if getattr(self, field) is None:
                raise CutError(f"the objective {self.objective} needs {message}")


Stages: TypeAlias = Callable[[GraphCosts, str, Conditions, Goal, NDArray[np.bool_] | None], tuple[Costs, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanObjective:
    """One row of `OBJECTIVES`.

    Attributes:
        ribbon: sentence about the best candidates in the chart.
        stages: costs for the solver, of graph, coding, conditions, goal and pins: one, or several of which
            the slowest counts.
        solver_unit: unit of those costs.
        needs: fields of the goal that must be given, each with a text that says so.
        waits: waits on the server, in its service times, for which a search leaves room within the limit.
        warning: warning about every result; empty if there is none.
    """

    unit: str
    ribbon: str
    stages: Stages
    solver_unit: Literal["s", "J"] = "s"
    needs: tuple[tuple[str, str], ...] = ()
    waits: tuple[float, ...] = (0.0,)
    warning: str = ""


def _energy_stages(
    costs: GraphCosts, coding: str, conditions: Conditions, goal: Goal, pinned: NDArray[np.bool_] | None
) -> tuple[Costs, ...]:
    goal.check()
    assert goal.power is not None  # noqa: S101  # for the type checker
    return (energy_costs(costs, coding, conditions, goal.power, pinned),)


OBJECTIVES: Final[dict[Objective, PlanObjective]] = {
    "latency": PlanObjective(
        unit="ms",
        ribbon="The ribbon shows the fastest candidate.",
        stages=lambda costs, coding, conditions, _goal, pinned: (
            latency_costs(costs, coding, conditions, pinned),
        ),
    ),
    "energy": PlanObjective(
        unit="mJ",
        ribbon="The ribbon shows the candidate that takes the device the least energy.",
        stages=_energy_stages,
        solver_unit="J",
        needs=(("power", "the power of the device: give --power"),),
        warning="Energy is modelled from the power of the device, not measured.",
    ),
    "throughput": PlanObjective(
        unit="ms a request",
        ribbon="The ribbon shows the candidate with the most requests per second.",
        stages=lambda costs, coding, conditions, _goal, pinned: pipeline_stages(
            costs, coding, conditions, pinned
        ),
    ),
    "capacity": PlanObjective(
        unit="server ms kept a request",
        ribbon="The ribbon shows the candidate that lets a server carry the most devices.",
        stages=lambda costs, coding, _conditions, _goal, pinned: (server_costs(costs, coding, pinned),),
        needs=(("latency_limit_s", "a limit on latency: give --latency-limit"),),
        # The server may then be busy for 0.01, 0.87, 0.75, 0.56, 0.32, 0.2, 0.13, 0.05 and 0.02 of the time.
        waits=(0.0, 16.0, 8.0, 4.0, 2.0, 1.4, 1.0, 0.8, 0.5),
    ),
}
