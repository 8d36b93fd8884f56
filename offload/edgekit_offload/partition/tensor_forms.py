"""Finds the tensors that contain the values of another tensor, possibly moved, converted or scaled.

The search follows operators from a tensor to their outputs. It stops at operators that sum several values,
such as convolutions. Their outputs may still reveal the tensor.
"""

from collections.abc import Iterable
from typing import Final

import onnx

# Operators whose outputs hold unchanged values of a data input: all values, some, or values beside others.
_MOVES: Final = frozenset(
    """
    Identity Dropout Transpose Reshape Flatten Squeeze Unsqueeze Expand Tile Slice Split Gather Pad
    Concat SpaceToDepth DepthToSpace
    """.split()
)
_RECODES: Final = frozenset(
    "Cast CastLike QuantizeLinear DequantizeLinear DynamicQuantizeLinear Clip Round Floor Ceil".split()
)
_ARITHMETIC: Final = frozenset(  # with constants
    {"Add", "Sub", "Mul", "Div", "Neg", "Min", "Max", "BatchNormalization"}
)
_SHAPES: Final = frozenset({"Shape", "Size"})  # their outputs depend on no values


def find_forms(graph: onnx.GraphProto, tensors: Iterable[str]) -> frozenset[str]:
    """Return the given tensors, and all others that contain the same values in another form.

    The nodes of `graph` must be in topological order.
    """
    constants = {tensor.name for tensor in graph.initializer}
    forms = set(tensors)
    for node in graph.node:
        read = {tensor for tensor in node.input if tensor and tensor not in constants}
        if not read or node.op_type in _SHAPES:
            constants |= set(node.output) - forms
        elif _holds_values(node, read, forms):
            forms |= {tensor for tensor in node.output if tensor}
    return frozenset(forms)


def _holds_values(node: onnx.NodeProto, read: set[str], forms: set[str]) -> bool:
    """Return whether a node makes another form of one of these tensors.

    `read`: the tensors that it reads; constants are not among them.
    """
    if node.op_type == "Concat":
        return bool(read & forms)
    if node.op_type in _MOVES or node.op_type in _RECODES:
        return node.input[0] in forms
    return node.op_type in _ARITHMETIC and len(read) == 1 and read <= forms
