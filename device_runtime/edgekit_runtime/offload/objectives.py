"""The objectives by which plans are compared, one record each.

The solver minimises sums over kernels and sent tensors with the weights from `stages`. When plans are
compared, `score` also includes effects that no sum can express, such as TCP's slow start.
"""

import math
from collections.abc import Callable
from typing import Final, Literal

from edgekit_runtime.offload.latency_model import Conditions, energy_j, reserved_server_s, slowest_stage_s
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the parts of a request's time, in a sum of costs.

    Attributes:
        wait: weight of the time that a request waits, during round trips and in the queue of the server.
    """

    device: float = 0.0
    link: float = 0.0
    server: float = 0.0
    wait: float = 0.0


SECONDS: Final = Weights(device=1.0, link=1.0, server=1.0, wait=1.0)
SERVER_SECONDS: Final = Weights(server=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How plans are compared.

    Attributes:
        goal: name to display.
        unit: unit of the scores.
        figure: template for the compared figure. `{cost}` is in ms or mJ, and `{duration}` is a time.
        ribbon: sentence about the best candidates in the planner's chart.
        stages: function that returns the weights of one or more sums of costs. The solver minimises the
            largest sum. The arguments are the power in watts of the computing device and of its radio.
        solver_unit: unit of the sums.
        score: function of plan, conditions, latency limit in seconds and radio power in watts. It returns the
            seconds or joules to minimise, or infinity if the limit cannot be met. None means the latency.
        needs: fields of a cut table that must be set.
        keeps_limit: whether the latency of a plan must meet a limit.
        tie: weight of the latency, which decides between plans with equal scores.
        waits: waiting times on the server to try in a search, as multiples of the server time of a request.
        counts_devices: whether the planner states how many devices a server can serve.
        spans_tiers: whether kernels may be placed on three machines.
        warning: warning to show with every result, or empty.
    """

    goal: str
    unit: str
    figure: str
    ribbon: str
    stages: Callable[[float, float], tuple[Weights, ...]]
    solver_unit: Literal["s", "J"] = "s"
    score: Callable[[OffloadPlan, Conditions, float, float], float] | None = None
    needs: tuple[Literal["radio_w", "latency_limit_s"], ...] = ()
    keeps_limit: bool = False
    tie: float = 0.0
    waits: tuple[float, ...] = (0.0,)
    counts_devices: bool = False
    spans_tiers: bool = False
    warning: str = ""

    def cost(
        self, plan: OffloadPlan, conditions: Conditions, *, predicted_s: float, limit_s: float, radio_w: float
    ) -> float:
        """Return the score of a plan in seconds or joules, infinity if the plan exceeds a latency limit."""
        if self.keeps_limit and predicted_s > limit_s:
            return math.inf
        return predicted_s if self.score is None else self.score(plan, conditions, limit_s, radio_w)


OBJECTIVES: Final[dict[str, Objective]] = {
    "latency": Objective(
        goal="least latency",
        unit="ms",
        figure="{duration}",
        ribbon="The ribbon shows the fastest candidate.",
        stages=lambda _compute_w, _radio_w: (SECONDS,),
        spans_tiers=True,
    ),
    "energy": Objective(
        goal="least energy",
        unit="mJ",
        figure="{cost:.3g} mJ in {duration}",
        ribbon="The ribbon shows the candidate that takes the device the least energy.",
        stages=lambda compute_w, radio_w: (
            Weights(device=compute_w, link=radio_w, server=radio_w, wait=radio_w),
        ),
        solver_unit="J",
        score=lambda plan, conditions, _limit_s, radio_w: energy_j(plan, conditions, radio_w),
        needs=("radio_w",),
        keeps_limit=True,
        warning="Energy is modelled from the power of the device, not measured.",
    ),
    "throughput": Objective(
        goal="most requests a second",
        unit="ms a request",
        figure="{cost:.3g} ms in its slowest stage",
        ribbon="The ribbon shows the candidate with the most requests per second.",
        # Requests overlap, so round trips do too.
        stages=lambda _compute_w, _radio_w: (Weights(device=1.0), Weights(link=1.0), SERVER_SECONDS),
        score=lambda plan, conditions, _limit_s, _radio_w: slowest_stage_s(plan, conditions),
    ),
    "capacity": Objective(
        goal="most devices a server",
        unit="server ms kept a request",
        figure="{cost:.3g} ms of the server in {duration}",
        ribbon="The ribbon shows the candidate that lets a server carry the most devices.",
        stages=lambda _compute_w, _radio_w: (SERVER_SECONDS,),
        score=lambda plan, conditions, limit_s, _radio_w: reserved_server_s(plan, conditions, limit_s),
        needs=("latency_limit_s",),
        keeps_limit=True,
        tie=1e-6,
        # The server may then be busy for 0.01, 0.87, 0.75, 0.56, 0.32, 0.2, 0.13, 0.05 and 0.02 of the time.
        waits=(0.0, 16.0, 8.0, 4.0, 2.0, 1.4, 1.0, 0.8, 0.5),
        counts_devices=True,
    ),
}
