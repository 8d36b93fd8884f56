"""Estimates the peak memory of an onnxruntime session before it runs on a device.

The estimate is the higher of two peaks. While a model is loaded, the engine has at least two copies of the
weights. While it runs, the engine has one copy and the activations. The estimate assumes the settings of
`edgekit_runtime.sessions.ort_memory`, one session in the process and one inference at a time.
docs/explanation/memory.md describes the method and its error on real models.

Other engines, models with external data, and other work of the process are not modelled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from edgekit_toolkit.costs.activation_plan import activation_memory
from edgekit_toolkit.onnx_graph.ort_graph import BLOCKED_DOMAIN, EngineGraph, optimise_as_engine
from edgekit_toolkit.onnx_graph.traversal import graphs, stored_tensors

# What a session keeps beside weights and activations: graph, kernel and plan structures. A linear fit over
# the models of docs/explanation/memory.md (growth of anonymous memory on loading, less the weights; residual
# 0.8 MiB).
_BYTES_PER_SESSION: Final = 340 * 1024
_BYTES_PER_NODE: Final = 3_700
_BYTES_PER_INITIALIZER: Final = 3_200
# Pages of the engine's own code that a run of real kernels maps in: the growth of file-backed memory, 0.7 to
# 1.7 MiB over the same models.
_CODE_BYTES: Final = 1024 * 1024
# The weights of convolutions are reordered into blocks one by one: each is read, reordered, wrapped as a
# tensor and copied once more, while all plain weights of the graph stay until the last one is done.
_COPIES_TO_BLOCK: Final = 4
_PACKED_BESIDE_ORIGINAL: Final = frozenset({"QGemm"})  # keeps its plain weights too, for their shape


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The parts of the peak resident memory of a process, in bytes.

    Attributes:
        engine_bytes: The interpreter and the engine without a model, as stated by the caller.
        weights_bytes: The constants as the engine stores them.
        structure_bytes: The graph, kernels and plans of the session.
        code_bytes: The code of the engine that is loaded only when a model first runs.
        feeds_bytes: The inputs of one inference.
        activations_bytes: The intermediate tensors, scratch and outputs. A lower bound if sizes depend on the
            data.
        loading_bytes: The maximum size of the weights and their copies while the model is loaded.
    """

    engine_bytes: int
    weights_bytes: int
    structure_bytes: int
    code_bytes: int
    feeds_bytes: int
    activations_bytes: int
    loading_bytes: int

    @property
    def load_peak_bytes(self) -> int:
        """The peak while loading, including the engine."""
        return self.engine_bytes + self.structure_bytes + self.loading_bytes

    @property
    def run_peak_bytes(self) -> int:
        """The peak while running, including the engine."""
        return (
            self.engine_bytes
            + self.structure_bytes
            + self.code_bytes
            + self.weights_bytes
            + self.feeds_bytes
            + self.activations_bytes
        )

    @property
    def total_bytes(self) -> int:
        """The higher of the two peaks."""
        return max(self.load_peak_bytes, self.run_peak_bytes)

    @property
    def run_bytes_per_input_byte(self) -> float:
        """The size of inputs, activations and outputs of one inference, divided by the size of its inputs."""
        return 1.0 + self.activations_bytes / max(self.feeds_bytes, 1)

    @property
    def model_bytes(self) -> int:
        """The memory that the model adds to the engine."""
        return self.total_bytes - self.engine_bytes


def estimate_peak_memory(
    model: onnx.ModelProto,
    *,
    engine_bytes: int,
    dims: Mapping[str, int] | None = None,
    threads: int = 1,
    blocked_layout: bool = True,
) -> MemoryEstimate:
    """Estimate the peak memory of a process that loads `model` from a file and runs it.

    Args:
        model: An ONNX model without external data.
        engine_bytes: The peak memory of the engine without a model, from `measure_engine_bytes` or the
            target.
        dims: A dict from the name of a free dimension to its size. A free leading dimension defaults to 1.
        threads: The number of threads of one inference, at least 1.
        blocked_layout: False for devices with an Arm CPU, see `optimise_as_engine`.

    Raises:
        ModelError: onnxruntime refused the model.
        DataError: A free dimension has no size.
    """
    graph = optimise_as_engine(model, dims, blocked_layout=blocked_layout)
    return MemoryEstimate(
        engine_bytes=engine_bytes,
        weights_bytes=_kept_weights_bytes(graph),
        structure_bytes=_structure_bytes(model),
        code_bytes=_CODE_BYTES,
        feeds_bytes=sum(graph.tensors[name].size_bytes for name in graph.inputs),
        activations_bytes=activation_memory(graph, threads),
        loading_bytes=_loading_bytes(model, graph),
    )


def _structure_bytes(model: onnx.ModelProto) -> int:
    return _BYTES_PER_SESSION + sum(
        _BYTES_PER_NODE * len(graph.node) + _BYTES_PER_INITIALIZER * len(graph.initializer)
        for graph in graphs(model.graph)
    )


def _kept_weights_bytes(graph: EngineGraph) -> int:
    beside = {
        name
        for node in graph.nodes
        if node.op_type in _PACKED_BESIDE_ORIGINAL
        for name in node.input
        if name in graph.weights
    }
    outer = sum(tensor.size_bytes * (1 + (name in beside)) for name, tensor in graph.weights.items())
    return outer + graph.nested_bytes


def _loading_bytes(model: onnx.ModelProto, graph: EngineGraph) -> int:
    """Return the most bytes of weights at once: on reading, on reordering or on packing."""
    stored: list[int] = [tensor.ByteSize() for _, tensor in stored_tensors(model)]
    reading = sum(stored) + max(stored, default=0)  # tensor after tensor moves out of the parsed file
    constant_bytes = sum(tensor.size_bytes for tensor in graph.weights.values()) + graph.nested_bytes
    largest = max((tensor.size_bytes for tensor in graph.weights.values()), default=0)
    packing = _kept_weights_bytes(graph) + largest  # a kernel packs a weight, then the plain one goes
    blocked = dict.fromkeys(  # a weight that several nodes read is reordered once
        node.input[1] for node in graph.nodes if node.domain == BLOCKED_DOMAIN and node.op_type == "Conv"
    )
    reordering = done = 0
    for name in blocked:
        size = graph.weights[name].size_bytes
        reordering = max(reordering, constant_bytes + done + _COPIES_TO_BLOCK * size)
        done += size
    return max(reading, reordering, packing)
