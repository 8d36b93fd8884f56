"""Estimate of the peak memory of an onnxruntime session, before it runs on a device.

Two peaks compete: while loading, the engine holds weights two or more times; while running, weights once plus
activations. The estimate follows the settings of `edgekit_runtime.sessions.ort_memory`, with one session in
the process and one inference at a time. docs/explanation/memory.md has the method and its error on real
models.

Not modelled: other engines, models with external data, and a process that does anything else.
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
    """Parts of the peak resident memory of a process, in bytes.

    Attributes:
        engine_bytes: interpreter and bare engine, as the caller of `estimate_peak_memory` states it.
        weights_bytes: constants as the engine keeps them.
        structure_bytes: graph, kernels and plans of the session.
        code_bytes: code of the engine that it loads only when a model first runs.
        feeds_bytes: inputs of one inference.
        activations_bytes: intermediate tensors, scratch and outputs; a lower bound where sizes depend on the
            data.
        loading_bytes: the most that weights and their copies take while the model is loaded.
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
        """Peak while loading, engine included."""
        return self.engine_bytes + self.structure_bytes + self.loading_bytes

    @property
    def run_peak_bytes(self) -> int:
        """Peak while running, engine included."""
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
        """The higher of both peaks."""
        return max(self.load_peak_bytes, self.run_peak_bytes)

    @property
    def run_bytes_per_input_byte(self) -> float:
        """Bytes of inputs, activations and outputs of one inference, over the bytes of its inputs."""
        return 1.0 + self.activations_bytes / max(self.feeds_bytes, 1)

    @property
    def model_bytes(self) -> int:
        """What the model adds to the bare engine."""
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
        model: an ONNX model without external data.
        engine_bytes: peak memory of the bare engine (`measure_engine_bytes`, or the target's figure).
        dims: sizes of the free dimensions by name; a free leading dimension without a size is 1.
        threads: threads of one inference, at least 1.
        blocked_layout: False for devices with an Arm CPU, see `optimise_as_engine`.

    Raises:
        ModelError: onnxruntime refused the model.
        DataError: a free dimension has no size.
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
