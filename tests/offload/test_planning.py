"""The planner on synthetic graphs: its cuts are those of an exhaustive search, and the classic mistakes."""

import random
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from tests.offload.random_graphs import random_graph

from edgekit_offload.cuts.kernel_graph import Kernel, KernelGraph
from edgekit_offload.cuts.solver import Cuts
from edgekit_offload.planning.costs import (
    CodedTensors,
    DeviceLimits,
    GraphCosts,
    PowerModel,
    device_bytes,
    device_weights,
    memory_limits,
    pinned_tensors,
    tier_costs,
    weigh_costs,
)
from edgekit_offload.planning.envelope import Grid, choose_few, find_winners, win_ranges
from edgekit_offload.planning.explain import describe_certificate
from edgekit_offload.planning.result import Certificate, StatedLimit, WinRange
from edgekit_offload.planning.sweep import Goal, OptimalCut, find_cuts, place_on_tiers
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import (
    Conditions,
    LinkState,
    energy_j,
    predict_s,
    reserved_server_s,
    slowest_stage_s,
)
from edgekit_runtime.offload.objectives import OBJECTIVES
from edgekit_runtime.offload.offload_plan import OffloadPlan

GRID = Grid((1.0, 3.0, 10.0, 30.0, 100.0), (5.0, 20.0))
WARM = 1e9  # bytes of the window: without TCP's slow start, which is not linear

find_by_solver = partial(find_cuts, compares_up_to=0)


def costs_of(graph: KernelGraph, rng: random.Random, tiers: int = 2) -> GraphCosts:
    raw = np.array([rng.uniform(1e3, 2e6) for _ in graph.tensors])
    seconds = np.array([[rng.expovariate(20) / 8**tier for tier in range(tiers)] for _ in graph.kernels])
    zero = np.zeros(len(raw))
    return GraphCosts(
        graph=graph,
        seconds=seconds,
        raw_bytes=raw,
        weight_bytes=np.array([rng.uniform(0, 1e6) for _ in graph.kernels]),
        weight_readers=np.eye(len(graph.kernels), dtype=bool),
        codings={
            "raw": CodedTensors(
                names=("raw",) * len(raw), sent_bytes=raw, encode_s=zero, decode_s=zero, reply_bytes=raw
            ),
            "int8": CodedTensors(
                names=("int8",) * len(raw),
                sent_bytes=raw / 5,
                encode_s=raw / 1e9,
                decode_s=raw / 5e9,
                reply_bytes=raw,
            ),
        },
    )


def chain(seconds: list[tuple[float, float]], raw_bytes: list[float]) -> GraphCosts:
    kernels = tuple(Kernel(f"k{n}", (f"t{n}",), (f"t{n + 1}",)) for n in range(len(seconds)))
    graph = KernelGraph(kernels, ("t0",), (f"t{len(seconds)}",))
    raw, zero = np.array(raw_bytes), np.zeros(len(raw_bytes))
    coded = CodedTensors(
        names=("raw",) * len(raw), sent_bytes=raw, encode_s=zero, decode_s=zero, reply_bytes=raw
    )
    no_weights = np.zeros((len(seconds), 0), bool)
    return GraphCosts(
        graph=graph,
        seconds=np.array(seconds),
        raw_bytes=raw,
        weight_bytes=np.zeros(0),
        weight_readers=no_weights,
        codings={"raw": coded},
    )


def every_placement(graph: KernelGraph, tiers: int = 2) -> list[tuple[int, ...]]:
    rows = graph.placements(tiers, 1_000_000)
    assert rows is not None
    return [tuple(row) for row in rows.tolist()]


def link(mbit_s: float, rtt_ms: float = 20.0) -> Conditions:
    return Conditions(LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_ms / 1e3, WARM))


def plan_of(costs: GraphCosts, tiers: tuple[int, ...], coding: str) -> OffloadPlan:
    """Return a placement as the runtime has it."""
    where = None if not any(tiers) else "tail"
    name = "local" if where is None else "cut"
    return OffloadPlan(name, costs.plan_costs(tiers, coding), tail=where)


def seconds_of(costs: GraphCosts, tiers: tuple[int, ...], coding: str, conditions: Conditions) -> float:
    """What the runtime would predict for a placement."""
    return predict_s(plan_of(costs, tiers, coding), conditions)


def test_cuts_of_the_sweep_are_those_of_an_exhaustive_search_over_placements_and_codings(
    is_long: bool,
) -> None:
    rng = random.Random(5)
    splits, count = 0, 25 if is_long else 10
    for _ in range(count):
        costs = costs_of(random_graph(rng, rng.randrange(2, 9)), rng)
        conditions = [link(b, r) for r in GRID.rtts_ms for b in GRID.bandwidths_mbit_s]
        cuts = find_by_solver(costs, conditions, Goal())
        candidates = [*((cut.coding, cut.tiers) for cut in cuts), ("raw", (0,) * len(costs.seconds))]
        plans = {
            (coding, tiers): plan_of(costs, tiers, coding)
            for tiers in every_placement(costs.graph)
            for coding in costs.codings
        }
        for one in conditions:
            seconds = {way: predict_s(plan, one) for way, plan in plans.items()}
            found = min(seconds[way] for way in candidates)
            assert found == pytest.approx(min(seconds.values()), rel=1e-9)  # sums of some dozen numbers
        splits += any(cut.is_split for cut in cuts)
        assert all(cut.certificate.gap == 0 for cut in cuts)
        assert {cut.certificate.proof for cut in cuts} <= {"enumerated", "dual"}
    assert splits > 0.8 * count


def test_costs_of_the_solver_are_the_prediction_of_the_runtime() -> None:
    rng = random.Random(6)
    costs = costs_of(random_graph(rng, 6), rng)
    for tiers in every_placement(costs.graph):
        table = weigh_costs(costs, "int8", link(7.0))
        total = float(table.of(costs.graph, np.array([tiers], np.int8))[0])
        assert total == pytest.approx(seconds_of(costs, tiers, "int8", link(7.0)), rel=1e-9)


def test_raw_input_is_sent_and_never_free() -> None:
    costs = chain([(1.0, 0.01), (1.0, 0.01)], [1e9, 1e9, 4.0])  # an input that takes minutes to send
    assert all(cut.is_split for cut in find_by_solver(costs, [link(10.0)], Goal()))
    assert seconds_of(costs, (1, 1), "raw", link(10.0)) > 100


def test_round_trip_is_paid_once_and_alone_can_forbid_the_server() -> None:
    costs = chain([(0.010, 0.001), (0.010, 0.001)], [4.0, 4.0, 4.0])
    near, far = link(100.0, 5.0), link(100.0, 50.0)
    assert (1, 1) in {cut.tiers for cut in find_by_solver(costs, [near], Goal())}
    table = weigh_costs(costs, "raw", far)
    placements = np.array([[0, 0], [1, 1]], np.int8)
    local, remote = table.of(costs.graph, placements)
    assert local < remote < 2 * 0.050


def test_output_made_on_the_server_comes_back() -> None:
    costs = chain([(0.1, 0.001)], [4.0, 1e6])
    there = seconds_of(costs, (1,), "raw", link(10.0))
    assert there > 1e6 * 8 / 10e6  # the reply alone takes 0.8 s
    assert find_by_solver(costs, [link(10.0)], Goal()) == ()  # so all stays on the device


def test_input_that_must_stay_is_never_sent() -> None:
    costs = chain([(0.1, 0.001), (1.0, 0.001)], [10.0, 1e3, 4.0])
    kept = pinned_tensors(costs.graph, ("input",))
    cuts = find_by_solver(costs, [link(50.0)], Goal(), kept)
    assert {cut.tiers for cut in cuts} == {(0, 1)}
    assert (1, 1) in {cut.tiers for cut in find_by_solver(costs, [link(50.0)], Goal())}
    with pytest.raises(CutError, match="--keep-on-device nothing"):
        pinned_tensors(costs.graph, ("nothing",))


@pytest.mark.parametrize("objective", ["latency", "energy", "throughput", "capacity"])
def test_tensor_that_must_stay_is_made_on_the_device(objective: str) -> None:
    costs = chain([(0.1, 0.001), (0.1, 0.001), (0.1, 0.001)], [10.0, 10.0, 10.0, 4.0])
    goal = Goal(objective=objective, power=PowerModel(1.0, 1.0), latency_limit_s=0.29)
    kept = pinned_tensors(costs.graph, ("t2",))
    assert find_by_solver(costs, [link(50.0)], goal)
    cuts = find_by_solver(costs, [link(50.0)], goal, kept)
    assert cuts == ()  # t2 is made on the device and read there, so nothing is left for the server
    branched = KernelGraph(
        (
            Kernel("k0", ("t0",), ("t1",)),
            Kernel("k1", ("t1",), ("t2",)),
            Kernel("k2", ("t2",), ("t3",)),
            Kernel("k3", ("t1",), ("t4",)),
        ),
        ("t0",),
        ("t3", "t4"),
    )
    raw, zero = np.full(5, 10.0), np.zeros(5)
    wide = GraphCosts(
        graph=branched,
        seconds=np.array([(0.1, 0.001)] * 4),
        raw_bytes=raw,
        weight_bytes=np.zeros(0),
        weight_readers=np.zeros((4, 0), bool),
        codings={
            "raw": CodedTensors(
                names=("raw",) * 5, sent_bytes=raw, encode_s=zero, decode_s=zero, reply_bytes=raw
            )
        },
    )
    goal = replace(goal, latency_limit_s=0.39)
    found = find_by_solver(wide, [link(50.0)], goal, pinned_tensors(branched, ("t2",)))
    assert {cut.tiers for cut in found} == {(0, 0, 0, 1)}


def test_tensor_that_must_stay_is_made_on_the_first_of_three_tiers() -> None:
    rng = random.Random(10)
    links = (LinkState(200e6, 200e6, 0.002, WARM), LinkState(500e6, 500e6, 0.003, WARM))
    moved = 0
    for _ in range(8):
        costs = costs_of(random_graph(rng, 6), rng, tiers=3)
        name = costs.graph.kernels[1].writes[0]
        free = place_on_tiers(costs, "int8", links)
        found = place_on_tiers(costs, "int8", links, pinned_tensors(costs.graph, (name,)))
        moved += free.tiers[1] > 0
        assert found.tiers[1] == 0
        assert all(one.name != name for sent in found.sent for one in sent)
    assert moved > 3


def test_limits_hold_on_three_tiers_and_cost_what_an_exhaustive_search_finds() -> None:
    rng = random.Random(11)
    links = (LinkState(20e6, 20e6, 0.002, WARM), LinkState(50e6, 50e6, 0.03, WARM))
    bound = 0
    for _ in range(8):
        costs = costs_of(random_graph(rng, 6), rng, tiers=3)
        at_most = 0.6 * device_bytes(costs, (0,) * 6)
        free = place_on_tiers(costs, "raw", links)
        found = place_on_tiers(costs, "raw", links, limits=memory_limits(costs, at_most))
        assert found.certificate.limits == (
            StatedLimit(name="memory of the device", at_most=at_most, unit="B"),
        )
        assert 0 not in found.tiers or device_bytes(costs, found.tiers) <= at_most
        every = np.array(every_placement(costs.graph, 3), np.int8)
        seconds = tier_costs(costs, "raw", links).of(costs.graph, every)
        fits = [0 not in one or device_bytes(costs, tuple(one)) <= at_most for one in every]
        assert found.total_ms / 1e3 == pytest.approx(float(seconds[fits].min()), rel=1e-9)
        bound += found.tiers != free.tiers
    assert bound > 1


def test_weights_that_two_kernels_share_count_on_each_side_that_has_one() -> None:
    kernels = (Kernel("k0", ("t0",), ("t1",)), Kernel("k1", ("t0",), ("t2",)))
    graph = KernelGraph(kernels, ("t0",), ("t1", "t2"))
    raw, zero = np.full(3, 10.0), np.zeros(3)
    costs = GraphCosts(
        graph=graph,
        seconds=np.array([(0.1, 0.001), (0.1, 0.001)]),
        raw_bytes=raw,
        weight_bytes=np.array([5e6]),
        weight_readers=np.ones((2, 1), bool),
        codings={
            "raw": CodedTensors(
                names=("raw",) * 3, sent_bytes=raw, encode_s=zero, decode_s=zero, reply_bytes=raw
            )
        },
    )
    weights = {tiers: device_weights(costs, tiers) for tiers in every_placement(graph)}
    assert weights == {(0, 0): 5e6, (0, 1): 5e6, (1, 0): 5e6, (1, 1): 0.0}
    assert device_bytes(costs, (0, 0)) == pytest.approx(5e6 + 30)


def need_of(costs: GraphCosts, tiers: tuple[int, ...]) -> tuple[float, float]:
    """Bytes of weights, and of weights and activations on the device, counted one by one."""
    graph, here = costs.graph, [kernel for kernel, tier in enumerate(tiers) if tier == 0]
    weights = sum(costs.weight_bytes[costs.weight_readers[here].any(axis=0)])
    most = 0.0
    for kernel in here:
        live = 0.0
        for row, tensor in enumerate(graph.tensors):
            maker, readers = graph.producer.get(tensor, -1), graph.consumers[tensor]
            if maker >= 0 and (maker > kernel or tiers[maker]):
                continue  # not there yet, or on the server
            is_read = any(reader >= kernel and not tiers[reader] for reader in readers)
            is_sent = any(tiers[reader] for reader in readers)
            if is_read or is_sent or tensor in graph.outputs or kernel == max(maker, 0):
                live += costs.raw_bytes[row]
        most = max(most, live)
    return weights, weights + most


@pytest.mark.parametrize("limited", ["weights_bytes", "memory_bytes"])
def test_limit_with_shared_weights_misses_no_cut_and_a_looser_one_is_never_worse(
    limited: str, *, is_long: bool
) -> None:
    rng, bound = random.Random(21), 0
    for _ in range(12 if is_long else 6):
        count = rng.randrange(2, 8)
        costs = costs_of(random_graph(rng, count), rng)
        readers = np.array([[rng.random() < 0.4 for _ in range(count)] for _ in range(count)])
        costs = replace(costs, weight_readers=readers)
        every = every_placement(costs.graph)
        table = weigh_costs(costs, "raw", link(5.0))
        seconds = table.of(costs.graph, np.array(every, np.int8))
        needs = [need_of(costs, tiers)[limited == "memory_bytes"] for tiers in every]
        last = np.inf
        for limit in sorted({*needs}):
            limits = DeviceLimits(**{limited: limit}).of(costs)
            cheapest = Cuts(costs.graph, compares_up_to=0).cheapest(table, limits)
            assert needs[every.index(cheapest.tiers)] <= limit
            best = min(s for s, need in zip(seconds, needs, strict=True) if need <= limit)
            assert cheapest.cost == pytest.approx(best, rel=1e-7)
            assert cheapest.cost <= last * (1 + 1e-9)
            last = cheapest.cost
            bound += best > seconds.min()
    assert bound > (10 if is_long else 5)


def test_memory_of_the_device_counts_what_is_sent_and_nothing_of_the_server() -> None:
    rng = random.Random(22)
    for _ in range(10):
        costs = costs_of(random_graph(rng, 7), rng)
        for tiers in every_placement(costs.graph):
            if 0 in tiers:
                assert device_bytes(costs, tiers) == pytest.approx(need_of(costs, tiers)[1])


def test_memory_limit_is_kept_and_costs_what_an_exhaustive_search_finds(is_long: bool) -> None:
    rng = random.Random(7)
    for _ in range(15 if is_long else 8):
        costs = costs_of(random_graph(rng, rng.randrange(3, 8)), rng)
        every = every_placement(costs.graph)
        at_most = float(np.median([device_bytes(costs, tiers) for tiers in every if 0 in tiers]))
        goal = Goal(limits=memory_limits(costs, at_most))
        fitting = [tiers for tiers in every if 0 not in tiers or device_bytes(costs, tiers) <= at_most]
        cuts = find_by_solver(costs, [link(5.0)], goal)
        assert all(device_bytes(costs, cut.tiers) <= at_most * (1 + 1e-9) for cut in cuts if 0 in cut.tiers)
        best = min(seconds_of(costs, tiers, c, link(5.0)) for tiers in fitting for c in costs.codings)
        candidates = [(cut.coding, cut.tiers) for cut in cuts]
        candidates += [("raw", (0,) * len(costs.seconds))] if (0,) * len(costs.seconds) in fitting else []
        assert min(seconds_of(costs, t, c, link(5.0)) for c, t in candidates) == pytest.approx(best, rel=1e-7)


def test_every_cut_of_a_small_graph_is_proved_by_trying_all_placements_whatever_limits_it(
    is_long: bool,
) -> None:
    rng = random.Random(3)
    conditions = [
        replace(link(mbit_s), device_slowdown=load) for mbit_s in (1.0, 5.0, 50.0) for load in (1, 4)
    ]
    proofs = set()
    for _ in range(6 if is_long else 2):
        costs = costs_of(random_graph(rng, 7), rng)
        every = every_placement(costs.graph)
        limit = float(np.median([device_bytes(costs, tiers) for tiers in every]))
        for goal in (Goal(), Goal(limits=memory_limits(costs, limit)), Goal(objective="throughput")):
            for cut in find_by_solver(costs, conditions, goal):
                proofs.add((cut.certificate.proof, cut.certificate.gap))
                assert cut.certificate.placements == len(every)
    assert proofs == {("enumerated", 0.0)}


@pytest.mark.parametrize(
    ("certificate", "words"),
    [
        (
            Certificate(
                proof="enumerated",
                cost=0.08,
                bound=0.08,
                gap=0.0,
                placements=4120,
                bandwidth_mbit_s=12.0,
                rtt_ms=5.0,
                device_slowdown=4.0,
            ),
            (
                "all 4,120 placements tried: no placement costs less in the model of costs, with raw tensors,"
                " at 12 Mbit/s and 5 ms, with the device 4 times slower"
            ),
        ),
        (
            Certificate(
                proof="dual",
                cost=0.1,
                bound=0.08,
                gap=0.2,
                placements=0,
                bandwidth_mbit_s=1.0,
                rtt_ms=60.0,
                device_slowdown=1.0,
                server_slowdown=2.0,
                splits_only=True,
                coding="int8",
            ),
            (
                "a checked solution of the dual program: no split costs 20 % less in the model of costs,"
                " with int8 tensors, at 1 Mbit/s and 60 ms, with the server 2 times slower"
            ),
        ),
        (
            Certificate(
                proof="solver",
                cost=0.1,
                bound=0.1,
                gap=0.0,
                placements=0,
                bandwidth_mbit_s=1.0,
                rtt_ms=60.0,
                limits=(
                    StatedLimit(name="latency", at_most=1.5, unit="s", server_waits=1.4),
                    StatedLimit(name="weights on the device", at_most=8e6, unit="B"),
                ),
                pinned=("a", "b", "c", "d", "e"),
            ),
            (
                "the bound of the search: no placement costs less in the model of costs, with raw tensors, at"
                " 1 Mbit/s and 60 ms, with latency and a wait of 1.4 times the server's time within 1500 ms,"
                " with weights on the device within 8 MB, with 'a', 'b', 'c', 2 more kept on the device"
            ),
        ),
    ],
)
def test_certificate_says_what_it_holds_for(certificate: Certificate, words: str) -> None:
    assert describe_certificate(certificate) == words


def speaks_of(first: OptimalCut, second: OptimalCut) -> bool:
    """Whether the certificate of one cut says that the other one costs no less."""
    own, other = (
        (one.coding, one.limits, one.pinned, one.bandwidth_mbit_s, one.rtt_ms, one.device_slowdown)
        for one in (first.certificate, second.certificate)
    )
    return own == other and (second.is_split or not first.certificate.splits_only)


def test_no_certificate_is_beaten_by_a_cut_that_keeps_the_same_limits_at_the_same_setting(
    is_long: bool,
) -> None:
    rng = random.Random(14)
    compared = waits = 0
    count = 10 if is_long else 4
    for _ in range(count):
        costs = costs_of(random_graph(rng, 6), rng)
        every = every_placement(costs.graph)
        limit_s = float(np.median([seconds_of(costs, tiers, "raw", link(50.0)) for tiers in every]))
        limits = memory_limits(costs, float(np.median([device_bytes(costs, tiers) for tiers in every])))
        for goal in (
            Goal(objective="capacity", latency_limit_s=limit_s),
            Goal(objective="capacity", limits=limits, latency_limit_s=limit_s),
            Goal(objective="energy", power=PowerModel(1.0, 3.0), latency_limit_s=limit_s),
            Goal(objective="latency", limits=limits),
        ):
            cuts = find_by_solver(costs, [link(50.0), replace(link(50.0), device_slowdown=4.0)], goal)
            for first, second in permutations(cuts, 2):
                if speaks_of(first, second):
                    compared += 1
                    assert second.certificate.cost >= first.certificate.bound * (1 - 1e-9)
            said: dict[str, float] = {}
            for cut in cuts:  # what a user reads of two cuts contradicts itself nowhere
                proof = cut.certificate
                assert proof.cost == pytest.approx(said.setdefault(describe_certificate(proof), proof.cost))
                waits += any(one.server_waits for one in proof.limits)
                named = {one.name for one in proof.limits}
                assert ("latency" in named) == (goal.latency_limit_s is not None)
                assert ("memory of the device" in named) == bool(goal.limits)
    assert compared > count
    assert waits > count


def test_certificate_of_a_pinned_model_names_what_stays() -> None:
    costs = chain([(0.1, 0.001), (0.1, 0.001), (0.1, 0.001)], [10.0, 10.0, 10.0, 4.0])
    (cut,) = find_by_solver(costs, [link(50.0)], Goal(), pinned_tensors(costs.graph, ("t0",)))
    assert cut.certificate.pinned == ("t0",)
    assert describe_certificate(cut.certificate).endswith("with 't0' kept on the device")


def test_energy_counts_the_radio_while_the_server_computes() -> None:
    costs = chain([(1.0, 2.0)], [1e3, 4.0])
    (weights,) = OBJECTIVES["energy"].stages(4.0, 1.0)
    plan = OffloadPlan("all", replace(costs.plan_costs((1,), "raw"), device_j=0.0), tail="tail")
    table = weigh_costs(costs, "raw", link(10.0), weights=weights)
    total = float(table.of(costs.graph, np.array([[1]], np.int8))[0])
    assert total == pytest.approx(energy_j(plan, link(10.0), 1.0), rel=1e-9)
    assert total > 2.0  # 2 s of waiting at 1 W


def test_throughput_is_that_of_the_slowest_stage() -> None:
    rng = random.Random(8)
    for _ in range(8):
        costs = costs_of(random_graph(rng, 5), rng)
        cuts = find_by_solver(costs, [link(10.0)], Goal(objective="throughput"))
        best = np.inf
        for coding in costs.codings:
            every = np.array(every_placement(costs.graph), np.int8)
            stages = [
                weigh_costs(costs, coding, link(10.0), weights=weights)
                for weights in Goal(objective="throughput").stages
            ]
            best = min(best, float(np.max([one.of(costs.graph, every) for one in stages], axis=0).min()))
            for tiers, total in zip(
                every, np.max([one.of(costs.graph, every) for one in stages], axis=0), strict=True
            ):
                assert total == pytest.approx(
                    slowest_stage_s(plan_of(costs, tuple(tiers), coding), link(10.0)), rel=1e-9
                )
        local = float(costs.seconds[:, 0].sum())
        assert min(local, *(cut.certificate.cost for cut in cuts)) == pytest.approx(best, rel=1e-6)


def test_capacity_finds_the_cut_of_which_a_server_carries_most_devices(is_long: bool) -> None:
    rng = random.Random(12)
    ratios, count = [], 30 if is_long else 12
    for _ in range(count):
        costs = costs_of(random_graph(rng, rng.randrange(4, 8)), rng)
        limit_s = 0.6 * float(costs.seconds[:, 0].sum())  # so all on the device is too slow
        kept = {
            (coding, tiers): reserved_server_s(
                OffloadPlan("cut", costs.plan_costs(tiers, coding), tail="tail"), link(200.0), limit_s
            )
            for coding in costs.codings
            for tiers in every_placement(costs.graph)
            if any(tiers)
        }
        cuts = find_by_solver(costs, [link(200.0)], Goal(objective="capacity", latency_limit_s=limit_s))
        best = min(kept.values())
        if np.isfinite(best):
            ratios.append(min(kept[cut.coding, cut.tiers] for cut in cuts) / best)
    assert len(ratios) > count / 3
    assert max(ratios) < 1.5  # times to wait are tried in steps
    assert np.mean(ratios) < 1.05


def test_cut_that_takes_least_of_the_server_gives_way_to_one_with_time_to_wait() -> None:
    # Behind the third kernel the server has 10 ms to do, but 0.4 ms are left to wait; behind the first 12 ms.
    costs = chain([(0.01, 0.001), (0.03, 0.002), (0.1, 0.010)], [1e3, 1e3, 1e3, 4.0])
    limit_s = 0.0738
    cuts = find_by_solver(costs, [link(10.0)], Goal(objective="capacity", latency_limit_s=limit_s))
    assert {(0, 0, 1), (0, 1, 1)} <= {cut.tiers for cut in cuts}


def test_energy_within_a_latency_is_that_of_an_exhaustive_search() -> None:
    rng = random.Random(13)
    compared = 0
    for _ in range(12):
        costs = costs_of(random_graph(rng, 5), rng)
        limit_s = 0.7 * float(costs.seconds[:, 0].sum())
        power = PowerModel(1.0, 3.0)
        cuts = find_by_solver(
            costs, [link(200.0), link(0.001)], Goal(objective="energy", power=power, latency_limit_s=limit_s)
        )

        def joules(coding: str, tiers: tuple[int, ...], costs: GraphCosts = costs) -> float:
            made = costs.plan_costs(tiers, coding)
            plan = OffloadPlan("cut", replace(made, device_j=made.device_s), tail="tail")
            return energy_j(plan, link(200.0), 3.0)

        every = [
            joules(coding, tiers)
            for coding in costs.codings
            for tiers in every_placement(costs.graph)
            if any(tiers) and seconds_of(costs, tiers, coding, link(200.0)) <= limit_s
        ]
        assert bool(cuts) == bool(every)
        if every:
            compared += 1
            assert min(joules(cut.coding, cut.tiers) for cut in cuts) == pytest.approx(min(every), rel=1e-6)
    assert compared > 4


def test_three_tiers_are_placed_as_an_exhaustive_search_does() -> None:
    rng = random.Random(9)
    costs = costs_of(random_graph(rng, 6), rng, tiers=3)
    links = (LinkState(20e6, 20e6, 0.002, WARM), LinkState(50e6, 50e6, 0.03, WARM))
    plan = place_on_tiers(costs, "int8", links)
    assert plan.certificate.proof == "enumerated"
    assert plan.certificate.placements > 10
    assert sum(plan.kernels) == 6
    assert plan.total_ms / 1e3 == pytest.approx(plan.certificate.bound)


def test_link_of_zero_is_refused() -> None:
    with pytest.raises(CutError, match="bandwidth 0"):
        find_by_solver(chain([(1.0, 0.1)], [8.0, 8.0]), [link(0.0)], Goal())


def test_simpler_way_wins_within_one_percent() -> None:
    scores = np.array([[1.000, 1.0, np.inf], [0.995, 0.5, np.inf]])
    assert find_winners(scores, [0, 2]).tolist() == [0, 1, -1]
    grid = Grid((1.0, 2.0, 4.0), (20.0,))
    assert win_ranges(np.array([1, 0, 1]), 1, grid) == (WinRange(20.0, 1.0, 1.0), WinRange(20.0, 4.0, 4.0))


def test_few_candidates_are_those_that_lower_the_best_score() -> None:
    base = np.array([1.0, 1.0, 1.0])
    scores = np.array([[0.5, 2.0, 2.0], [0.6, 2.0, 2.0], [2.0, 2.0, 0.9]])
    assert choose_few(scores, base, 8) == (0, 2)
    assert choose_few(scores, base, 1) == (0,)
