"""The few cuts worth extracting: cheapest somewhere on the grid, and within a limit on leakage.

The leakage of a tensor is measured, not modelled, so no solver can minimise under a limit on it. Cuts that
exceed the limit are refused one by one: the tensors that they send are pinned to the device, as with
`--keep-on-device`, and the next sweep finds the best cuts behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.planning.costs import (
    DeviceLimits,
    GraphCosts,
    add_energy,
)
from edgekit_offload.planning.envelope import Grid, Score, choose_few, score_all
from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.result import Refusal, SentTensor, TierPlan
from edgekit_offload.planning.sweep import FoundCut, Goal, find_cuts, place_on_tiers
from edgekit_offload.profiling.planning_graph import PlanningGraph
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.cut_table import OffloadPlan, PlanCosts
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s

MAX_CUTS: Final = 8
MAX_ROUNDS: Final = 12  # sweeps; each seeks cuts behind tensors of the last one that leak too much
_CUTS_OF_4_BITS: Final = 2  # few: mostly they lose too much, and would leave no room for better cuts
MAX_FIRST_CUTS: Final = 2  # first cuts of placements on three tiers
_LOADS: Final = ((1.0, 1.0), (1.0, 4.0), (4.0, 1.0))  # slowdowns of device, server in the search
_SLOW_START: Final = (0.25, 0.5)  # shares of the lowest bandwidth: TCP's slow start makes a link seem slower

Progress = Callable[[str, int | None, int | None], None]
_Key = tuple[str, tuple[int, ...]]  # coding and tiers, which identify a cut


@dataclass(frozen=True, slots=True)
class CutCandidate:
    """A placement on its way to a plan.

    Attributes:
        plan: plan with modelled costs.
        found: placement, coding and certificate.
        device_nodes: nodes of the model that run on the device.
        sent: tensors that cross the link.
        goes_on: whether the best placement on three tiers cuts its tail once more.
    """

    plan: OffloadPlan
    found: FoundCut
    device_nodes: tuple[int, ...]
    sent: tuple[SentTensor, ...]
    goes_on: bool = False

    @property
    def key(self) -> _Key:
        """Coding and tiers, which identify the cut."""
        return self.found.coding, self.found.tiers


class LeakageMeter:
    """Measures the leakage of sent tensors, once for each set of tensors.

    Args:
        measure: the attack; it returns None if there is no figure.
        most_db: the limit; None without a limit.
    """

    def __init__(
        self, measure: Callable[[Sequence[SentTensor]], Leakage | None], most_db: float | None
    ) -> None:
        self._measure, self.most_db = measure, most_db
        self._known: dict[tuple[tuple[str, str], ...], Leakage | None] = {}

    def measure(self, sent: Sequence[SentTensor]) -> Leakage | None:
        """Return the leakage of the sent tensors."""
        key = tuple((one.name, one.coding) for one in sent)
        if key not in self._known:
            self._known[key] = self._measure(sent)
        return self._known[key]

    def is_over(self, sent: Sequence[SentTensor]) -> bool:
        """Return whether the leakage is above the limit, or unknown although there is a limit."""
        if self.most_db is None:
            return False
        found = self.measure(sent)
        return found is None or found.lower_bound_db > self.most_db

    def find_culprits(self, sent: Sequence[SentTensor]) -> tuple[str, ...]:
        """Return the tensors of a refused cut that must not be sent.

        These are the tensors that leak too much alone; if only several together do, the one that leaks most.
        """
        if len(sent) < 2:
            return tuple(one.name for one in sent)
        over = tuple(one.name for one in sent if self.is_over((one,)))
        found = {one.name: self.measure((one,)) for one in sent}
        return over or (max(found, key=lambda name: _bound_db(found[name])),)

    def refuse(self, name: str, sent: Sequence[SentTensor]) -> Refusal:
        """Return why a way is refused."""
        found = self.measure(sent)
        how = "is unknown" if found is None else f"is {found.describe()}"
        return Refusal(name, f"Its leakage {how}; the limit is {self.most_db:g} dB.")


def _bound_db(leakage: Leakage | None) -> float:
    return 0.0 if leakage is None else leakage.lower_bound_db


@dataclass(frozen=True, slots=True)
class CutSearch:
    """The task of a search for cuts.

    Attributes:
        graph: graph of kernels.
        costs: costs of the kernels, for all tiers.
        goal: objective with the limits on two tiers.
        limits: limits of the device's memory.
        grid: links and loads.
        kept: bool [tensors], whether a tensor must not leave the device.
        score: score that the objective minimises.
        edge_link: link from the machine at the edge to the server, for three tiers.
        leakage: measures the leakage of sent tensors; None without a limit on it.
    """

    graph: PlanningGraph
    costs: GraphCosts
    goal: Goal
    limits: DeviceLimits
    grid: Grid
    kept: NDArray[np.bool_]
    score: Score
    edge_link: LinkState | None = None
    leakage: LeakageMeter | None = None


@dataclass(slots=True)
class CutSearchResult:
    """The result of the search.

    Attributes:
        cuts: cuts that are worth extracting.
        tiers: the fastest placement on three tiers at each link.
        refusals: refusals of other cuts.
        attacked: number of cuts that were checked against the limit on leakage.
        over: leakages of the cuts that exceed the limit, if known.
        is_ended: whether no cut is left that might keep the limit; otherwise the rounds ran out.
    """

    cuts: list[CutCandidate] = field(default_factory=list)
    tiers: tuple[TierPlan, ...] = ()
    refusals: list[Refusal] = field(default_factory=list)
    attacked: int = 0
    over: list[Leakage | None] = field(default_factory=list)
    is_ended: bool = True


def search_cuts(search: CutSearch, base: Sequence[OffloadPlan], progress: Progress) -> CutSearchResult:
    """Return the few cuts that lower the best score most, and the best one of each coding for the report.

    Args:
        search: the task.
        base: the ways without a cut, with which cuts compete.
        progress: called with the name of the step, the settings done and all of them (None if unknown).
    """
    result, names = CutSearchResult(), _Names()
    pins = dict.fromkeys(search.costs.codings, search.kept)
    known: set[_Key] = set()  # cuts of earlier rounds
    wanted = tuple(search.costs.codings)
    for _ in range(MAX_ROUNDS):
        result.tiers, obstacle = _place_on_tiers(search, pins)
        if obstacle is not None and obstacle not in result.refusals:
            result.refusals.append(obstacle)
        first = [one for one in _first_cuts(search, result.tiers, names) if one.key not in known]
        swept = _sweep(search, wanted, pins, names, progress, result)
        found = [one for one in swept if one.key not in known]
        reached = [*base, *(one.plan for one in result.cuts)]
        chosen = first + _choose(search, found, reached)
        known |= {one.key for one in chosen}
        if search.leakage is None:
            result.cuts = chosen
            return result
        progress("attacking what cuts send", None, None)
        refused = _attack(search.leakage, chosen, result)
        if not refused:
            break
        pins = _pin(search, pins, refused, search.leakage)
        wanted = tuple(dict.fromkeys(one.found.coding for one in refused))
    else:
        result.is_ended = False
    first = [one for one in result.cuts if one.goes_on][:MAX_FIRST_CUTS]
    others = [one for one in result.cuts if not one.goes_on]
    result.cuts = first + (others if len(others) <= MAX_CUTS else _choose(search, others, base))
    return result


class _Names:
    """Numbers of cuts, which are unique in a plan."""

    def __init__(self) -> None:
        self.cuts = self.tiers = 0

    def cut(self, coding: str) -> str:
        self.cuts += 1
        return f"cut{self.cuts}-{coding}"

    def tier(self, coding: str) -> str:
        self.tiers += 1
        return f"tier{self.tiers}-{coding}"


def _attack(
    leakage: LeakageMeter, chosen: Sequence[CutCandidate], result: CutSearchResult
) -> list[CutCandidate]:
    """Add the cuts that keep the limit on leakage to the result, and return the others."""
    refused = []
    for one in chosen:
        result.attacked += 1
        if leakage.is_over(one.sent):
            refused.append(one)
            result.over.append(leakage.measure(one.sent))
            result.refusals.append(leakage.refuse(one.plan.name, one.sent))
        else:
            result.cuts.append(one)
    return refused


def _pin(
    search: CutSearch,
    pins: Mapping[str, NDArray[np.bool_]],
    refused: Sequence[CutCandidate],
    leakage: LeakageMeter,
) -> dict[str, NDArray[np.bool_]]:
    """Return for each coding the tensors that must not be sent in it, including those of refused cuts."""
    places = {tensor: row for row, tensor in enumerate(search.costs.graph.tensors)}
    grown = {coding: kept.copy() for coding, kept in pins.items()}
    for one in refused:
        for name in leakage.find_culprits(one.sent):
            grown[one.found.coding][places[name]] = True
    return grown


def _sweep(
    search: CutSearch,
    codings: Sequence[str],
    pins: Mapping[str, NDArray[np.bool_]],
    names: _Names,
    progress: Progress,
    result: CutSearchResult,
) -> list[CutCandidate]:
    """Return the cuts that are cheapest somewhere in one of the codings."""
    two = replace(search.costs, seconds=search.costs.seconds[:, :2])
    settings = tuple(
        replace(link, device_slowdown=device, server_slowdown=server)
        for device, server in _LOADS
        for link in (Conditions(one) for one in _sweep_links(search.grid))
    )
    found: list[FoundCut] = []
    obstacle: CutError | None = None
    for number, coding in enumerate(codings):

        def show(done: int, total: int, number: int = number) -> None:
            progress("finding cuts", number * total + done, len(codings) * total)

        own = replace(two, codings={coding: two.codings[coding]})
        try:
            found += find_cuts(own, settings, search.goal, pins[coding], show)
        except CutError as cause:
            obstacle = cause
    if obstacle is not None and not result.attacked:
        result.refusals.append(Refusal("cuts", f"No cut keeps the limits: {obstacle}."))
    if search.leakage is not None:
        found = [replace(one, certificate=replace(one.certificate, has_pins=True)) for one in found]
    split = [one for one in found if one.is_split]
    return [_candidate(one, names.cut(one.coding), search, two) for one in split]


def _choose(
    search: CutSearch, candidates: Sequence[CutCandidate], base: Sequence[OffloadPlan]
) -> list[CutCandidate]:
    """Return the candidates that lower the best score most, and the best one of each coding."""
    if not candidates:
        return []
    conditions = search.grid.conditions()
    scores = score_all([one.plan for one in candidates], conditions, search.score)
    best = score_all(base, conditions, search.score).min(axis=0, initial=np.inf)
    chosen: list[int] = []
    codings, few = search.costs.codings, _CUTS_OF_4_BITS
    for family, at_most in (({"raw", "int8"}, MAX_CUTS - len(codings) - few), ({"int4"}, few)):
        pool = [number for number, one in enumerate(candidates) if one.found.coding in family]
        reached = np.minimum(best, scores[chosen].min(axis=0, initial=np.inf))
        chosen += [pool[number] for number in choose_few(scores[pool], reached, at_most)]
    unloaded = len(search.grid.links())
    reference = np.minimum(best, scores.min(axis=0))[:unloaded]
    ratio = scores[:, :unloaded] / np.where((reference > 0) & np.isfinite(reference), reference, 1.0)
    for coding in codings:  # the report always shows the best cut of each coding
        own = [number for number, one in enumerate(candidates) if one.found.coding == coding]
        if own:
            chosen.append(min(own, key=lambda number: float(ratio[number].min())))
    return [candidates[number] for number in sorted(set(chosen))]


def _first_cuts(search: CutSearch, tiers: Sequence[TierPlan], names: _Names) -> list[CutCandidate]:
    """Return the cuts behind the device of placements on three tiers, most frequent first.

    The part behind them takes the time of the edge machine alone, or of edge, link and server if that is
    less.
    """
    costs = search.costs
    two = replace(costs, seconds=costs.seconds[:, :2])
    cuts: dict[_Key, CutCandidate] = {}
    split = [one for one in tiers if one.kernels[0] and one.kernels[2] and search.edge_link is not None]
    keys = [(one.coding, tuple(min(tier, 1) for tier in one.tiers)) for one in split]
    for (coding, placed), found in sorted(zip(keys, split, strict=True), key=lambda one: -keys.count(one[0])):
        if (coding, placed) in cuts or len(cuts) == MAX_FIRST_CUTS:
            continue
        edge, server = (ms / 1e3 for ms in found.compute_ms[1:])
        rest_costs = PlanCosts(edge, server, *costs.wire_bytes(found.tiers, coding, 1))
        rest = OffloadPlan("rest", rest_costs, tail="rest")
        made = _candidate(FoundCut(coding, placed, found.certificate), names.tier(coding), search, two)
        rest_s = min(made.plan.costs.server_s, predict_s(rest, Conditions(search.edge_link)))
        plan = replace(made.plan, costs=replace(made.plan.costs, server_s=rest_s))
        cuts[coding, placed] = replace(made, plan=plan, goes_on=True)
    return list(cuts.values())


def _sweep_links(grid: Grid) -> tuple[LinkState, ...]:
    low = grid.bandwidths_mbit_s[0]
    slower = tuple(low * share for share in _SLOW_START)
    return Grid((*slower, *grid.bandwidths_mbit_s), grid.rtts_ms).links()


def _candidate(found: FoundCut, name: str, search: CutSearch, costs: GraphCosts) -> CutCandidate:
    coded = costs.codings[found.coding]
    rows = costs.sent(found.tiers)
    sent = tuple(
        SentTensor(
            costs.graph.tensors[row],
            coded.names[row],
            float(costs.raw_bytes[row]),
            float(coded.sent_bytes[row]),
        )
        for row in rows
    )
    plain = {"raw": 1, "int8": 4, "int4": 8}[found.coding]
    has_zstd = any(one.sent_bytes < 0.99 * one.raw_bytes / plain for one in sent)
    plan = OffloadPlan(
        name,
        costs.plan_costs(found.tiers, found.coding),
        head=f"{name}.head",
        tail=f"{name}.tail",
        compression="zstd" if has_zstd else "identity",
    )
    nodes = [
        node for kernel, tier in enumerate(found.tiers) if tier == 0 for node in search.graph.nodes[kernel]
    ]
    plan = add_energy(plan, search.goal.power)
    return CutCandidate(plan, found, tuple(sorted(nodes)), sent)


def _place_on_tiers(
    search: CutSearch, pins: Mapping[str, NDArray[np.bool_]]
) -> tuple[tuple[TierPlan, ...], Refusal | None]:
    """Return the fastest placement on three tiers at each link, or why there is none."""
    costs, edge_link = search.costs, search.edge_link
    if edge_link is None:
        return (), None
    limits, found = search.limits.of(costs), []
    for link in search.grid.links():
        placed = []
        for coding in costs.codings:
            try:
                placed.append(place_on_tiers(costs, coding, (link, edge_link), pins[coding], limits))
            except CutError as cause:  # noqa: PERF203  # few iterations
                return (), Refusal("tiers", f"No placement on three tiers: {cause}.")
        found.append(min(placed, key=lambda one: one.total_ms))
    return tuple(found), None
