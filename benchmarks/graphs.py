"""Builds ONNX graphs with weights of the right size."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Shapes = Mapping[str, Sequence[int | str] | None]


class GraphBuilder:
    """Nodes of a graph and its constants, one after another."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._draws = np.random.default_rng(seed)

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        output = output or f"{op.lower()}{len(self.nodes)}.out"
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def weight(self, value: NDArray[Any]) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def random(self, *shape: int) -> str:
        """Add weights that keep the variance of what they are applied to, for ReLU."""
        deviation = np.sqrt(2 / np.prod(shape[1:]))
        return self.weight((self._draws.standard_normal(shape) * deviation).astype(np.float32))

    def causal(self, x: str, shape: tuple[int, int, int], *, stride: int = 1, dilation: int = 1) -> str:
        """Add a causal convolution with ReLU; `shape` is [outputs, inputs, taps]."""
        pads = [(shape[2] - 1) * dilation, 0]
        y = self.add("Conv", [x, self.random(*shape)], strides=[stride], dilations=[dilation], pads=pads)
        return self.add("Relu", [y])

    def model(self, inputs: Shapes, outputs: Shapes) -> onnx.ModelProto:
        """Return the model with these float32 inputs and outputs; an output has the name of its tensor."""
        given, made = (
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
            for side in (inputs, outputs)
        )
        graph = helper.make_graph(self.nodes, "graph", given, made, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
