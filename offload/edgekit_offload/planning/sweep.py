"""Finds the cheapest cuts for a grid of links and loads, each with a certificate.

A point of the grid is a link and a load. The points are solved one after the other, and the solver starts
from the solution that it found last. For some points, the best cut with kernels on both sides is found even
if it is cheaper to run all kernels on one side, so that the report can show its cost.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.solver import FEW_PLACEMENTS, Cuts, Limit, Placement
from edgekit_offload.planning.costs import (
    GraphCosts,
    tier_costs,
    weigh_costs,
)
from edgekit_offload.planning.objectives import Goal
from edgekit_offload.planning.result import Certificate, StatedLimit, TierPlan
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import Conditions, LinkState
from edgekit_runtime.offload.objectives import SERVER_SECONDS

_LATENCY: Final = "latency"
_SETTINGS_OF_SPLITS: Final = 3  # number of bandwidths. Each needs a mixed-integer program


@dataclass(frozen=True, slots=True)
class OptimalCut:
    """A placement that is the cheapest for some link and load.

    Attributes:
        tiers: The tier of each kernel, where 0 is the device.
        certificate: The proof for the conditions under which it was found first.
    """

    coding: str
    tiers: tuple[int, ...]
    certificate: Certificate

    @property
    def is_split(self) -> bool:
        return len(set(self.tiers)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What the solver minimises at one setting, and what a certificate says of it.

    Attributes:
        stages: one, or several of which the slowest counts.
        limits: for the solver; `stated` are the same in words.
        stated: limits that a certificate names.
        pinned: tensors that must not leave the device.
        unit: of the stages.
    """

    stages: tuple[Costs, ...]
    limits: tuple[Limit, ...]
    condition: Conditions
    coding: str
    stated: tuple[StatedLimit, ...]
    pinned: tuple[str, ...]
    unit: Literal["s", "J"] = "s"


def find_cuts(
    costs: GraphCosts,
    conditions: Sequence[Conditions],
    goal: Goal,
    pinned: NDArray[np.bool_] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    compares_up_to: int = FEW_PLACEMENTS,
) -> tuple[OptimalCut, ...]:
    """Return the placements that are cheapest under some conditions.

    The placement of the whole model on the device is not included.

    Args:
        costs: The graph with its measurements.
        conditions: The links and loads. No link may be down.
        goal: The objective.
        pinned: Whether a tensor must not leave the device, bool [tensors].
        progress: Called with the number of solved conditions and the total number of conditions.
        compares_up_to: As for `Cuts`.

    Raises:
        CutError: No placement keeps the limits and pins, not even the whole model on the device.
    """
    optimal: dict[tuple[str, tuple[int, ...]], OptimalCut] = {}
    total, done = len(costs.codings) * len(conditions), 0
    split_conditions = [conditions[int(n)] for n in np.linspace(0, len(conditions) - 1, _SETTINGS_OF_SPLITS)]
    cuts = Cuts(costs.graph, compares_up_to=compares_up_to)
    for coding in costs.codings:
        for condition in conditions:
            for placement, setting in _solutions(cuts, costs, coding, condition, goal, pinned=pinned):
                if not any(placement.tiers) or (coding, placement.tiers) in optimal:
                    continue
                best = cuts.confirm(placement, setting.stages, setting.limits)
                optimal[coding, best.tiers] = OptimalCut(coding, best.tiers, _certify(cuts, best, setting))
            done += 1
            if progress is not None:
                progress(done, total)
        for condition in dict.fromkeys(split_conditions):
            setting = _with_both_sides(costs, coding, condition, goal, pinned)
            split = _find_split(cuts, setting)
            if split is not None and (coding, split.tiers) not in optimal:
                certificate = replace(_certify(cuts, split, setting), splits_only=True)
                optimal[coding, split.tiers] = OptimalCut(coding, split.tiers, certificate)
    return tuple(optimal.values())


def place_on_tiers(
    costs: GraphCosts,
    coding: str,
    links: tuple[LinkState, ...],
    pinned: NDArray[np.bool_] | None = None,
    limits: Sequence[Limit] = (),
) -> TierPlan:
    """Return the fastest placement on several tiers (device, edge, cloud), with a proof.

    The plan needs two packages. The package of the edge machine contains the parts of all tiers except the
    device. Its cut table splits them between edge machine and server.

    Args:
        costs: The graph with its times on each tier.
        coding: A key of `costs.codings`.
        links: The links between neighbouring tiers.
        pinned: Whether a tensor must not leave the device, bool [tensors].
        limits: Other limits, such as those of `DeviceLimits`.
    """
    tiers = len(links) + 1
    table = tier_costs(costs, coding, links, pinned)
    setting = _Setting(
        stages=(table,),
        limits=tuple(limits),
        condition=Conditions(links[0]),
        coding=coding,
        stated=_state_bytes(limits),
        pinned=_name_pinned(costs, pinned),
    )
    cuts = Cuts(costs.graph, tiers)
    placement = cuts.confirm(cuts.cheapest(table, limits), [table], limits)
    placed = np.array(placement.tiers)
    return TierPlan(
        bandwidths_mbit_s=tuple(link.up_bits_per_s / 1e6 for link in links),
        rtts_ms=tuple(link.rtt_s * 1e3 for link in links),
        kernels=tuple(int((placed == tier).sum()) for tier in range(tiers)),
        sent=tuple(costs.sent_tensors(placement.tiers, coding, link) for link in range(len(links))),
        compute_ms=tuple(1e3 * float(costs.seconds[placed == tier, tier].sum()) for tier in range(tiers)),
        total_ms=placement.cost * 1e3,
        certificate=_certify(cuts, placement, setting),
        coding=coding,
        tiers=placement.tiers,
    )


def _setting(
    costs: GraphCosts,
    coding: str,
    condition: Conditions,
    goal: Goal,
    pinned: NDArray[np.bool_] | None,
    *,
    slack: float = 0.0,
) -> _Setting:
    """Return the stages and limits of an objective.

    The number of devices that a server carries is no sum over kernels. For a given utilisation it is greatest
    with the least server time. That needs room for a wait of `slack` service times within the latency limit,
    and this limit is a sum over kernels.
    """
    latency, limits = weigh_costs(costs, coding, condition, pinned), goal.limits
    stated = _state_bytes(limits)
    if goal.kept_latency_s is not None:
        limited = latency
        if slack:
            server = weigh_costs(costs, coding, condition, pinned, SERVER_SECONDS)
            compute, upload = latency.compute + slack * server.compute, latency.upload + slack * server.upload
            limited = replace(latency, compute=compute, upload=upload)
        limits += (Limit(limited, goal.kept_latency_s, _LATENCY),)
        stated = (
            StatedLimit(name=_LATENCY, at_most=goal.kept_latency_s, unit="s", server_waits=slack),
            *stated,
        )
    return _Setting(
        stages=tuple(weigh_costs(costs, coding, condition, pinned, weights) for weights in goal.stages),
        limits=limits,
        condition=condition,
        coding=coding,
        stated=stated,
        pinned=_name_pinned(costs, pinned),
        unit=goal.row.solver_unit,
    )


def _state_bytes(limits: Sequence[Limit]) -> tuple[StatedLimit, ...]:
    """Return limits of the device's memory, each once; for the solver there is one for each kernel."""
    return tuple(
        dict.fromkeys(StatedLimit(name=limit.name, at_most=limit.at_most, unit="B") for limit in limits)
    )


def _name_pinned(costs: GraphCosts, pinned: NDArray[np.bool_] | None) -> tuple[str, ...]:
    return () if pinned is None else tuple(costs.graph.tensors[row] for row in np.flatnonzero(pinned))


def _solutions(
    cuts: Cuts,
    costs: GraphCosts,
    coding: str,
    condition: Conditions,
    goal: Goal,
    *,
    pinned: NDArray[np.bool_] | None,
) -> Iterator[tuple[Placement, _Setting]]:
    """Yield the best placement at one link and load; for capacity, one for each wait on the server."""
    least = np.inf
    for slack in goal.row.waits:
        setting = _setting(costs, coding, condition, goal, pinned, slack=slack)
        try:
            placement = _solve(cuts, setting)
        except CutError:
            if len(setting.limits) == len(goal.limits):
                raise
            if not slack:  # this link is too slow for the limit on latency
                return
            continue
        yield placement, setting
        if slack and placement.cost <= least * (1 + 1e-9):
            return  # a shorter wait saves nothing
        least = min(least, placement.cost)


def _solve(cuts: Cuts, setting: _Setting) -> Placement:
    if len(setting.stages) > 1:
        return cuts.fastest_pipeline(setting.stages, setting.limits)
    return cuts.cheapest(setting.stages[0], setting.limits)


def _with_both_sides(
    costs: GraphCosts, coding: str, condition: Conditions, goal: Goal, pinned: NDArray[np.bool_] | None
) -> _Setting:
    """Return a setting in which at least one kernel runs on each side.

    Then a last kernel is on the server and a first one on the device. Counting these alone keeps the linear
    program near a placement: among hundreds of kernels, a part of one would do.
    """
    setting = _setting(costs, coding, condition, goal, pinned)
    limits = list(setting.limits)
    free = np.zeros((len(costs.raw_bytes), 1))
    needs = costs.graph.ancestors
    for tier, name in enumerate(("a kernel on the server", "a kernel on the device")):
        ends = needs.sum(axis=tier) == 1  # a kernel that no other needs, or that needs no other
        count = np.zeros((len(ends), 2))
        count[ends, tier] = 1.0
        limits.append(Limit(Costs(count, free, free, np.zeros(1)), int(ends.sum()) - 1, name))
    return replace(setting, limits=tuple(limits))


def _find_split(cuts: Cuts, setting: _Setting) -> Placement | None:
    """Return the best cut with kernels on both sides, or None if there is none."""
    try:
        placement = _solve(cuts, setting)
    except CutError:  # because of one kernel, pins, or a limit
        return None
    return cuts.confirm(placement, setting.stages, setting.limits)


def _certify(cuts: Cuts, placement: Placement, setting: _Setting) -> Certificate:
    link, is_enumerated = setting.condition.link, placement.proof == "enumerated"
    assert link is not None  # noqa: S101  # the costs of a link that is down are refused
    return Certificate(
        proof=placement.proof,
        cost=placement.cost,
        bound=placement.bound,
        gap=placement.gap,
        placements=len(cuts.placements) if is_enumerated and cuts.placements is not None else 0,
        bandwidth_mbit_s=link.up_bits_per_s / 1e6,
        rtt_ms=link.rtt_s * 1e3,
        device_slowdown=setting.condition.device_slowdown,
        server_slowdown=setting.condition.server_slowdown,
        unit=setting.unit,
        coding=setting.coding,
        limits=setting.stated,
        pinned=setting.pinned,
    )
