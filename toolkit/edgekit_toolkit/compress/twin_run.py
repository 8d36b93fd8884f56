"""Runs a float model and its compressed copy layer by layer on the same samples.

This makes it possible to compress each layer for its actual inputs, and no node runs twice. Between two
layers, only the nodes that the next layer needs are run. Tensors that are no longer needed are freed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgekit_runtime.errors import BackendError
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.index import reads
from edgekit_toolkit.onnx_graph.layers import Layer, find_layers
from edgekit_toolkit.samples.generated import Feeds

Tensors = dict[str, NDArray[Any]]
Quantize = Callable[[str, NDArray[Any]], NDArray[Any]]


class TwinRun:
    """A float run and a compressed run of one graph, which differ in the weights of the layers.

    Args:
        model: The float model.
        layers: The layers of the float model, in order.
        samples: The inputs of both runs, with one dict for each inference.
        threads: The number of threads of one inference.
        compressed: The model of the compressed run, with the same nodes in the same order as `model`. None if
            both runs use `model`.
        is_single: Whether to run only the float model and to use its values as those of the compressed run.
            `compressed` and `quantize` are then ignored.
        quantize: Takes the name and the values of a layer's input. Returns the values for the compressed run.

    Attributes:
        weights: A dict from the name of an initializer to its values in the compressed run, if they differ.
            The caller adds entries.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        layers: Sequence[Layer],
        samples: Sequence[Feeds],
        *,
        threads: int,
        compressed: onnx.ModelProto | None = None,
        is_single: bool = False,
        quantize: Quantize = lambda _name, values: values,
    ) -> None:
        self._quantize = quantize
        self._nodes, self._layers, self._threads = model.graph.node, layers, threads
        self._floats = _Run(model, samples)
        self._compressed = self._floats if is_single else _Run(compressed or model, samples)
        self.weights = self._compressed.weights

    def __iter__(self) -> Iterator[tuple[Layer, list[NDArray[Any]], list[NDArray[Any]]]]:
        """Yield each layer with its inputs in the float and the compressed run, one array a sample."""
        waiting: Sequence[int] = range(len(self._nodes))
        for layer in self._layers:
            segment, waiting = self._split_for(waiting, layer.input)
            self._run(segment, waiting)
            if self._compressed is not self._floats:
                self._compressed.change(layer.input, self._quantize)
            yield layer, self._floats.values(layer.input), self._compressed.values(layer.input)

    def _split_for(self, positions: Sequence[int], tensor: str) -> tuple[list[int], list[int]]:
        """Return the nodes that a tensor waits for, and the others, both in order."""
        needed, segment, others = {tensor}, [], []
        for position in reversed(positions):
            node = self._nodes[position]
            if needed.isdisjoint(node.output):
                others.append(position)
            else:
                segment.append(position)
                needed.update(reads(node))
        return segment[::-1], others[::-1]

    def _run(self, segment: Sequence[int], waiting: Sequence[int]) -> None:
        produced = {name for position in segment for name in self._nodes[position].output if name}
        needed_later = {name for position in waiting for name in reads(self._nodes[position])}
        outputs = sorted(produced & needed_later)
        if segment and outputs:
            session = self._floats.open(segment, outputs, threads=self._threads)
            self._floats.run(session, outputs)
            if self._compressed.model is not self._floats.model:
                session = self._compressed.open(segment, outputs, threads=self._threads)
            if self._compressed is not self._floats:
                self._compressed.run(session, outputs)
        self._floats.forget(needed_later)
        self._compressed.forget(needed_later)


class _Run:
    """One run of a model on samples."""

    def __init__(self, model: onnx.ModelProto, samples: Sequence[Feeds]) -> None:
        self.model = model
        self.weights: Tensors = {}
        self._samples: list[Tensors] = [dict(feeds) for feeds in samples]
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._parameters = {
            name for layer in find_layers(model) for name in (layer.weight, layer.bias) if name
        }

    def values(self, name: str) -> list[NDArray[Any]]:
        return [tensors[name] for tensors in self._samples]

    def change(self, name: str, change: Quantize) -> None:
        for tensors in self._samples:
            tensors[name] = change(name, tensors[name])

    def run(self, session: ort.InferenceSession, outputs: Sequence[str]) -> None:
        inputs = [value.name for value in session.get_inputs()]
        parameters = {name: self._parameter(name) for name in inputs if name in self._parameters}
        for tensors in self._samples:
            feeds = {name: tensors[name] for name in inputs if name not in parameters} | parameters
            tensors.update(zip(outputs, run_session(session, feeds, outputs), strict=True))

    def forget(self, needed: set[str]) -> None:
        """Drop all tensors but those needed later."""
        for tensors in self._samples:
            for name in tensors.keys() - needed:
                del tensors[name]

    def open(self, segment: Sequence[int], outputs: Sequence[str], *, threads: int) -> ort.InferenceSession:
        """Open a model of some nodes; weights of layers are inputs, as they change."""
        source, nodes = self.model, [self.model.graph.node[position] for position in segment]
        model = onnx.ModelProto(
            ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions
        )
        graph = model.graph
        graph.name = "segment"
        graph.node.extend(nodes)
        # Graphs inside nodes have names of their own, which do not exist out here.
        exist = self._constants.keys() | self._samples[0].keys()
        for name in sorted({name for node in nodes for name in reads(node)} & exist):
            if name in self._constants and name not in self._parameters:
                graph.initializer.append(self._constants[name])
                continue
            value = self._samples[0].get(name)
            if not isinstance(value, np.ndarray | None):
                raise BackendError(f"'{name}' is a sequence, which cannot be passed from layer to layer")
            kind = (
                self._constants[name].data_type
                if value is None
                else helper.np_dtype_to_tensor_dtype(value.dtype)
            )
            graph.input.append(helper.make_tensor_value_info(name, kind, None))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return session_for(model, threads=threads)

    def _parameter(self, name: str) -> NDArray[Any]:
        return self.weights[name] if name in self.weights else numpy_helper.to_array(self._constants[name])
