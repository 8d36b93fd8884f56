"""The objective of a plan, with the values that it requires, such as a latency limit."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from edgekit_offload.cuts.solver import Limit
from edgekit_offload.planning.costs import PowerModel
from edgekit_offload.planning.envelope import Score
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import Conditions, predict_s
from edgekit_runtime.offload.objectives import OBJECTIVES, Objective, Weights
from edgekit_runtime.offload.offload_plan import OffloadPlan

_OPTIONS: Final = {
    "radio_w": "the power of the device: give --power",
    "latency_limit_s": "a limit on latency: give --latency-limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    objective: str = "latency"
    power: PowerModel | None = None
    limits: tuple[Limit, ...] = ()
    latency_limit_s: float | None = None

    @property
    def row(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def radio_w(self) -> float | None:
        return None if self.power is None else self.power.radio_w

    @property
    def kept_latency_s(self) -> float | None:
        return self.latency_limit_s if self.row.keeps_limit else None

    @property
    def stages(self) -> tuple[Weights, ...]:
        """The weights of the solver's costs for each stage of the objective.

        Raises:
            CutError: A value that the objective needs is missing.
        """
        self.check()
        power = self.power or PowerModel(0.0, 0.0)
        return self.row.stages(power.compute_w, power.radio_w)

    @property
    def score(self) -> Score:
        """A function that returns the score of a plan in the objective's unit.

        The score is infinite above the latency limit.
        """
        limit_s = np.inf if self.latency_limit_s is None else self.latency_limit_s

        def score(plan: OffloadPlan, conditions: Conditions) -> float:
            predicted_s = predict_s(plan, conditions)
            return 1e3 * self.row.cost(
                plan, conditions, predicted_s=predicted_s, limit_s=limit_s, radio_w=self.radio_w or 0.0
            )

        return score

    def check(self) -> None:
        """Check that the objective has all values that it needs.

        Raises:
            CutError: A value is missing.
        """
        for field in self.row.needs:
            if getattr(self, field) is None:
                raise CutError(f"the objective {self.objective} needs {_OPTIONS[field]}")
