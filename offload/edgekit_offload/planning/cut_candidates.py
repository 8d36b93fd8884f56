"""Finds the few cuts that are worth extracting, within a limit on leakage.

Leakage is measured instead of modelled, so the solver cannot take a limit into account. Therefore, cuts above
the limit are refused afterwards. The tensors that they send are pinned to the device, as with
`--keep-on-device`, and the next round finds the best cuts behind them.

For example, the limit is 20 dB. The first round finds `cut1-raw` behind kernel 3 and `cut2-int8` behind
kernel 5. An attack on `cut1-raw` measures 31 dB, so this cut is refused and its tensor is pinned. From then
on, no placement may send this tensor, or compute it on the server. The second round finds `cut3-raw` behind
kernel 8 with 17 dB. Since no cut of this round is refused, the result is `cut2-int8` and `cut3-raw`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.partition.coding import CUT_CODINGS, FLOAT_BITS
from edgekit_offload.planning.costs import (
    DeviceLimits,
    GraphCosts,
    add_energy,
)
from edgekit_offload.planning.envelope import Grid, choose_few, score_all
from edgekit_offload.planning.leakage import Leakage
from edgekit_offload.planning.objectives import Goal
from edgekit_offload.planning.result import Refusal, SentTensor, TierPlan
from edgekit_offload.planning.sweep import OptimalCut, find_cuts, place_on_tiers
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.offload_plan import Compression, OffloadPlan, PlanCosts

MAX_CUTS: Final = 8
_MAX_SHARED_CUTS: Final = 3  # of codings without a limit of their own, beside the best of each coding
MAX_ROUNDS: Final = 12  # sweeps. Each seeks cuts behind tensors of the last one that leak too much
MAX_FIRST_CUTS: Final = 2  # first cuts of placements on three tiers
_LOADS: Final = ((1.0, 1.0), (1.0, 4.0), (4.0, 1.0))  # slowdowns of device, server in the search
_SLOW_START: Final = (0.25, 0.5)  # shares of the lowest bandwidth: TCP's slow start makes a link seem slower

Progress = Callable[[str, int | None, int | None], None]
_Key: TypeAlias = tuple[tuple[int, ...], tuple[tuple[str, str], ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCandidate:
    """A cut that may become a plan.

    Attributes:
        plan: The plan with modelled costs.
        device_nodes: The indices of the nodes of the head.
        sent: The tensors that are sent over the link.
        goes_on: Whether the best placement on three tiers cuts the tail of this candidate again.
    """

    plan: OffloadPlan
    cut: OptimalCut
    device_nodes: tuple[int, ...]
    sent: tuple[SentTensor, ...]
    goes_on: bool = False

    @property
    def key(self) -> _Key:
        """The tiers, the sent tensors with their codings, and the size of the reply.

        Two cuts have the same key if they send the same data. Their codings may still have different names,
        because a coding can leave all sent tensors unchanged.
        """
        sent = tuple((tensor.name, tensor.coding) for tensor in self.sent)
        return self.cut.tiers, sent, self.plan.costs.download_bytes

    def rename(self, name: str) -> "CutCandidate":
        plan = replace(self.plan, name=name, head=f"{name}.head", tail=f"{name}.tail")
        return replace(self, plan=plan)


class LeakageMeter:
    """Measures the leakage of sent tensors, once for each set of tensors.

    Args:
        measure: The attack. It returns None if there is no result, for example after its time limit.
        most_db: The limit of `Leakage.lower_bound_db` in dB, or None for no limit.
    """

    def __init__(
        self, measure: Callable[[Sequence[SentTensor]], Leakage | None], most_db: float | None
    ) -> None:
        self._measure, self.most_db = measure, most_db
        self._leakages: dict[tuple[tuple[str, str], ...], Leakage | None] = {}

    def measure(self, sent: Sequence[SentTensor]) -> Leakage | None:
        key = tuple((tensor.name, tensor.coding) for tensor in sent)
        if key not in self._leakages:
            self._leakages[key] = self._measure(sent)
        return self._leakages[key]

    def is_over(self, sent: Sequence[SentTensor]) -> bool:
        """Return whether the leakage exceeds the limit. An unknown leakage exceeds any limit."""
        if self.most_db is None:
            return False
        leakage = self.measure(sent)
        return leakage is None or leakage.lower_bound_db > self.most_db

    def find_culprits(self, sent: Sequence[SentTensor]) -> tuple[str, ...]:
        """Return the names of the tensors of a refused cut that must not be sent.

        These are the tensors whose own leakage exceeds the limit. If there are none, it is the tensor with
        the highest leakage.
        """
        if len(sent) < 2:
            return tuple(tensor.name for tensor in sent)
        over = tuple(tensor.name for tensor in sent if self.is_over((tensor,)))
        leakages = {tensor.name: self.measure((tensor,)) for tensor in sent}
        return over or (max(leakages, key=lambda name: _bound_db(leakages[name])),)

    def refuse(self, name: str, sent: Sequence[SentTensor]) -> Refusal:
        leakage = self.measure(sent)
        how = "is unknown" if leakage is None else f"is {leakage.describe()}"
        return Refusal(name, f"Its leakage {how}; the limit is {self.most_db:g} dB.")


def _bound_db(leakage: Leakage | None) -> float:
    return 0.0 if leakage is None else leakage.lower_bound_db


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSearch:
    """The settings of a search for cuts.

    Attributes:
        pinned: Whether a tensor must not leave the device, bool [tensors].
        edge_link: The link from the edge machine to the server, if there are three tiers.
        leakage: Measures the leakage of sent tensors, or None without a limit.
    """

    costs: GraphCosts
    goal: Goal
    limits: DeviceLimits
    grid: Grid
    pinned: NDArray[np.bool_]
    edge_link: LinkState | None = None
    leakage: LeakageMeter | None = None


@dataclass(slots=True, kw_only=True)
class CutSearchResult:
    """The result of a search for cuts.

    Attributes:
        tiers: The fastest placement on three tiers for each link.
        attacked: The number of cuts whose leakage was checked.
        over: The leakage of each refused cut, or None for a cut whose leakage is unknown.
        is_ended: Whether all cuts that might keep the limit were tried. It is False if `MAX_ROUNDS` was
            reached.
    """

    cuts: list[CutCandidate] = field(default_factory=list)
    tiers: tuple[TierPlan, ...] = ()
    refusals: list[Refusal] = field(default_factory=list)
    attacked: int = 0
    over: list[Leakage | None] = field(default_factory=list)
    is_ended: bool = True

    def add_refusal(self, refusal: Refusal | None) -> None:
        if refusal is not None and refusal not in self.refusals:
            self.refusals.append(refusal)


def search_cuts(search: CutSearch, base: Sequence[OffloadPlan], progress: Progress) -> CutSearchResult:
    """Return the few cuts that improve the best score most, and the best cut of each coding for the report.

    Args:
        search: The settings.
        base: The plans without a cut. A cut must improve on the best of them.
        progress: Called with the name of the step, the number of solved conditions, and the total number of
            conditions. Unknown numbers are None.
    """
    result, cut_numbers, tier_numbers = CutSearchResult(), count(1), count(1)
    pins = dict.fromkeys(search.costs.codings, search.pinned)
    known_keys: set[_Key] = set()  # cuts of earlier rounds
    codings = tuple(search.costs.codings)
    for _ in range(MAX_ROUNDS):
        result.tiers, obstacle = _place_on_tiers(search, pins)
        result.add_refusal(obstacle)
        first = [cut for cut in _first_cuts(search, result.tiers, tier_numbers) if cut.key not in known_keys]
        swept, obstacle = _sweep(search, {coding: pins[coding] for coding in codings}, cut_numbers, progress)
        if not result.attacked:
            result.add_refusal(obstacle)
        new_cuts = [cut for cut in swept if cut.key not in known_keys]
        reached = [*base, *(cut.plan for cut in result.cuts)]
        chosen = first + _choose(search, new_cuts, reached)
        known_keys |= {cut.key for cut in chosen}
        if search.leakage is None:
            result.cuts = chosen
            return result
        progress("attacking what cuts send", None, None)
        refused = [cut for cut in chosen if search.leakage.is_over(cut.sent)]
        result.attacked += len(chosen)
        result.cuts += [cut for cut in chosen if cut not in refused]
        result.over += [search.leakage.measure(cut.sent) for cut in refused]
        result.refusals += [search.leakage.refuse(cut.plan.name, cut.sent) for cut in refused]
        if not refused:
            break
        pins = _pin(search, pins, refused, search.leakage)
        codings = tuple(dict.fromkeys(cut.cut.coding for cut in refused))
    else:
        result.is_ended = False
    first = [cut for cut in result.cuts if cut.goes_on][:MAX_FIRST_CUTS]
    others = [cut for cut in result.cuts if not cut.goes_on]
    result.cuts = first + (others if len(others) <= MAX_CUTS else _choose(search, others, base))
    return result


def _pin(
    search: CutSearch,
    pins: Mapping[str, NDArray[np.bool_]],
    refused: Sequence[CutCandidate],
    leakage: LeakageMeter,
) -> dict[str, NDArray[np.bool_]]:
    """Return for each coding the tensors that must not be sent in it, including those of refused cuts."""
    rows = {tensor: row for row, tensor in enumerate(search.costs.graph.tensors)}
    grown = {coding: rows.copy() for coding, rows in pins.items()}
    for cut in refused:
        for name in leakage.find_culprits(cut.sent):
            grown[cut.cut.coding][rows[name]] = True
    return grown


def _sweep(
    search: CutSearch, pins: Mapping[str, NDArray[np.bool_]], numbers: Iterator[int], progress: Progress
) -> tuple[list[CutCandidate], Refusal | None]:
    """Return the cuts that are cheapest somewhere in one of the codings, and why there are no more.

    `pins`: coding -> the tensors that must not be sent in it.
    """
    two = replace(search.costs, seconds=search.costs.seconds[:, :2])
    settings = tuple(
        replace(link, device_slowdown=device, server_slowdown=server)
        for device, server in _LOADS
        for link in (Conditions(link_state) for link_state in _sweep_links(search.grid))
    )
    candidates: dict[_Key, CutCandidate] = {}
    obstacle: Refusal | None = None
    for number, (coding, pinned) in enumerate(pins.items()):

        def show(done: int, total: int, number: int = number) -> None:
            progress("finding cuts", number * total + done, len(pins) * total)

        own = replace(two, codings={coding: two.codings[coding]})
        try:
            cuts = find_cuts(own, settings, search.goal, pinned, show)
        except CutError as cause:
            obstacle = Refusal("cuts", f"No cut keeps the limits: {cause}.")
            continue
        for cut in filter(lambda cut: cut.is_split, cuts):
            certificate = replace(cut.certificate, has_pins=search.leakage is not None)
            candidate = _candidate(replace(cut, certificate=certificate), search, two)
            if candidate.key not in candidates:
                candidates[candidate.key] = candidate.rename(f"cut{next(numbers)}-{coding}")
    return list(candidates.values()), obstacle


def _choose(
    search: CutSearch, candidates: Sequence[CutCandidate], base: Sequence[OffloadPlan]
) -> list[CutCandidate]:
    """Return the candidates that lower the best score most, and the best one of each coding."""
    if not candidates:
        return []
    conditions, codings, score = search.grid.conditions(), search.costs.codings, search.goal.score
    scores = score_all([candidate.plan for candidate in candidates], conditions, score)
    best = score_all(base, conditions, score).min(axis=0, initial=np.inf)
    chosen: list[int] = []
    limits = {coding: CUT_CODINGS[coding].max_cuts for coding in codings}
    shared = [coding for coding, limit in limits.items() if limit is None]
    groups = [(shared, _MAX_SHARED_CUTS)]
    groups += [([coding], limit) for coding, limit in limits.items() if limit is not None]
    for group, at_most in groups:
        pool = [number for number, candidate in enumerate(candidates) if candidate.cut.coding in group]
        reached = np.minimum(best, scores[chosen].min(axis=0, initial=np.inf))
        chosen += [pool[number] for number in choose_few(scores[pool], reached, at_most)]
    unloaded = len(search.grid.links())
    reference = np.minimum(best, scores.min(axis=0))[:unloaded]
    ratio = scores[:, :unloaded] / np.where((reference > 0) & np.isfinite(reference), reference, 1.0)
    for coding in codings:  # the report always shows the best cut of each coding
        own = [number for number, candidate in enumerate(candidates) if candidate.cut.coding == coding]
        if own:
            chosen.append(min(own, key=lambda number: float(ratio[number].min())))
    return [candidates[number] for number in sorted(set(chosen))]


def _first_cuts(search: CutSearch, tiers: Sequence[TierPlan], numbers: Iterator[int]) -> list[CutCandidate]:
    """Return the cuts behind the device of placements on three tiers, most frequent first.

    The part behind them takes the time of the edge machine alone, or of edge, link and server if that is
    less.
    """
    costs = search.costs
    two = replace(costs, seconds=costs.seconds[:, :2])
    cuts: dict[tuple[str, tuple[int, ...]], CutCandidate] = {}
    split = [plan for plan in tiers if plan.kernels[0] and plan.kernels[2] and search.edge_link is not None]
    keys = [(plan.coding, tuple(min(tier, 1) for tier in plan.tiers)) for plan in split]
    for (coding, placed), placement in sorted(
        zip(keys, split, strict=True), key=lambda pair: -keys.count(pair[0])
    ):
        if (coding, placed) in cuts or len(cuts) == MAX_FIRST_CUTS:
            continue
        edge, server = (ms / 1e3 for ms in placement.compute_ms[1:])
        rest_costs = PlanCosts(edge, server, *costs.wire_bytes(placement.tiers, coding, 1))
        remainder = OffloadPlan("rest", rest_costs, tail="rest")
        cut = OptimalCut(coding, placed, placement.certificate)
        candidate = _candidate(cut, search, two).rename(f"tier{next(numbers)}-{coding}")
        rest_s = min(candidate.plan.costs.server_s, predict_s(remainder, Conditions(search.edge_link)))
        plan = replace(candidate.plan, costs=replace(candidate.plan.costs, server_s=rest_s))
        cuts[coding, placed] = replace(candidate, plan=plan, goes_on=True)
    return list(cuts.values())


def _sweep_links(grid: Grid) -> tuple[LinkState, ...]:
    low = grid.bandwidths_mbit_s[0]
    slower = tuple(low * share for share in _SLOW_START)
    return Grid((*slower, *grid.bandwidths_mbit_s), grid.rtts_ms).links()


def _candidate(cut: OptimalCut, search: CutSearch, costs: GraphCosts) -> CutCandidate:
    sent = costs.sent_tensors(cut.tiers, cut.coding)
    share = 0.99 * CUT_CODINGS[cut.coding].bits / FLOAT_BITS
    has_zstd = any(tensor.sent_bytes < share * tensor.raw_bytes for tensor in sent)
    compression: Compression = "zstd" if has_zstd else "identity"
    plan = OffloadPlan("cut", costs.plan_costs(cut.tiers, cut.coding), tail="tail", compression=compression)
    nodes = [node for kernel, tier in enumerate(cut.tiers) if tier == 0 for node in costs.nodes[kernel]]
    plan = add_energy(plan, search.goal.power)
    return CutCandidate(plan=plan, cut=cut, device_nodes=tuple(sorted(nodes)), sent=sent)


def _place_on_tiers(
    search: CutSearch, pins: Mapping[str, NDArray[np.bool_]]
) -> tuple[tuple[TierPlan, ...], Refusal | None]:
    """Return the fastest placement on three tiers at each link, or why there is none."""
    costs, edge_link = search.costs, search.edge_link
    if edge_link is None:
        return (), None
    limits, plans = search.limits.of(costs), []
    for link in search.grid.links():
        placed = []
        for coding in costs.codings:
            try:
                placed.append(place_on_tiers(costs, coding, (link, edge_link), pins[coding], limits))
            except CutError as cause:  # noqa: PERF203  # few iterations
                return (), Refusal("tiers", f"No placement on three tiers: {cause}.")
        plans.append(min(placed, key=lambda plan: plan.total_ms))
    return tuple(plans), None
