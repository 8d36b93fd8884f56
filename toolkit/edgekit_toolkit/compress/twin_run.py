"""Runs a float model and its compressed copy layer by layer on the same samples.

So each layer is compressed for the inputs that it really gets, and no node runs twice: between two layers
only the nodes run that the next layer waits for, and tensors that nobody reads any more are dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from edgekit_toolkit.compress.layers import Layer
from edgekit_toolkit.models.ort_session import run_session, session_for
from edgekit_toolkit.onnx_graph.index import reads
from edgekit_toolkit.samples.generated import Feeds

Tensors = dict[str, NDArray[Any]]
Quantize = Callable[[str, NDArray[Any]], NDArray[Any]]


class TwinRun:
    """Two runs of one graph that differ in the weights of its layers.

    Args:
        model: float model.
        layers: its layers, in order.
        samples: inputs.
        threads: threads of one inference.
        quantize: returns the values that a layer's input has in the compressed run.

    Attributes:
        weights: initializers of layers that differ in the compressed run, by name; the caller adds to it.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        layers: Sequence[Layer],
        samples: Sequence[Feeds],
        *,
        threads: int,
        quantize: Quantize = lambda _name, values: values,
    ) -> None:
        self._model, self._layers, self._threads = model, layers, threads
        self._quantize = quantize
        self._floats: list[Tensors] = [dict(feeds) for feeds in samples]
        self._compressed: list[Tensors] = [dict(feeds) for feeds in samples]
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._parameters = {name for layer in layers for name in (layer.weight, layer.bias) if name}
        self.weights: Tensors = {}

    def __iter__(self) -> Iterator[tuple[Layer, list[NDArray[Any]], list[NDArray[Any]]]]:
        """Yield each layer with its inputs in the float and the compressed run, one array a sample."""
        waiting = list(self._model.graph.node)
        for layer in self._layers:
            segment, waiting = _split_for(waiting, layer.input)
            self._run(segment, waiting)
            for tensors in self._compressed:
                tensors[layer.input] = self._quantize(layer.input, tensors[layer.input])
            yield (
                layer,
                [run[layer.input] for run in self._floats],
                [run[layer.input] for run in self._compressed],
            )

    def _run(self, segment: Sequence[onnx.NodeProto], waiting: Sequence[onnx.NodeProto]) -> None:
        made = {name for node in segment for name in node.output if name}
        needed_later = {name for node in waiting for name in reads(node)}
        outputs = sorted(made & needed_later)
        if segment and outputs:
            exist = (
                self._constants.keys() | self._floats[0].keys()
            )  # graphs inside nodes have names of their own
            read = {name for node in segment for name in reads(node)} & exist
            session = session_for(self._segment_model(segment, read, outputs), threads=self._threads)
            inputs = [value.name for value in session.get_inputs()]
            for run, weights in ((self._floats, {}), (self._compressed, self.weights)):
                for tensors in run:
                    values = {
                        **{name: self._value(name, weights) for name in inputs if name in self._parameters},
                        **{name: tensors[name] for name in inputs if name not in self._parameters},
                    }
                    tensors.update(zip(outputs, run_session(session, values, outputs), strict=True))
        for tensors in (*self._floats, *self._compressed):
            for name in tensors.keys() - needed_later:
                del tensors[name]

    def _value(self, name: str, weights: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        return weights[name] if name in weights else onnx.numpy_helper.to_array(self._constants[name])

    def _segment_model(
        self, segment: Sequence[onnx.NodeProto], read: set[str], outputs: Sequence[str]
    ) -> onnx.ModelProto:
        """Return a model of some nodes; weights of layers are inputs, so that both runs share it."""
        source = self._model
        model = onnx.ModelProto(
            ir_version=source.ir_version, opset_import=source.opset_import, functions=source.functions
        )
        graph = model.graph
        graph.name = "segment"
        graph.node.extend(segment)
        for name in sorted(read):
            if name in self._constants and name not in self._parameters:
                graph.initializer.append(self._constants[name])
                continue
            value = self._floats[0].get(name)
            kind = (
                self._constants[name].data_type
                if value is None
                else helper.np_dtype_to_tensor_dtype(value.dtype)
            )
            graph.input.append(helper.make_tensor_value_info(name, kind, None))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return model


def _split_for(
    nodes: Sequence[onnx.NodeProto], tensor: str
) -> tuple[list[onnx.NodeProto], list[onnx.NodeProto]]:
    """Return the nodes that a tensor waits for, and the others, both in order."""
    wanted, segment, others = {tensor}, [], []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.output):
            others.append(node)
        else:
            segment.append(node)
            wanted.update(reads(node))
    return segment[::-1], others[::-1]
