"""Finds integer divisions whose divisor may be 0 or -1.

On x86, an integer division by 0, or of the smallest integer by -1, kills the process. The engines do not
check for this. So the runtime runs a model with such a division in a separate process.
"""

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from edgekit_toolkit.onnx_graph.traversal import FLOAT_TYPES, graphs

_ONNX_OPERATORS: Final = frozenset({"Div", "Mod"})
_TFLITE_OPERATORS: Final = frozenset({"DIV", "FLOOR_DIV", "FLOOR_MOD"})


def onnx_divides_by_inputs(model: onnx.ModelProto) -> bool:
    """Return whether the divisor of any integer division may be 0 or -1.

    This is True for any computed divisor. A tensor of unknown type is treated as an integer tensor.
    """
    if any(node.op_type in _ONNX_OPERATORS for function in model.functions for node in function.node):
        return True
    if not any(node.op_type in _ONNX_OPERATORS for graph in graphs(model.graph) for node in graph.node):
        return False
    inferred = onnx.shape_inference.infer_shapes(model)
    # Two branches may use one name for different tensors: all of them must be harmless.
    types: dict[str, set[int]] = {}
    constants: dict[str, list[NDArray[Any]]] = {}
    computed: set[str] = set()
    for graph in graphs(inferred.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            types.setdefault(value.name, set()).add(value.type.tensor_type.elem_type)
        for tensor in graph.initializer:
            types.setdefault(tensor.name, set()).add(tensor.data_type)
            constants.setdefault(tensor.name, []).append(onnx.numpy_helper.to_array(tensor))
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                value = onnx.numpy_helper.to_array(node.attribute[0].t)
                constants.setdefault(node.output[0], []).append(value)
            else:
                computed.update(node.output)

    def is_float(name: str) -> bool:
        return name in types and types[name] <= FLOAT_TYPES.keys()

    return any(
        not is_float(node.output[0])
        and not is_float(node.input[0])
        and not (
            node.input[1] in constants
            and node.input[1] not in computed
            and all(map(_is_harmless, constants[node.input[1]]))
        )
        for graph in graphs(inferred.graph)
        for node in graph.node
        if node.op_type in _ONNX_OPERATORS
    )


def tflite_divides_by_inputs(model: Any) -> bool:
    """Return whether the divisor of any integer division may be 0 or -1.

    This is True for any computed divisor. `model` is a model parsed by `tflite.flatbuffer`.
    """
    from edgekit_toolkit.tflite import flatbuffer  # needs LiteRT, which a host may lack

    for graph, _, operator in flatbuffer.operators(model):
        if flatbuffer.operator_name(model, operator) not in _TFLITE_OPERATORS:
            continue
        divisor = graph.tensors[operator.inputs[1]]
        dtype = flatbuffer.DTYPES.get(divisor.type)
        is_float = dtype is not None and np.dtype(dtype).kind == "f"
        if not is_float and not _is_harmless(flatbuffer.constant(model, divisor)):
            return True
    return False


def _is_harmless(divisor: NDArray[Any] | None) -> bool:
    return divisor is not None and not np.isin(divisor, (0, -1)).any()
