"""A model as a graph of kernels, which are the steps that an engine runs after fusion.

The graph contains only names. The costs of kernels and tensors depend on machines and links, and are in
`costs`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import CutError


@dataclass(frozen=True, slots=True)
class Kernel:
    """A step of the engine.

    Attributes:
        name: The name, unique in the graph.
        reads: The tensors that the kernel reads, without weights.
        writes: The tensors that the kernel writes.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class KernelGraph:
    """Kernels in an order in which they can run.

    Attributes:
        kernels: The kernels. They read only inputs and tensors from earlier kernels.
        inputs: The tensors that the application passes in on the device.
        outputs: The tensors that the application needs on the device.

    Raises:
        CutError: A tensor is read before it is written, is written twice or never, or a name is not unique.
    """

    kernels: tuple[Kernel, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        if len({kernel.name for kernel in self.kernels}) != len(self.kernels):
            raise CutError("graph of kernels: two kernels have the same name")
        written = set(self.inputs)
        for kernel in self.kernels:
            for tensor in kernel.reads:
                if tensor not in written:
                    raise CutError(f"kernel {kernel.name!r} reads {tensor!r}, which nothing before it writes")
            for tensor in kernel.writes:
                if tensor in written:
                    raise CutError(f"kernel {kernel.name!r} writes {tensor!r}, which is there already")
                written.add(tensor)
        for tensor in self.outputs:
            if tensor not in written:
                raise CutError(f"output {tensor!r} is never written")

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The inputs and the tensors that kernels write, in order of creation."""
        return (*self.inputs, *(tensor for kernel in self.kernels for tensor in kernel.writes))

    @cached_property
    def producer(self) -> dict[str, int]:
        """A dict from a tensor to the index of the kernel that writes it. Inputs have no entry."""
        return {tensor: number for number, kernel in enumerate(self.kernels) for tensor in kernel.writes}

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """A dict from a tensor to the sorted indices of the kernels that read it, possibly empty."""
        readers: dict[str, list[int]] = {tensor: [] for tensor in self.tensors}
        for number, kernel in enumerate(self.kernels):
            for tensor in dict.fromkeys(kernel.reads):
                readers[tensor].append(number)
        return {tensor: tuple(numbers) for tensor, numbers in readers.items()}

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each kernel, the sorted indices of the kernels that write the tensors it reads."""
        return tuple(
            tuple(sorted({self.producer[tensor] for tensor in kernel.reads if tensor in self.producer}))
            for kernel in self.kernels
        )

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """Whether kernel j depends on kernel i, directly or indirectly, bool [j, i]. The diagonal is True."""
        needed = np.eye(len(self.kernels), dtype=np.bool_)
        for number, before in enumerate(self.predecessors):
            needed[number] |= needed[list(before)].any(axis=0)
        return needed

    @cached_property
    def edges(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The edges of the graph: the indices of the writing kernels, and those of the reading kernels."""
        pairs = [
            (predecessor, number) for number, before in enumerate(self.predecessors) for predecessor in before
        ]
        earlier, later = np.array(pairs, np.intp).reshape(-1, 2).T
        return earlier, later

    @cached_property
    def made(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The pairs of a tensor and the kernel that writes it, as indices in `tensors` and `kernels`."""
        pairs = [
            (row, self.producer[tensor]) for row, tensor in enumerate(self.tensors) if tensor in self.producer
        ]
        tensors, kernels = np.array(pairs, np.intp).reshape(-1, 2).T
        return tensors, kernels

    @cached_property
    def read(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """The tensors that are read, as three arrays.

        The first array has the indices in `tensors`. The second has the indices of the reading kernels,
        grouped by tensor. The third has the start of each group in the second array.
        """
        rows = [row for row, tensor in enumerate(self.tensors) if self.consumers[tensor]]
        readers = [self.consumers[self.tensors[row]] for row in rows]
        starts = np.cumsum([0, *map(len, readers)])[:-1]
        flat = np.array([number for numbers in readers for number in numbers], np.intp)
        return np.array(rows, np.intp), flat, starts.astype(np.intp)

    @cached_property
    def returned(self) -> NDArray[np.intp]:
        rows = [
            row
            for row, tensor in enumerate(self.tensors)
            if tensor in self.outputs and tensor in self.producer
        ]
        return np.array(rows, np.intp)

    def placements(self, tiers: int, at_most: int) -> NDArray[np.int8] | None:
        """Return all placements in which data flows forward only, or None if there are more than `at_most`.

        Returns:
            The tier of each kernel, int8 [placements, kernels], where 0 is the device.
        """
        rows = np.zeros((1, 0), np.int8)
        for before in self.predecessors:
            first = rows[:, list(before)].max(axis=1, initial=0)
            parts = [np.insert(rows[first <= tier], rows.shape[1], tier, axis=1) for tier in range(tiers)]
            rows = np.concatenate(parts)
            if len(rows) > at_most:
                return None
        return rows
