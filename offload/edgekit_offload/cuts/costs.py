"""Costs of placing kernels on tiers, all in one unit, seconds or joules, so that they can be added up."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_runtime.errors import CutError

_AT_ONCE: Final = 4096  # placements whose costs are added up together, which bounds memory


@dataclass(frozen=True)
class Costs:
    """Costs of a graph on two tiers (device, server) or more, one link between neighbours.

    A tensor is sent over a link at most once, however many kernels read it behind the link. Data flows
    forward only: a kernel reads tensors made on its own tier or on one nearer to the device.

    Attributes:
        compute: float64 [kernels, tiers], 0 or more; infinity if a kernel cannot run.
        upload: float64 [tensors, links], 0 or more: cost of encoding, sending and decoding a tensor; infinity
            if a tensor must not cross.
        download: float64 [tensors, links]: cost of sending an output made behind the link back to the device.
        setup: float64 [links]: cost paid once if anything runs behind the link, such as a round trip.
    """

    compute: NDArray[np.float64]
    upload: NDArray[np.float64]
    download: NDArray[np.float64]
    setup: NDArray[np.float64]

    def __post_init__(self) -> None:
        tiers = self.tiers
        links = tiers - 1
        if tiers < 2 or self.setup.shape != (links,):
            raise CutError(f"costs: {tiers} tiers need {links} set-up costs, got shape {self.setup.shape}")
        if self.upload.shape != self.download.shape or self.upload.shape[1:] != (links,):
            raise CutError(f"costs: transfers need one column for each of {links} links")
        for name in ("compute", "upload", "download", "setup"):
            if not (getattr(self, name) >= 0).all():
                raise CutError(f"costs: {name} holds a negative number or NaN")
        if not np.isfinite(self.download).all() or not np.isfinite(self.setup).all():
            raise CutError("costs: download and setup must be finite")

    @property
    def tiers(self) -> int:
        return int(self.compute.shape[1])

    def of(self, graph: KernelGraph, placements: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the cost of each placement; infinity if it is forbidden or data flows backward.

        `placements`: int8 [placements, kernels], the tier of each kernel; 0 is the device.

        Returns:
            float64 [placements].
        """
        if len(placements) > _AT_ONCE:
            blocks = np.array_split(placements, len(placements) // _AT_ONCE + 1)
            return np.concatenate([self.of(graph, block) for block in blocks])
        earlier, later = graph.edges
        backward = (placements[:, earlier] > placements[:, later]).any(axis=1)
        total: NDArray[np.float64] = self.compute[np.arange(placements.shape[1]), placements].sum(axis=1)
        written, returned = graph.made, graph.returned
        for link in range(self.tiers - 1):
            far = placements > link
            made_far = np.zeros((len(far), len(graph.tensors)), np.bool_)
            made_far[:, written[0]] = far[:, written[1]]
            read_far = np.zeros_like(made_far)
            read, readers, starts = graph.read
            if len(read):
                read_far[:, read] = np.logical_or.reduceat(far[:, readers], starts, axis=1)
            total += np.where(far.any(axis=1), self.setup[link], 0.0)
            total += np.where(read_far & ~made_far, self.upload[:, link], 0.0).sum(axis=1)
            total += made_far[:, returned] @ self.download[returned, link]
        total[backward] = np.inf
        return total
