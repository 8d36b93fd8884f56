"""Limits on weights and memory with shared weights, against an exhaustive search.

scripts/python -m benchmarks.offload_limits --graphs 110 --seed 12
"""

import random
from dataclasses import replace

import numpy as np
from benchmarks.results import make_parser
from tests.offload.random_graphs import random_graph
from tests.offload.test_planning import costs_of, link, need_of

from edgekit_offload.cuts.solver import Cuts
from edgekit_offload.planning.costs import DeviceLimits, weigh_costs
from edgekit_runtime.errors import CutError

_LEVELS = 4  # limits that are tried on each graph, from tight to loose


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--graphs", type=int, default=110)
    parser.add_argument("--seed", type=int, default=12)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)  # noqa: S311  # no secret
    settings = missed = costlier = worse = 0
    for _ in range(arguments.graphs):
        costs = costs_of(random_graph(rng, rng.randrange(2, 10)), rng)
        readers = np.array([[rng.random() < 0.3 for _ in row] for row in costs.weight_readers])
        costs = replace(costs, weight_readers=readers)
        every = costs.graph.placements(2, 1_000_000)
        assert every is not None
        table = weigh_costs(costs, "raw", link(10 ** rng.uniform(-0.5, 2)))
        seconds = table.of(costs.graph, every)
        needs = np.array([need_of(costs, tiers) for tiers in every])
        cuts = Cuts(costs.graph)
        for kind, name in enumerate(("weights_bytes", "memory_bytes")):
            last = np.inf
            for limit in sorted(rng.sample(list(needs[:, kind]), min(_LEVELS, len(every)))):
                fits = needs[:, kind] <= limit
                settings += 1
                try:
                    cheapest = cuts.cheapest(table, DeviceLimits(**{name: float(limit)}).of(costs))
                except CutError:
                    missed += bool(fits.any())
                    continue
                costlier += abs(cheapest.cost / seconds[fits].min() - 1) > 1e-7
                worse += cheapest.cost > last * (1 + 1e-9)
                last = cheapest.cost
    print(f"{settings} settings: {missed} missed, {costlier} costlier, {worse} worse by a looser limit")


if __name__ == "__main__":
    main()
