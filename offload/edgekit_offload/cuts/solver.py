"""Finds the cheapest placement of a graph on device and server, and proves that no other is cheaper.

If data flows through the tiers in one direction only, the placement is a minimum cut (a project-selection
problem). This also holds for more than two tiers, for tensors that are sent once to several readers, and for
fixed costs of links. It is solved as a linear program with a totally unimodular matrix, so that its optimum
is a placement. With a limit on memory or another cost, or with the slowest stage of a pipeline as the
objective, it becomes a mixed-integer program with the same variables. HiGHS solves both.

For example, kernel `a` reads the input `x` (600 kB) and writes `t` (40 kB). Kernel `b` reads `t` and writes
the output `y` (1 kB). They take 100 and 400 ms on the device, and 1 and 4 ms on the server. The link takes 1
ms per kB, and 20 ms for a round trip. The variables say whether a kernel runs `before` the link, whether a
tensor is `sent`, and whether the link is `used`.

    all on the device        before[a] = before[b] = 1                     100 + 400            = 500 ms
    cut behind `a`           before[a] = 1, sent[t] = used = 1             100 + 40 + 20 + 4 + 1 = 165 ms
    all on the server        sent[x] = used = 1                            600 + 20 + 1 + 4 + 1 = 626 ms

The linear program finds 165 ms. Its dual solution proves that this is the minimum, and so does a comparison
of all three placements.

The construction of DADS (Hu et al., INFOCOM 2019, algorithm 1) is different. It lacks edges from consumers
back to producers, so its minimum cut may let the device read tensors of the server for free.

Source: J.-C. Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final

import highspy
import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_runtime.errors import CutError

MAX_ENUMERATED: Final = 100_000  # placements that are tried one by one to confirm a plan
_MAX_ENUMERATED_TIERS: Final = 2_000_000  # tiers of kernels in all of them. It takes seconds
FEW_PLACEMENTS: Final = 1000  # are compared in less time than the solver takes
_GAP: Final = 1e-9  # share of the optimum: the gap between a plan and its bound that rounding may leave
_LIMITS_AT_ONCE: Final = 8  # that are added to a program after each solution that breaks some
_LARGEST: Final = 1e4  # costs are scaled to this maximum
_OPTIONS: Final = {
    "output_flag": False,
    "presolve": "off",  # costs more than it saves, and each solution starts from the last one
    "threads": 1,
    "time_limit": 10.0,  # seconds of a mixed-integer program. Its best solution by then carries its gap
    "mip_rel_gap": 0.0,
    "mip_feasibility_tolerance": _GAP,
    "primal_feasibility_tolerance": _GAP,
    "dual_feasibility_tolerance": _GAP,
}


@dataclass(frozen=True, slots=True, eq=False)
class Limit:
    """An upper bound on a sum over the placed kernels and tensors.

    Attributes:
        costs: The terms of the sum, such as bytes of weights on the device or seconds of latency.
        at_most: The upper bound, in the unit of `costs`.
        shared: Further terms, each with several kernels. A term is added once if any of its kernels runs on
            the device.
        slack: An additional amount by which the sum may exceed `at_most`. `memory_limits` uses it for limits
            that apply only if a certain kernel is on the device.
    """

    costs: Costs
    at_most: float
    name: str
    shared: tuple[tuple[float, tuple[int, ...]], ...] = ()
    slack: float = 0.0

    @property
    def largest(self) -> float:
        """The largest allowed sum: `at_most` with `slack` and a tolerance for rounding."""
        return self.at_most * (1 + _GAP) + self.slack

    def of(self, graph: KernelGraph, placements: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the sum for each placement, infinite if data flows backward. See `Costs.of`."""
        total = self.costs.of(graph, placements)
        for addend, kernels in self.shared:
            total += addend * (placements[:, kernels] == 0).any(axis=1)
        return total


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement, its cost, and a lower bound of the cost of all placements.

    Attributes:
        tiers: The tier of each kernel, where 0 is the device.
        bound: The lower bound. No placement costs less.
        proof: The origin of the bound: "enumerated" if all placements were compared, "dual" for a solution of
            the dual program that was checked here, or "solver" for the bound of the branch-and-bound search.
    """

    tiers: tuple[int, ...]
    cost: float
    bound: float
    proof: str

    @property
    def gap(self) -> float:
        """The largest possible excess over the minimum cost, as a fraction of this placement's cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / self.cost


@dataclass
class _Rows:
    """Sparse rows of a linear program; each says that a weighted sum of variables is at most a number."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    at_most: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], at_most: float = 0.0) -> None:
        self.columns.extend(column for column, _ in terms)
        self.values.extend(value for _, value in terms)
        self.starts.append(len(self.columns))
        self.at_most.append(at_most)


@dataclass(frozen=True)
class _Matrix:
    """Rows as arrays: int32 starts [rows + 1], int32 columns, int32 rows and float64 values [terms]."""

    starts: NDArray[np.int32]
    columns: NDArray[np.int32]
    rows: NDArray[np.int32]
    values: NDArray[np.float64]
    at_most: NDArray[np.float64]

    @classmethod
    def of(cls, rows: _Rows) -> "_Matrix":
        starts = np.array(rows.starts, np.int32)
        numbers = np.repeat(np.arange(len(rows.at_most), dtype=np.int32), np.diff(starts))
        columns, values = np.array(rows.columns, np.int32), np.array(rows.values)
        return cls(starts, columns, numbers, values, np.array(rows.at_most))


@dataclass(frozen=True)
class _Program:
    """A linear program: weights, bounds of the variables, and rows that are at most a number."""

    rows: _Matrix
    weights: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    at_most: NDArray[np.float64]

    def model(self) -> highspy.HighsLp:
        rows, model = self.rows, highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self.weights), len(self.at_most)
        model.col_cost_, model.col_lower_, model.col_upper_ = self.weights, self.lower, self.upper
        model.row_lower_, model.row_upper_ = np.full(len(self.at_most), -np.inf), self.at_most
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_, model.a_matrix_.index_ = rows.starts, rows.columns
        model.a_matrix_.value_ = rows.values
        return model

    def dual_bound(self, duals: NDArray[np.float64]) -> float:
        """Return a lower bound of the cost of any solution, by the weak duality of linear programs.

        It holds for any `duals`, even wrong ones, so the bound does not depend on the solver.
        """
        duals = np.minimum(duals, 0.0)  # the dual values of `<=` rows are not positive
        terms = duals[self.rows.rows] * self.rows.values
        reduced = self.weights - np.bincount(self.rows.columns, terms, len(self.weights))
        least = np.minimum(reduced * self.lower, reduced * self.upper)
        return float(duals @ self.at_most + least.sum())


class Cuts:
    """Finds placements of a graph on tiers, for any costs.

    The constraints depend only on the graph and are built once. If only the costs change, for example with
    the bandwidth, the solver starts from the previous solution. If a graph has few placements, such as a
    chain of kernels, all are compared without the solver.

    The variables are in 0..1. They say whether a kernel runs before a link, [kernels, links], whether a
    tensor is sent over a link, [tensors, links], and whether a link is used, [links].

    Args:
        tiers: The number of tiers, at least 2. The first one is the device.
        compares_up_to: The largest number of placements to compare without the solver.
    """

    def __init__(self, graph: KernelGraph, tiers: int = 2, *, compares_up_to: int = FEW_PLACEMENTS) -> None:
        self.graph, self._compares_up_to = graph, compares_up_to
        self._links = links = tiers - 1
        kernels, tensors = len(graph.kernels), len(graph.tensors)
        self._before = np.arange(kernels * links, dtype=np.int32).reshape(kernels, links)
        self._sent = np.arange(tensors * links, dtype=np.int32).reshape(tensors, links) + self._before.size
        self._used = np.arange(links, dtype=np.int32) + self._before.size + self._sent.size
        self._columns = self._before.size + self._sent.size + links
        self._rows = _Matrix.of(self._constraints())
        self._solver: highspy.Highs | None = None

    def cheapest(self, costs: Costs, limits: Sequence[Limit] = ()) -> Placement:
        """Return the placement with the lowest cost.

        Args:
            costs: The costs to minimise, such as seconds or joules.
            limits: Upper bounds on other sums. Without them the result is exact in polynomial time.

        Raises:
            CutError: No placement is possible. The message names the limits.
        """
        if self._has_few:
            return self._compare([costs], limits)
        weights, constant = self._weights(costs)

        def solve(active: Sequence[Limit]) -> Placement:
            if active:
                return self._search([costs], active, weights, constant)
            values, bound = self._solve_linear(costs, weights)
            return self._placement([costs], values, bound + constant, "dual")

        return self._keep(limits, solve)

    def fastest_pipeline(self, stages: Sequence[Costs], limits: Sequence[Limit] = ()) -> Placement:
        """Return the placement that minimises the time of the slowest stage, which limits the throughput.

        `stages` are the costs of each stage, such as device, link and server, in seconds per request.

        Raises:
            CutError: No placement is possible. The message names the limits.
        """
        if self._has_few:
            return self._compare(stages, limits)
        return self._keep(limits, lambda active: self._search(stages, active, None, 0.0))

    @property
    def _has_few(self) -> bool:
        return self.placements is not None and len(self.placements) <= self._compares_up_to

    def _compare(self, stages: Sequence[Costs], limits: Sequence[Limit]) -> Placement:
        placement = self.confirm(Placement((), math.inf, 0.0, ""), stages, limits)
        if math.isinf(placement.cost):
            raise _no_placement(limits)
        return placement

    def _keep(self, limits: Sequence[Limit], solve: Callable[[Sequence[Limit]], Placement]) -> Placement:
        """Return what `solve` finds with as few of the limits as make it keep all of them.

        A bound without a limit holds with it too, and most of a hundred limits on memory never matter.
        """
        active: list[Limit] = []
        while True:
            placement = solve(active)
            tiers = np.array([placement.tiers], np.int8)
            excess = [float(limit.of(self.graph, tiers)[0]) - limit.largest for limit in limits]
            worst = sorted(range(len(limits)), key=excess.__getitem__)[-_LIMITS_AT_ONCE:]
            broken = [limits[number] for number in worst if excess[number] > 0]
            if all(limit in active for limit in broken):
                return placement
            active += [limit for limit in broken if limit not in active]

    def confirm(
        self, placement: Placement, stages: Sequence[Costs], limits: Sequence[Limit] = ()
    ) -> Placement:
        """Return the best of all placements, or `placement` if there are too many to compare.

        Args:
            placement: The result of `cheapest` or `fastest_pipeline`.
            stages: `[costs]` for `cheapest`, or the stages for `fastest_pipeline`.
            limits: The limits with which `placement` was found.
        """
        every = self.placements
        if every is None or placement.proof == "enumerated":
            return placement
        costs = np.max([stage.of(self.graph, every) for stage in stages], axis=0)
        for limit in limits:
            costs[limit.of(self.graph, every) > limit.largest] = np.inf
        least = float(costs.min())
        best = tuple(int(tier) for tier in every[int(costs.argmin())])
        return Placement(
            placement.tiers if placement.cost <= least * (1 + _GAP) else best, least, least, "enumerated"
        )

    @cached_property
    def placements(self) -> NDArray[np.int8] | None:
        """All placements, int8 [placements, kernels], or None if there are too many to compare."""
        at_most = min(MAX_ENUMERATED, _MAX_ENUMERATED_TIERS // max(len(self.graph.kernels), 1))
        return self.graph.placements(self._links + 1, at_most)

    def _constraints(self) -> _Rows:
        """Return the constraints that values of the variables keep if they are a placement."""
        graph, before = self.graph, self._before
        rows = _Rows()
        last = set(range(len(before))) - {kernel for kernels in graph.predecessors for kernel in kernels}
        for number, link in product(range(len(before)), range(1, self._links)):
            # A kernel is on the tier between two links if this is 1; a bound of 0 forbids that.
            rows.add([(before[number, link], 1.0), (before[number, link - 1], -1.0)], 1.0)
        for link in range(self._links):
            for number, earlier in enumerate(graph.predecessors):
                if link:  # a kernel before a link is also before the next one
                    rows.add([(before[number, link - 1], 1.0), (before[number, link], -1.0)])
                for kernel in earlier:  # data flows forward only
                    rows.add([(before[number, link], 1.0), (before[kernel, link], -1.0)])
                if number in last:  # a link is used if a kernel runs behind it; then a last kernel does too
                    rows.add([(before[number, link], -1.0), (self._used[link], -1.0)], -1.0)
            for row, tensor in enumerate(graph.tensors):
                for consumer in graph.consumers[tensor]:  # sent if made before and read behind the link
                    terms = [(before[consumer, link], -1.0), (self._sent[row, link], -1.0)]
                    if tensor in graph.producer:
                        rows.add([(before[graph.producer[tensor], link], 1.0), *terms])
                    else:
                        rows.add(terms, -1.0)
        return rows

    def _weights(self, costs: Costs) -> tuple[NDArray[np.float64], float]:
        """Return `costs` as weights of the variables and a constant; `_program` forbids infinite costs."""
        weights = np.zeros(self._columns)
        compute = np.where(np.isfinite(costs.compute), costs.compute, 0.0)
        weights[self._before] = compute[:, :-1] - compute[:, 1:]
        weights[self._sent] = np.where(np.isfinite(costs.upload), costs.upload, 0.0)
        weights[self._used] = costs.setup
        constant = float(compute[:, -1].sum())
        for row, tensor in enumerate(self.graph.tensors):
            if tensor in self.graph.outputs and tensor in self.graph.producer:
                weights[self._before[self.graph.producer[tensor]]] -= costs.download[row]
                constant += float(costs.download[row].sum())
        return weights, constant

    def _program(self, stages: Sequence[Costs], weights: NDArray[np.float64]) -> _Program:
        """Return the program that minimises `weights`; infinite costs in `stages` cannot be chosen."""
        lower, upper = np.zeros(self._columns), np.ones(self._columns)
        at_most = self._rows.at_most.copy()
        between = len(self._before) * (self._links - 1)  # rows that can forbid a tier between two links
        for costs in stages:
            upper[self._sent[np.isinf(costs.upload)]] = 0.0
            upper[self._before[np.isinf(costs.compute[:, 0]), 0]] = 0.0
            lower[self._before[np.isinf(costs.compute[:, -1]), -1]] = 1.0
            at_most[:between][np.isinf(costs.compute[:, 1:-1]).ravel()] = 0.0
        return _Program(self._rows, weights, lower, upper, at_most)

    def _solve_linear(self, costs: Costs, weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        """Return the variables of the best placement, and a bound computed here from the dual solution."""
        scale = _LARGEST / max(float(np.abs(weights).max()), 1e-300)  # the solver's tolerances are absolute
        program = self._program([costs], weights * scale)
        if self._solver is None:
            self._solver = _make_solver()
            self._solver.passModel(program.model())
        else:  # starts from the solution of the last costs
            columns = np.arange(self._columns, dtype=np.int32)
            rows = np.arange(len(program.at_most), dtype=np.int32)
            self._solver.changeColsCost(self._columns, columns, program.weights)
            self._solver.changeColsBounds(self._columns, columns, program.lower, program.upper)
            self._solver.changeRowsBounds(len(rows), rows, np.full(len(rows), -np.inf), program.at_most)
        values = _run(self._solver, ())
        duals = np.array(self._solver.getSolution().row_dual)
        return values, program.dual_bound(duals) / scale

    def _search(
        self,
        stages: Sequence[Costs],
        limits: Sequence[Limit],
        weights: NDArray[np.float64] | None,
        constant: float,
    ) -> Placement:
        """Solve the integer program: the sum of `weights`, or if that is None, the slowest of `stages`."""
        minimised = np.zeros(self._columns) if weights is None else weights
        parts = [self._weights(costs) for costs in stages]
        largest = max(float(np.abs(part).max()) + abs(offset) for part, offset in parts)
        scale = _LARGEST / max(largest, 1e-300)
        solver = _make_solver()
        solver.passModel(self._program(stages, minimised * scale).model())
        columns = np.arange(self._columns, dtype=np.int32)
        solver.changeColsIntegrality(
            self._columns, columns, np.full(self._columns, highspy.HighsVarType.kInteger)
        )
        if weights is None:
            solver.addCol(1.0, 0.0, highspy.kHighsInf, 0, [], [])
            for part, offset in parts:
                index = np.append(columns, self._columns)
                solver.addRow(
                    -highspy.kHighsInf, -offset * scale, len(index), index, np.append(part * scale, -1.0)
                )
        self._add_limits(solver, limits)
        values = _run(solver, limits)
        bound = float(solver.getInfo().mip_dual_bound) / scale
        return self._placement(stages, values, bound + constant, "solver")

    def _add_limits(self, solver: highspy.Highs, limits: Sequence[Limit]) -> None:
        """Add the rows of limits; what several kernels share has a variable, at least that of each kernel."""
        shared: dict[tuple[int, ...], int] = {}
        for limit in limits:
            part, offset = self._weights(limit.costs)
            for _, kernels in limit.shared:
                if kernels not in shared:
                    shared[kernels] = column = solver.getNumCol()
                    solver.addCol(0.0, 0.0, 1.0, 0, [], [])
                    for kernel in kernels:
                        index = np.array([self._before[kernel, 0], column], np.int32)
                        solver.addRow(-highspy.kHighsInf, 0.0, 2, index, np.array([1.0, -1.0]))
            index = np.append(np.flatnonzero(part), [shared[kernels] for _, kernels in limit.shared])
            terms = np.append(part[part != 0], [addend for addend, _ in limit.shared])
            unit = max(abs(limit.at_most), float(np.abs(terms).max(initial=0.0)), 1e-300)
            solver.addRow(
                -highspy.kHighsInf,
                (limit.at_most + limit.slack - offset) / unit,
                len(index),
                index.astype(np.int32),
                terms / unit,
            )

    def _placement(
        self, stages: Sequence[Costs], values: NDArray[np.float64], bound: float, proof: str
    ) -> Placement:
        before = np.rint(values[self._before])
        tiers = tuple(int(tier) for tier in self._links - before.sum(axis=1))
        cost = max(float(costs.of(self.graph, np.array([tiers], np.int8))[0]) for costs in stages)
        return Placement(tiers, cost, cost if cost - bound <= _GAP * cost else bound, proof)


def _make_solver() -> highspy.Highs:
    solver = highspy.Highs()
    for name, value in _OPTIONS.items():
        solver.setOptionValue(name, value)
    return solver


def _run(solver: highspy.Highs, limits: Sequence[Limit]) -> NDArray[np.float64]:
    solver.run()
    if solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        return np.array(solver.getSolution().col_value)
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise _no_placement(limits)
    raise CutError(
        f"the solver found no placement of the kernels that keeps the limits ({_name(limits)}), and no proof"
        f" that there is none: {solver.modelStatusToString(status).lower()}; loosen the limits"
    )


def _no_placement(limits: Sequence[Limit]) -> CutError:
    return CutError(f"no placement of the kernels keeps the limits ({_name(limits)})")


def _name(limits: Sequence[Limit]) -> str:
    return ", ".join(limit.name for limit in limits) or "tensors and kernels that must stay where they are"
