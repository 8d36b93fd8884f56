"""Finds operators of an ONNX model whose 8-bit products saturate on this machine but not on the target.

All targets accumulate 8-bit products exactly in 32 bits. Arm, TensorRT and x86 with VNNI have instructions
for this. On other x86 processors the runtime sets an option, see `edgekit_runtime.sessions.ort_products`.
That option does not cover some operators of models that were quantized by other tools. LiteRT accumulates in
32 bits on every processor.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.onnx_graph.ort_options import WHOLE_OPTIMISER, disabled_optimizers
from edgekit_toolkit.onnx_graph.traversal import computes_in_integers, graphs

# A dict from operators that multiply codes themselves to the indices of the two factors. The setting covers
# all kernels that the engine makes from the QDQ form. ConvInteger is exact everywhere.
_PRODUCTS: Final = {"MatMulInteger": (0, 1), "QLinearMatMul": (0, 3), "QLinearConv": (0, 3)}
_LARGEST_SAFE: Final = 64  # two products 255 * 64 stay below 2 ** 15


def find_saturating(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the first output of each node whose 8-bit products saturate here but not on the target.

    Args:
        model: The model. If it uses integer arithmetic, it must record the types of its tensors.
    """
    if not computes_in_integers(model) or not saturates():
        return ()
    # The setting acts only where the engine optimises.
    saturating, refused = [], disabled_optimizers(model) == WHOLE_OPTIMISER
    for graph in graphs(model.graph):
        stored = {tensor.name: tensor for tensor in graph.initializer}
        types = _types(graph)
        for node in graph.node:
            if node.op_type not in _PRODUCTS:
                continue
            first, right = (node.input[position] for position in _PRODUCTS[node.op_type])
            weight = stored.get(right)
            if types.get(right) != TensorProto.INT8 or (weight is not None and _is_safe(weight)):
                continue
            if types.get(first) == TensorProto.INT8:
                # Exact as such, but the engine refuses the setting for the whole model.
                refused = refused or node.op_type == "QLinearConv"
            else:
                saturating.append((node.output[0], weight is None))
    return tuple(name for name, is_computed in saturating if is_computed or refused)


def _types(graph: onnx.GraphProto) -> Mapping[str, int]:
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    return types


def _is_safe(weight: TensorProto) -> bool:
    values: NDArray[Any] = numpy_helper.to_array(weight)
    return bool(np.abs(values.astype(np.int16)).max(initial=0) <= _LARGEST_SAFE)
