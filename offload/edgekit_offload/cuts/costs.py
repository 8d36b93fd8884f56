"""The costs of placing kernels on tiers. They all have the same unit, seconds or joules."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edgekit_offload.cuts.kernel_graph import KernelGraph
from edgekit_runtime.errors import CutError

_AT_ONCE: Final = 4096  # placements whose costs are added up together, which bounds memory


@dataclass(frozen=True)
class Costs:
    """The costs of a graph on two or more tiers, such as device and server. Links connect adjacent tiers.

    A tensor is sent at most once over a link, even if several kernels behind the link read it. Data flows
    forward only. A kernel reads tensors from its own tier or from a tier nearer to the device.

    Attributes:
        compute: The cost of each kernel on each tier, float64 [kernels, tiers], at least 0. It is infinite if
            the kernel cannot run there.
        upload: The cost of encoding, sending and decoding each tensor, float64 [tensors, links], at least 0.
            It is infinite if a tensor must not be sent.
        download: The cost of sending an output back to the device over each link, float64 [tensors, links].
        setup: The fixed cost of using each link, such as a round trip, float64 [links].
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
        """Return the costs of placements, float64 [placements].

        The cost is infinite if a placement is not allowed or data flows backward. `placements` has the tier
        of each kernel, int8 [placements, kernels], where 0 is the device.
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
