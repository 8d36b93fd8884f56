"""Random graphs of kernels with random costs: chains with branches, several inputs and outputs, pins."""

import random

import numpy as np

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import Kernel, KernelGraph


def random_graph(rng: random.Random, kernels: int) -> KernelGraph:
    """Return a graph in which most kernels read what was written shortly before."""
    inputs = ("input", "other") if rng.random() < 0.2 else ("input",)
    tensors = list(inputs)
    made = []
    for number in range(kernels):
        reads = tuple(sorted({rng.choice(tensors[-4:]) for _ in range(rng.choice([1, 1, 2, 3]))}))
        writes = tuple(f"t{number}_{part}" for part in range(rng.choice([1, 1, 1, 2])))
        made.append(Kernel(f"k{number}", reads, writes))
        tensors += writes
    outputs = dict.fromkeys([tensors[-1], *([rng.choice(tensors)] if rng.random() < 0.3 else [])])
    return KernelGraph(tuple(made), inputs, tuple(outputs))


def random_costs(rng: random.Random, graph: KernelGraph, tiers: int) -> Costs:
    """Return costs under which all on the device, all on the server and splits each are best at times."""
    kernels, tensors, links = len(graph.kernels), len(graph.tensors), tiers - 1
    compute = np.array(
        [
            [rng.expovariate(1) * (1 if tier == 0 else 0.3 / tier) for tier in range(tiers)]
            for _ in range(kernels)
        ]
    )
    upload = np.array([[rng.expovariate(0.7) for _ in range(links)] for _ in range(tensors)])
    download = 0.3 * upload
    if rng.random() < 0.3:  # a tensor that must not cross the first link
        upload[rng.randrange(tensors), 0] = np.inf
    if rng.random() < 0.3:  # a kernel that a tier other than the device cannot run
        compute[rng.randrange(kernels), rng.randrange(1, tiers)] = np.inf
    return Costs(compute, upload, download, np.array([rng.expovariate(2) for _ in range(links)]))
