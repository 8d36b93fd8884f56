"""Exact cuts beside published ones: random graphs against an exhaustive search, time, and real models.

    scripts/python benchmarks/offload_cuts.py
        [--graphs 10000] [--json FILE] [MODEL.onnx ...]

It takes one to two minutes. Without models it takes those of models/tiny. Kernels of the real models are
measured on this machine; the device is modelled as this machine slowed down, the link as bandwidth and round
trip. DADS as printed has neither a set-up cost nor a way back, so its cuts are dear on short models.
"""

import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.offload.random_graphs import random_costs, random_graph

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_offload.cuts.solver import MAX_ENUMERATED, Cuts
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.planning_graph import PlanningGraph, join_profiles
from peers.published_cuts import cut_by_dads, cut_linearly
from public_models import TINY
from results import make_parser, print_head, write_json

RELATIVE = 1e-9
SLOWDOWNS = (2, 8)  # of the device, against the server
BITS_PER_S = (0.25e6, 1e6, 5e6, 20e6, 100e6)
RTT_S = 0.02
LARGE_KERNELS = 324
LARGER_KERNELS = 16
LARGER_GRAPHS = 500


@dataclass
class Peer:
    """How a method compares with the exhaustive search.

    Attributes:
        settings: graphs with costs that it was tried on.
        equal: how many of its placements cost what the best one costs.
        infeasible: how many cannot run.
        worst: cost of its worst placement that runs, as a multiple of the best one.
    """

    settings: int = 0
    equal: int = 0
    infeasible: int = 0
    worst: float = 1.0

    def add(self, cost: float, best: float) -> None:
        self.settings += 1
        if not np.isfinite(cost):
            self.infeasible += 1
            return
        ratio = cost / best if best > 0 else 1.0
        self.equal += ratio <= 1 + RELATIVE
        self.worst = max(self.worst, ratio)


def search(graph: KernelGraph, costs: Costs) -> float | None:
    """Return the least cost of all placements; None where there are too many."""
    every = graph.placements(costs.tiers, MAX_ENUMERATED)
    return None if every is None else float(costs.of(graph, every).min())


def compare(graph: KernelGraph, costs: Costs, best: float, peers: dict[str, Peer]) -> None:
    peers["edgekit, 2 tiers"].add(Cuts(graph).cheapest(costs).cost, best)
    peers["linear split (Neurosurgeon)"].add(cut_linearly(graph, costs), best)
    peers["DADS as printed"].add(cut_by_dads(graph, costs, is_corrected=False)[0], best)
    peers["DADS corrected"].add(cut_by_dads(graph, costs, is_corrected=True)[0], best)


def new_peers() -> dict[str, Peer]:
    """Return the methods for two tiers, without results."""
    names = ("edgekit, 2 tiers", "linear split (Neurosurgeon)", "DADS as printed", "DADS corrected")
    return {name: Peer() for name in names}


def run_random(count: int) -> dict[str, Peer]:
    """Compare all methods on random graphs of 1 to 8 kernels, and ours also on three tiers."""
    rng = random.Random(12)  # noqa: S311  # repeatable
    peers = {**new_peers(), "edgekit, 3 tiers": Peer()}
    for _ in range(count):
        graph = random_graph(rng, rng.randrange(1, 9))
        costs = random_costs(rng, graph, 2)
        best = search(graph, costs)
        assert best is not None
        compare(graph, costs, best, peers)
        graph = random_graph(rng, rng.randrange(1, 8))
        costs = random_costs(rng, graph, 3)
        best = search(graph, costs)
        assert best is not None
        peers["edgekit, 3 tiers"].add(Cuts(graph, 3).cheapest(costs).cost, best)
    return peers


def infeasible_share(count: int) -> float:
    """Return the share of larger random graphs on which the cut of DADS as printed cannot run."""
    rng, infeasible = random.Random(13), 0  # noqa: S311  # repeatable
    for _ in range(count):
        graph = random_graph(rng, LARGER_KERNELS)
        infeasible += not cut_by_dads(graph, random_costs(rng, graph, 2), is_corrected=False)[1]
    return infeasible / count


def time_large(rounds: int = 40) -> dict[str, float]:
    """Return milliseconds of a cut of a large graph: from its graph, and when only costs changed."""
    rng = random.Random(1)  # noqa: S311  # repeatable
    graph = random_graph(rng, LARGE_KERNELS)
    first, again, cuts = [], [], Cuts(graph)
    for number in range(rounds):
        costs = random_costs(rng, graph, 2)
        started = time.perf_counter()
        fresh = Cuts(graph)
        fresh.cheapest(costs)
        first.append(time.perf_counter() - started)
        started = time.perf_counter()
        cuts.cheapest(costs)
        if number:
            again.append(time.perf_counter() - started)
    return {"first_ms": statistics.median(first) * 1e3, "again_ms": statistics.median(again) * 1e3}


def real_costs(joined: PlanningGraph, slowdown: float, bits_per_s: float) -> Costs:
    """Return seconds of kernels and transfers."""
    sizes = np.array([joined.tensor_bytes[tensor] for tensor in joined.graph.tensors], np.float64)
    transfer = (sizes * 8 / bits_per_s)[:, None]
    server = joined.seconds[:, 0]
    return Costs(np.stack([server * slowdown, server], axis=1), transfer, transfer, np.array([RTT_S]))


def run_real(models: list[Path]) -> tuple[list[dict[str, Any]], dict[str, Peer]]:
    """Compare all methods on real models, at every bandwidth and for every device."""
    rows, peers = [], new_peers()
    for path in models:
        content = path.read_bytes()
        profile = profile_kernels(Machine.parse("local"), RunnableGraph(content), name=path.stem, seconds=2.0)
        joined = join_profiles(content, [profile])
        tried = 0
        for slowdown in SLOWDOWNS:
            for bits_per_s in BITS_PER_S:
                costs = real_costs(joined, slowdown, bits_per_s)
                best = search(joined.graph, costs)
                if best is not None:
                    compare(joined.graph, costs, best, peers)
                    tried += 1
        rows.append({"model": path.stem, "kernels": len(joined.graph.kernels), "settings": tried})
    return rows, peers


def show(title: str, peers: dict[str, Peer]) -> None:
    print()
    print_head(title, "equal to exhaustive search", "cannot run", "worst that runs, x best")
    for name, peer in peers.items():
        share = peer.infeasible / max(peer.settings, 1)
        print(f"| {name} | {peer.equal} of {peer.settings} | {share:.1%} | {peer.worst:.2f} |")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--graphs", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    peers = run_random(options.graphs)
    show("random graphs", peers)
    share = infeasible_share(LARGER_GRAPHS)
    print(f"\nDADS as printed on {LARGER_GRAPHS} graphs of {LARGER_KERNELS} kernels: {share:.1%} cannot run")
    large = time_large()
    print(f"\n{LARGE_KERNELS} kernels: {large['first_ms']:.1f} ms with its construction, "
          f"{large['again_ms']:.1f} ms when only costs changed")  # fmt: skip
    rows, real = run_real(options.models or sorted(TINY.glob("*.onnx")))
    for row in rows:
        reason = "" if row["settings"] else f", more than {MAX_ENUMERATED} placements: not searched"
        print(f"{row['model']}: {row['kernels']} kernels, {row['settings']} settings{reason}")
    show("real models, device modelled", real)
    print(f"\n{time.perf_counter() - started:.0f} s")
    tables = {"random": peers, "real": real}
    plain = {title: {name: asdict(peer) for name, peer in table.items()} for title, table in tables.items()}
    write_json(options.json, {**plain, "dads_infeasible_larger": share, "large": large, "models": rows})


if __name__ == "__main__":
    main()
