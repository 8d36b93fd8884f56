"""The cheapest placement is that of an exhaustive search, whatever the graph, the tiers and the limits."""

import itertools
import random

import numpy as np
import pytest
from tests.offload.random_graphs import random_costs, random_graph

from edgekit_offload.cuts import solver
from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import Kernel, KernelGraph
from edgekit_offload.cuts.solver import Cuts, Limit, Placement
from edgekit_runtime.errors import CutError

RELATIVE = 1e-9  # costs are sums of at most some dozen numbers in float64


def chain(count: int) -> KernelGraph:
    kernels = tuple(Kernel(f"k{n}", (f"t{n}",), (f"t{n + 1}",)) for n in range(count))
    return KernelGraph(kernels, ("t0",), (f"t{count}",))


def two_tiers(
    device: list[float], server: list[float], upload: list[float], setup: float = 0.0, download: float = 0.0
) -> Costs:
    back = np.full((len(upload), 1), download)
    return Costs(np.array([device, server]).T, np.array([upload]).T, back, np.array([setup]))


@pytest.mark.parametrize("tiers", [2, 3])
def test_cheapest_is_that_of_an_exhaustive_search(tiers: int) -> None:
    rng = random.Random(tiers)
    used: set[tuple[int, ...]] = set()
    for _ in range(300):
        graph = random_graph(rng, rng.randrange(1, 9))
        costs = random_costs(rng, graph, tiers)
        cuts = Cuts(graph, tiers, compares_up_to=0)
        found = cuts.cheapest(costs)
        best = cuts.confirm(found, [costs])
        assert best.proof == "enumerated"
        assert found.cost == pytest.approx(best.cost, rel=RELATIVE)
        assert (found.gap, found.proof) == (0.0, "dual")
        compared = Cuts(graph, tiers).cheapest(costs)  # a graph so small needs no solver
        assert (compared.cost, compared.gap, compared.proof) == (best.cost, 0.0, "enumerated")
        used.add(tuple(sorted(set(found.tiers))))
    assert len(used) >= tiers + 1  # all local, all remote and splits came up


def test_costs_that_change_start_from_the_last_solution() -> None:
    rng = random.Random(3)
    graph = random_graph(rng, 9)
    costs = random_costs(rng, graph, 2)
    cuts = Cuts(graph, compares_up_to=0)
    for factor in (1.0, 0.1, 10.0, 0.0, 3.0):
        scaled = Costs(costs.compute, costs.upload * factor if factor else np.zeros_like(costs.upload),
                       costs.download * factor, costs.setup)  # fmt: skip
        assert cuts.cheapest(scaled).cost == pytest.approx(
            Cuts(graph, compares_up_to=0).cheapest(scaled).cost, rel=RELATIVE
        )


def test_memory_limit_and_pipeline_are_those_of_an_exhaustive_search() -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(80):
        graph = random_graph(rng, rng.randrange(2, 9))
        costs = random_costs(rng, graph, 2)
        bytes_on_device = np.zeros((len(graph.kernels), 2))
        bytes_on_device[:, 0] = [rng.randrange(1, 100) for _ in graph.kernels]
        free = np.zeros_like(costs.upload)
        limit = Limit(
            Costs(bytes_on_device, free, free, np.zeros(1)), rng.randrange(300), "memory of the device"
        )
        cuts = Cuts(graph, compares_up_to=0)
        every = cuts.confirm(Placement((), np.inf, 0.0, ""), [costs], [limit])
        try:
            found = cuts.cheapest(costs, [limit])
        except CutError as error:
            assert "memory of the device" in str(error)
            assert every.cost == np.inf
            with pytest.raises(CutError, match=r"no placement of the kernels keeps .*memory of the device"):
                Cuts(graph).cheapest(costs, [limit])
            refused += 1
            continue
        assert found.cost == pytest.approx(every.cost, rel=RELATIVE)
        assert Cuts(graph).cheapest(costs, [limit]).tiers == every.tiers

        forbidden = np.where(np.isinf(costs.upload), np.inf, 0.0)
        device, link, server = costs.compute.copy(), np.zeros_like(costs.compute), costs.compute.copy()
        device[:, 1], server[:, 0] = np.where(np.isinf(device[:, 1]), np.inf, 0.0), 0.0
        stages = [
            Costs(device, forbidden, free, np.zeros(1)),
            Costs(link, costs.upload, costs.download, costs.setup),
            Costs(server, forbidden, free, np.zeros(1)),
        ]
        rate = cuts.fastest_pipeline(stages)
        assert rate.cost == pytest.approx(cuts.confirm(rate, stages).cost, rel=1e-6)  # the solver's tolerance
    assert 0 < refused < 40


def test_tensor_with_many_readers_is_sent_once() -> None:
    kernels = (
        Kernel("backbone", ("image",), ("features",)),
        *(Kernel(f"head{n}", ("features",), (f"out{n}",)) for n in range(3)),
    )
    graph = KernelGraph(kernels, ("image",), ("out0", "out1", "out2"))
    costs = two_tiers([1.0, 9.0, 9.0, 9.0], [0.1] * 4, [50.0, 5.0, 1.0, 1.0, 1.0], setup=1.0, download=0.5)
    found = Cuts(graph, compares_up_to=0).cheapest(costs)
    assert found.tiers == (0, 1, 1, 1)
    assert found.cost == pytest.approx(1.0 + 5.0 + 0.3 + 1.0 + 3 * 0.5)


def test_published_construction_places_what_cannot_run() -> None:
    """Without edges from consumers back to producers, the device reads for nothing what the server made."""
    graph = chain(3)
    device, server = [1.0, 5.0, 1.0], [4.0, 0.5, 4.0]
    upload = [10.0, 1.0, 10.0, 0.0]

    def published(near: tuple[bool, ...]) -> float:
        """The objective of algorithm 1: compute, and uploads of tensors that go from device to server."""
        compute = sum(d if on else s for on, d, s in zip(near, device, server, strict=True))
        return compute + sum(upload[n] for n in range(3) if (n == 0 or near[n - 1]) and not near[n])

    best = min(itertools.product([False, True], repeat=3), key=published)
    assert best == (True, False, True)  # the last kernel needs what the second made on the server
    costs = two_tiers(device, server, upload)
    assert costs.of(graph, np.array([[0, 1, 0]], np.int8))[0] == np.inf
    exact = Cuts(graph, compares_up_to=0).cheapest(costs)
    assert exact.cost > published(best)
    assert exact.tiers == (0, 1, 1)


def test_pinned_input_keeps_its_readers_on_the_device() -> None:
    costs = two_tiers([5.0, 5.0], [0.1, 0.1], [np.inf, 1.0, 1.0])
    assert Cuts(chain(2), compares_up_to=0).cheapest(costs).tiers == (0, 1)
    costs = two_tiers([5.0, 5.0], [0.1, 0.1], [np.inf, np.inf, np.inf])
    assert Cuts(chain(2), compares_up_to=0).cheapest(costs).tiers == (0, 0)


def test_limit_that_nothing_keeps_is_told_from_a_search_that_ended_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(4)
    graph = random_graph(rng, 30)
    costs = random_costs(rng, graph, 2)
    none = np.zeros_like(costs.upload)
    count = Costs(np.ones_like(costs.compute), none, none, np.zeros(1))
    with pytest.raises(CutError, match="no placement of the kernels keeps"):
        Cuts(graph, compares_up_to=0).cheapest(costs, [Limit(count, 29, "number of kernels")])
    monkeypatch.setitem(solver._OPTIONS, "time_limit", 0.0)
    with pytest.raises(CutError, match="no proof that there is none: time limit"):
        Cuts(graph, compares_up_to=0).cheapest(costs, [Limit(count, 30, "number of kernels")])


def test_what_can_run_nowhere_is_refused() -> None:
    costs = two_tiers([np.inf, 1.0], [1.0, 1.0], [np.inf, 1.0, 1.0])
    with pytest.raises(CutError, match="must stay"):
        Cuts(chain(2), compares_up_to=0).cheapest(costs)


def test_graph_without_kernels_costs_nothing() -> None:
    graph = KernelGraph((), ("x",), ("x",))
    costs = Costs(np.zeros((0, 2)), np.ones((1, 1)), np.ones((1, 1)), np.ones(1))
    assert Cuts(graph, compares_up_to=0).cheapest(costs).cost == 0.0


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((Kernel("a", ("missing",), ("t",)),), "reads 'missing'"),
        ((Kernel("a", ("x",), ("x",)),), "writes 'x'"),
        ((Kernel("a", ("x",), ("t",)), Kernel("a", ("t",), ("u",))), "same name"),
        ((Kernel("a", ("x",), ("u",)),), "output 't'"),
    ],
)
def test_graph_that_cannot_run_is_refused(kernels: tuple[Kernel, ...], message: str) -> None:
    with pytest.raises(CutError, match=message):
        KernelGraph(kernels, ("x",), ("t",))


def test_costs_that_are_no_costs_are_refused() -> None:
    ones = np.ones((1, 1))
    for wrong in (np.nan, -1.0):
        with pytest.raises(CutError, match="compute holds a negative number or NaN"):
            Costs(np.array([[1.0, wrong]]), ones, ones, np.ones(1))
    with pytest.raises(CutError, match="set-up"):
        Costs(np.ones((1, 3)), ones, ones, np.ones(1))
