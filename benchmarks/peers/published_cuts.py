"""Published ways to split a model between device and server, over the same graph and costs as ours.

Neurosurgeon cuts a model's order of layers once. DADS takes a minimum cut of the graph: as printed, without
edges from consumers back to producers, and corrected.

Source: Kang et al., "Neurosurgeon", ASPLOS 2017, algorithm 1; Hu et al., "Dynamic adaptive DNN surgery",
INFOCOM 2019, algorithm 1.
"""

import highspy
import numpy as np

from edgekit_offload.cuts.costs import Costs
from edgekit_offload.cuts.kernel_graph import KernelGraph

Placement = np.ndarray[tuple[int], np.dtype[np.int8]]


def place_linearly(graph: KernelGraph, costs: Costs) -> Placement:
    """Return the tier of each kernel in the best cut of their order: the first ones on the device.

    More than Neurosurgeon did: its cost is exact also where several tensors cross.
    """
    count = len(graph.kernels)
    placements = (np.arange(count) >= np.arange(count + 1)[:, None]).astype(np.int8)
    best: Placement = placements[int(costs.of(graph, placements).argmin())]
    return best


def cut_linearly(graph: KernelGraph, costs: Costs) -> float:
    """Return the cost of the best cut of the order of kernels."""
    return float(costs.of(graph, place_linearly(graph, costs)[np.newaxis]).min())


def cut_by_dads(graph: KernelGraph, costs: Costs, *, is_corrected: bool) -> tuple[float, bool]:
    """Return the cost of the minimum cut, and whether it can run; see `place_by_dads`."""
    tiers = place_by_dads(graph, costs, is_corrected=is_corrected)
    cost = float(costs.of(graph, tiers[np.newaxis]).min())
    return cost, bool(np.isfinite(cost))


def place_by_dads(graph: KernelGraph, costs: Costs, *, is_corrected: bool) -> Placement:
    """Return the tier of each kernel in the minimum cut, which cannot run where its cost is infinite.

    DADS knows no set-up cost and no way back. Corrected, a download counts for the server's kernel, and the
    cut with the set-up cost is compared with everything on the device.

    Args:
        graph: the kernels.
        costs: of two tiers.
        is_corrected: whether data may flow forward only.
    """
    server = costs.compute[:, 1].copy()
    if is_corrected:
        for row, tensor in enumerate(graph.tensors):
            if tensor in graph.outputs and tensor in graph.producer:
                server[graph.producer[tensor]] += costs.download[row, 0]
    tiers = _minimum_cut(graph, costs.compute[:, 0], server, costs.upload[:, 0], is_closed=is_corrected)
    candidates = np.array([tiers, np.zeros_like(tiers)] if is_corrected else [tiers], np.int8)
    best: Placement = candidates[int(costs.of(graph, candidates).argmin())]
    return best


def _minimum_cut(
    graph: KernelGraph,
    device: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    server: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    upload: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    *,
    is_closed: bool,
) -> "np.ndarray[tuple[int], np.dtype[np.int8]]":
    """Return the tier of each kernel, as a linear program whose optimum is a minimum cut."""
    count, tensors = len(graph.kernels), len(graph.tensors)
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    finite_device, finite_server = np.isfinite(device), np.isfinite(server)
    for number in range(count):  # 1: on the device
        weight = np.where(finite_device, device, 0)[number] - np.where(finite_server, server, 0)[number]
        low, high = (0.0 if finite_server[number] else 1.0), (1.0 if finite_device[number] else 0.0)
        solver.addVar(low, high)
        solver.changeColCost(number, float(weight))
    for row in range(tensors):  # 1: sent
        solver.addVar(0.0, 1.0 if np.isfinite(upload[row]) else 0.0)
        solver.changeColCost(count + row, float(upload[row]) if np.isfinite(upload[row]) else 0.0)
    for row, tensor in enumerate(graph.tensors):
        for consumer in graph.consumers[tensor]:
            if tensor in graph.producer:
                producer = graph.producer[tensor]
                columns, values = [producer, consumer, count + row], [1.0, -1.0, -1.0]
                solver.addRow(-highspy.kHighsInf, 0.0, 3, np.array(columns, np.int32), np.array(values))
                if is_closed:
                    pair = np.array([consumer, producer], np.int32)
                    solver.addRow(-highspy.kHighsInf, 0.0, 2, pair, np.array([1.0, -1.0]))
            else:
                columns = np.array([consumer, count + row], np.int32)
                solver.addRow(1.0, highspy.kHighsInf, 2, columns, np.array([1.0, 1.0]))
    solver.run()
    values = np.array(solver.getSolution().col_value)[:count]
    return (np.rint(values) < 1).astype(np.int8)
