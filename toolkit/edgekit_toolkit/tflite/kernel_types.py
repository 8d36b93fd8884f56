"""Adds casts for element types that TFLite cannot compute with.

float64 and float16 are computed in float32. A Cast to float16 in the model still rounds to float16. Integers
are computed in a wider type and cast back, so that they wrap as in ONNX. LiteRT's CAST supports all these
types.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit_toolkit.onnx_graph.index import attribute, copy_model, copy_node
from edgekit_toolkit.tflite.refusal import REFUSED
from edgekit_toolkit.tflite.view import Graph, graph_of

_FLOATS: Final = {"float64": "float32", "float16": "float32"}
WIDER: Final[Mapping[str, str]] = {
    **_FLOATS,
    **dict.fromkeys(("int8", "uint8", "int16", "uint16"), "int32"),
    "uint32": "int64",
}
# Types that only CAST reads and writes.
CAST_ONLY: Final = frozenset({"float64", "float16", "uint16", "uint32"})
# Operators that do not compute: 8 and 16 bits pass through them.
_MOVING: Final = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Reshape", "Slice"}
    | {"SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"}
)
_CASTS: Final = frozenset({"BitCast", "Cast", "CastLike"})


def widen(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes only in element types that TFLite supports.

    Casts are added around nodes. The types of the model's inputs and outputs do not change. The shapes of all
    values must be known. If no cast is needed, `model` itself is returned.
    """
    graph = graph_of(model)
    if not any(dtype.name in WIDER for dtype in graph.dtypes.values()):
        return model
    result = copy_model(model)
    del result.graph.node[:]
    writer = _Widening(graph, result.graph)
    for node in model.graph.node:
        writer.add(node)
    del result.graph.value_info[:]
    return result


class _Widening:
    def __init__(self, graph: Graph, result: onnx.GraphProto) -> None:
        self._graph, self._result = graph, result
        self._wide: dict[str, str] = {}

    def add(self, node: onnx.NodeProto) -> None:
        added = copy_node(node)
        if node.op_type in _CASTS or node.domain or attribute(node, REFUSED):
            self._result.node.append(added)
            return
        dtypes = {name: self._graph.dtypes[name] for name in node.input if name in self._graph.dtypes}
        for position, name in enumerate(node.input):
            if name in dtypes and self._is_odd(node, dtypes[name]):
                added.input[position] = self._widened(name, dtypes[name])
        narrowed = {}
        for position, name in enumerate(node.output):
            dtype = self._graph.dtypes.get(name)
            if dtype is not None and self._is_odd(node, dtype):
                added.output[position] = f"{name};wide"
                narrowed[name] = dtype
                if dtype.name in _FLOATS:
                    self._wide[name] = f"{name};wide"
        self._result.node.append(added)
        for name, dtype in narrowed.items():
            self._cast(f"{name};wide", name, dtype)

    def _is_odd(self, node: onnx.NodeProto, dtype: "np.dtype[Any]") -> bool:
        return dtype.name in WIDER and (dtype.name in CAST_ONLY or node.op_type not in _MOVING)

    def _widened(self, name: str, dtype: "np.dtype[Any]") -> str:
        """Return the tensor that holds a value in its wider type; it is made once."""
        if name not in self._wide:
            self._wide[name] = f"{name};widened"
            wider = np.dtype(WIDER[dtype.name])
            if self._graph.is_constant(name):
                array = self._graph.constants[name].astype(wider)
                self._result.initializer.append(numpy_helper.from_array(array, self._wide[name]))
            else:
                self._cast(name, self._wide[name], wider)
        return self._wide[name]

    def _cast(self, source: str, target: str, dtype: "np.dtype[Any]") -> None:
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self._result.node.append(helper.make_node("Cast", [source], [target], to=code))
