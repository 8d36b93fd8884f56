"""A model as a graph of kernels: what an engine runs after fusion, and the tensors between them.

It holds names only. Costs of kernels and tensors are in `costs`, since they vary with machines and links.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import CutError


@dataclass(frozen=True, slots=True)
class Kernel:
    """One step of the engine.

    Attributes:
        name: unique in the graph.
        reads: tensors that the kernel needs, without weights.
        writes: tensors that it makes.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class KernelGraph:
    """Kernels in an order in which they can run.

    Attributes:
        kernels: each reads only inputs and tensors that earlier kernels wrote.
        inputs: tensors that the application gives; they are on the device.
        outputs: tensors that the application wants on the device.

    Raises:
        CutError: a tensor is read before it is written, written twice or never, or a name is not unique.
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
        """Inputs and written tensors, in the order of their creation."""
        return (*self.inputs, *(tensor for kernel in self.kernels for tensor in kernel.writes))

    @cached_property
    def producer(self) -> dict[str, int]:
        """Tensor -> number of the kernel that writes it; inputs have no entry."""
        return {tensor: number for number, kernel in enumerate(self.kernels) for tensor in kernel.writes}

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Tensor -> numbers of the kernels that read it, rising; empty for a tensor that none reads."""
        readers: dict[str, list[int]] = {tensor: [] for tensor in self.tensors}
        for number, kernel in enumerate(self.kernels):
            for tensor in dict.fromkeys(kernel.reads):
                readers[tensor].append(number)
        return {tensor: tuple(numbers) for tensor, numbers in readers.items()}

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each kernel, the numbers of the kernels whose tensors it reads itself, rising."""
        return tuple(
            tuple(sorted({self.producer[tensor] for tensor in kernel.reads if tensor in self.producer}))
            for kernel in self.kernels
        )

    @cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """Whether kernel j depends on kernel i, also through others, or is i itself: bool [j, i]."""
        needed = np.eye(len(self.kernels), dtype=np.bool_)
        for number, before in enumerate(self.predecessors):
            needed[number] |= needed[list(before)].any(axis=0)
        return needed

    @cached_property
    def edges(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Pairs (kernel, later kernel that reads its tensors), as two arrays of kernel numbers."""
        pairs = [
            (predecessor, number) for number, before in enumerate(self.predecessors) for predecessor in before
        ]
        earlier, later = np.array(pairs, np.intp).reshape(-1, 2).T
        return earlier, later

    @cached_property
    def made(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Pairs (written tensor, its kernel), as two arrays: indices in `tensors`, and kernel numbers."""
        pairs = [
            (row, self.producer[tensor]) for row, tensor in enumerate(self.tensors) if tensor in self.producer
        ]
        tensors, kernels = np.array(pairs, np.intp).reshape(-1, 2).T
        return tensors, kernels

    @cached_property
    def read(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Tensors with readers, as three arrays.

        Indices in `tensors`; the readers, tensor by tensor; where the readers of each tensor start.
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
        """Return every placement in which data flows forward only; None if there are more than `at_most`.

        The count stops early: if the first kernels alone have more than `at_most` placements, the whole graph
        has at least as many.

        Returns:
            int8 [placements, kernels], the tier of each kernel; 0 is the device.
        """
        rows = np.zeros((1, 0), np.int8)
        for before in self.predecessors:
            first = rows[:, list(before)].max(axis=1, initial=0)
            parts = [np.insert(rows[first <= tier], rows.shape[1], tier, axis=1) for tier in range(tiers)]
            rows = np.concatenate(parts)
            if len(rows) > at_most:
                return None
        return rows
