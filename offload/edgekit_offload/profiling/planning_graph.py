"""Builds one graph of kernels for the planner, with the costs on every machine.

Different processors and engine releases fuse different nodes. The model can only be cut at a tensor that
exists on all machines. So nodes are merged into one kernel if a tensor between them does not exist on some
machine, or if the merged kernels would depend on each other in a cycle. The costs of links are not included.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from edgekit_offload.cuts.kernel_graph import Kernel, KernelGraph
from edgekit_offload.profiling.fused_graph import has_subgraph, tensor_bytes
from edgekit_offload.profiling.model_profile import WHOLE_MODEL_ONLY, ModelProfile, digest_model
from edgekit_runtime.errors import CutError

_SHAPE_OPS: Final = frozenset({"Shape", "Size"})
_VIEW_OPS: Final = frozenset({"Identity", "DequantizeLinear"})  # another form of their first input


@dataclass(frozen=True)
class PlanningGraph:
    """A model as a graph of kernels, with the time of each kernel on every machine.

    Attributes:
        graph: The kernels and tensors. The tensors have their names in the model.
        seconds: float64 [kernels, machines], the time of each kernel. The machines are in the order of the
            profiles.
        tensor_bytes: The size of every tensor of the graph.
        weight_bytes: int64 [weights], the sizes of the model's weights and constants.
        weight_readers: bool [kernels, weights], whether the kernel reads the weight.
        nodes: The indices of the model's nodes in each kernel. Each node is in one kernel, except constants
            and DequantizeLinear nodes, which are in every kernel that needs them.
    """

    graph: KernelGraph
    seconds: npt.NDArray[np.float64]
    tensor_bytes: Mapping[str, int]
    weight_bytes: npt.NDArray[np.int64]
    weight_readers: npt.NDArray[np.bool_]
    nodes: tuple[tuple[int, ...], ...]


def join_profiles(
    content: bytes, profiles: Sequence[ModelProfile], model: onnx.ModelProto | None = None
) -> PlanningGraph:
    """Join the profiles of all machines into one graph of kernels.

    Args:
        content: The ONNX file.
        profiles: The profiles of all machines, the device first.
        model: The parsed model, if the caller has it.

    Raises:
        CutError: A profile is of another model, or the model cannot be split.
    """
    for profile in profiles:
        check_model(profile, content)
        if profile.obstacle or not profile.kernels:
            why = profile.obstacle or "it has no kernels"
            raise CutError(f"the profile of {profile.measured_on}: {why}; {WHOLE_MODEL_ONLY}")
    model = onnx.load_from_string(content) if model is None else model
    written = [{tensor for kernel in profile.kernels for tensor in kernel.writes} for profile in profiles]
    unsendable = {tensor for profile in profiles for tensor in profile.unsendable}
    dataflow = _Dataflow.of(model, set.intersection(*written) - unsendable)
    groups = dataflow.group()
    graph = dataflow.make_graph(groups)
    sizes: dict[str, int] = {}
    for profile in reversed(profiles):
        sizes |= profile.tensors
    unknown = [tensor for tensor in graph.tensors if tensor not in sizes]
    if unknown:
        raise CutError(f"the profiles do not say how large '{unknown[0]}' is; {WHOLE_MODEL_ONLY}")
    nodes = tuple(
        tuple(sorted({*group, *(repeated for number in group for repeated in dataflow.repeated[number])}))
        for group in groups
    )
    homes = {
        tensor: kernel
        for kernel, group in reversed(list(enumerate(nodes)))
        for number in group
        for tensor in model.graph.node[number].output
    }
    return PlanningGraph(
        graph,
        np.stack([_assign_times(profile, homes, len(groups)) for profile in profiles], axis=1),
        {tensor: sizes[tensor] for tensor in graph.tensors},
        *_find_weights(model, nodes),
        nodes,
    )


def check_model(profile: ModelProfile, content: bytes) -> None:
    """Check that a profile belongs to a model.

    Raises:
        CutError: The profile is of another model.
    """
    digest = digest_model(content)
    if profile.model_sha256 != digest:
        raise CutError(
            f"the profile of {profile.measured_on} is of the model '{profile.model}' with sha256"
            f" {profile.model_sha256[:12]}, expected {digest[:12]}; measure this model there by"
            " `edgekit offload profile`"
        )


@dataclass(frozen=True, kw_only=True)
class _Dataflow:
    """The dependencies between the nodes of a model.

    Constants and views are repeated in every kernel that needs them, so they are not nodes here. A node that
    reads a view depends on the tensors that the view reads.

    Attributes:
        reads: A dict from node to the tensors that it needs, from other nodes or inputs.
        repeated: A dict from node to the constants and views that it needs.
        maker: A dict from tensor to the node that writes it.
        common: The tensors that all machines have.
        inputs, outputs: The inputs and outputs of the model.
    """

    reads: Mapping[int, tuple[str, ...]]
    repeated: Mapping[int, tuple[int, ...]]
    maker: Mapping[str, int]
    common: Collection[str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, model: onnx.ModelProto, common: Collection[str]) -> "_Dataflow":
        """Return the dataflow of a model.

        Raises:
            CutError: The model has control flow.
        """
        nodes = model.graph.node
        if any(has_subgraph(node) for node in nodes):
            raise CutError(f"the model has control flow; {WHOLE_MODEL_ONLY}")
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = tuple(value.name for value in model.graph.input if value.name not in weights)
        outputs = tuple(value.name for value in model.graph.output)
        maker = {tensor: number for number, node in enumerate(nodes) for tensor in node.output if tensor}
        # For each repeated node, what its readers need instead: tensors, and repeated nodes.
        needs: dict[int, tuple[dict[str, None], set[int]]] = {}
        reads, repeated = {}, {}
        for number, node in enumerate(nodes):
            tensors: dict[str, None] = {}
            others: set[int] = set()
            for tensor in node.input:
                if maker.get(tensor) in needs:
                    tensors |= needs[maker[tensor]][0]
                    others |= needs[maker[tensor]][1]
                elif tensor in maker or tensor in inputs:
                    tensors[tensor] = None
            # Shapes depend at most on the batch, see `find_obstacle`, and each side makes them itself.
            is_output = bool(set(node.output) & set(outputs))
            is_constant = not tensors or (node.op_type in _SHAPE_OPS and not is_output)
            is_view = node.op_type in _VIEW_OPS and len(tensors) == 1 and not set(node.output) & set(common)
            if is_constant or (is_view and not is_output):
                needs[number] = ({} if is_constant else tensors, {*others, number})
            else:
                reads[number], repeated[number] = tuple(tensors), tuple(sorted(others))
        maker = {tensor: number for tensor, number in maker.items() if number in reads}
        # The device has constants, also those that are outputs.
        outputs = tuple(tensor for tensor in outputs if tensor in maker or tensor in inputs)
        return cls(reads=reads, repeated=repeated, maker=maker, common=common, inputs=inputs, outputs=outputs)

    def group(self) -> list[list[int]]:
        """Return groups of nodes with only common tensors between them, in an order in which they can run."""
        parents = {number: number for number in self.reads}
        for number, tensors in self.reads.items():
            for tensor in tensors:
                if tensor in self.maker and tensor not in self.common:
                    _unite(parents, self.maker[tensor], number)
        for number in self._find_unused():
            before = [self.maker[tensor] for tensor in self.reads[number] if tensor in self.maker]
            _unite(parents, before[0] if before else next(iter(self.reads)), number)
        while True:
            members: dict[int, list[int]] = defaultdict(list)
            for number in self.reads:
                members[_find(parents, number)].append(number)
            before_of = {
                root: {
                    _find(parents, self.maker[tensor])
                    for number in group
                    for tensor in self.reads[number]
                    if tensor in self.maker
                }
                - {root}
                for root, group in members.items()
            }
            cycles = [cycle for cycle in _find_components(before_of) if len(cycle) > 1]
            if not cycles:
                return [members[root] for root in _sort(before_of)]
            for cycle in cycles:
                for root in cycle[1:]:
                    _unite(parents, cycle[0], root)

    def make_graph(self, groups: Sequence[Sequence[int]]) -> KernelGraph:
        """Return groups of nodes as kernels, named after the first tensor that they write."""
        home = {number: index for index, group in enumerate(groups) for number in group}
        written: list[dict[str, None]] = [{} for _ in groups]
        read: list[dict[str, None]] = [{} for _ in groups]
        for tensor, number in self.maker.items():
            if tensor in self.outputs:
                written[home[number]][tensor] = None
        for number, tensors in self.reads.items():
            for tensor in tensors:
                source = home[self.maker[tensor]] if tensor in self.maker else None
                if source != home[number]:
                    read[home[number]][tensor] = None
                    if source is not None:
                        written[source][tensor] = None
        kernels = tuple(
            Kernel(next(iter(written[index]), f"kernel {index}"), tuple(read[index]), tuple(written[index]))
            for index in range(len(groups))
        )
        return KernelGraph(kernels, self.inputs, self.outputs)

    def _find_unused(self) -> list[int]:
        """Return the nodes that no output needs, which engines remove."""
        used: set[int] = set()
        stack = [self.maker[tensor] for tensor in self.outputs if tensor in self.maker]
        while stack:
            number = stack.pop()
            if number not in used:
                used.add(number)
                stack += [self.maker[tensor] for tensor in self.reads[number] if tensor in self.maker]
        return [number for number in self.reads if number not in used]


def _assign_times(profile: ModelProfile, homes: Mapping[str, int], count: int) -> npt.NDArray[np.float64]:
    """Return the time of each joined kernel on a machine, float64 [kernels].

    A kernel of the machine belongs to the joined kernel that writes its tensor. If the model has no such
    tensor, the kernel only prepares an input of another kernel, and belongs to the same joined kernel.
    """
    seconds = np.zeros(count)
    reader_of: dict[str, int] = {}  # tensor -> the joined kernel of its reader
    last = count - 1
    for kernel in reversed(profile.kernels):
        readers = [homes[tensor] for tensor in kernel.writes if tensor in homes]
        readers += [reader_of[tensor] for tensor in kernel.writes if tensor in reader_of]
        last = readers[0] if readers else last
        seconds[last] += kernel.seconds
        reader_of.update(dict.fromkeys(kernel.reads, last))
    return seconds


def _find_weights(
    model: onnx.ModelProto, nodes: Sequence[Iterable[int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the sizes of weights and constants, and which kernels need them.

    Returns:
        int64 [weights], and bool [kernels, weights].
    """
    sizes = {tensor.name: tensor_bytes(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            sizes[node.output[0]] = sum(
                tensor_bytes(attribute.t) for attribute in node.attribute if attribute.name == "value"
            )
    columns = {name: column for column, name in enumerate(sizes)}
    readers = np.zeros((len(nodes), len(sizes)), np.bool_)
    for row, group in enumerate(nodes):
        members = [model.graph.node[number] for number in group]
        needed = {name for node in members for name in (*node.input, *node.output)}
        readers[row, [columns[name] for name in needed & columns.keys()]] = True
    return np.array([*sizes.values()], np.int64), readers


def _find(parents: dict[int, int], number: int) -> int:
    while parents[number] != number:
        parents[number] = parents[parents[number]]
        number = parents[number]
    return number


def _unite(parents: dict[int, int], number: int, other: int) -> None:
    first, second = sorted((_find(parents, number), _find(parents, other)))
    parents[second] = first


def _find_components(before_of: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Return the strongly connected components of a graph.

    Source: R. E. Tarjan, Depth-first search and linear graph algorithms, SIAM J. Comput. 1 (1972); without
    recursion.
    """
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    path: list[int] = []
    on_path: set[int] = set()
    components = []
    for start in before_of:
        if start in order:
            continue
        stack = [(start, iter(before_of[start]))]
        order[start] = lowest[start] = len(order)
        path.append(start)
        on_path.add(start)
        while stack:
            root, successors = stack[-1]
            for other in successors:
                if other not in order:
                    order[other] = lowest[other] = len(order)
                    path.append(other)
                    on_path.add(other)
                    stack.append((other, iter(before_of[other])))
                    break
                if other in on_path:
                    lowest[root] = min(lowest[root], order[other])
            else:
                stack.pop()
                if stack:
                    lowest[stack[-1][0]] = min(lowest[stack[-1][0]], lowest[root])
                if lowest[root] == order[root]:
                    begin = path.index(root)
                    components.append(path[begin:])
                    on_path -= set(path[begin:])
                    del path[begin:]
    return components


def _sort(before_of: Mapping[int, Collection[int]]) -> list[int]:
    """Return the nodes of an acyclic graph in an order in which they can run, small numbers first."""
    after: dict[int, list[int]] = defaultdict(list)
    missing = {number: len(before) for number, before in before_of.items()}
    for number, before in before_of.items():
        for other in before:
            after[other].append(number)
    ready = sorted(number for number, count in missing.items() if not count)
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for other in after[number]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other)
    return order
