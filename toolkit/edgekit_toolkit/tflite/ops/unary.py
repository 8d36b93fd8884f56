"""Functions of one tensor that are no activations: roots, exponentials, rounding, signs, casts."""

from typing import Final

import numpy as np

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.kernel_types import CAST_ONLY
from edgekit_toolkit.tflite.layout.rules import Rule, as_onnx, elementwise
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node

# ONNX operator -> TFLite operator and its table of options, for float32.
_FUNCTIONS: Final = {
    "Abs": ("ABS", "AbsOptions"),
    "Ceil": ("CEIL", None),
    "Cos": ("COS", "CosOptions"),
    "Exp": ("EXP", "ExpOptions"),
    "Floor": ("FLOOR", None),
    "Log": ("LOG", None),
    "Neg": ("NEG", "NegOptions"),
    "Round": ("ROUND", None),
    "Sign": ("SIGN", None),
    "Sin": ("SIN", None),
    "Sqrt": ("SQRT", None),
}
_INTEGERS: Final = {"Neg": {"int32", "int64"}, "Abs": {"int32"}}


@writes(*_FUNCTIONS, rule=elementwise)
def write_function(step: Step) -> None:
    """Write the TFLite operator with the same meaning."""
    step.require("float32", *_INTEGERS.get(step.node.op_type, ()))
    kind, table = _FUNCTIONS[step.node.op_type]
    step.give(step.emit(kind, [step.read(0)], step.held(), Options(table) if table else None))


@writes("Not", rule=elementwise)
def write_not(step: Step) -> None:
    step.give(step.emit("LOGICAL_NOT", [step.read(0)], step.held(), Options("LogicalNotOptions")))


@writes("Atan", rule=elementwise)
def write_atan(step: Step) -> None:
    """Write ATAN2 of x and 1."""
    step.require("float32")
    step.give(
        step.emit(
            "ATAN2", [step.read(0), step.builder.constant(np.ones(step.held(), np.float32))], step.held()
        )
    )


@writes("BitwiseXor", rule=elementwise)
def write_xor(step: Step) -> None:
    step.give(
        step.emit("BITWISE_XOR", [step.read(0), step.read(1)], step.held(), Options("BitwiseXorOptions"))
    )


@writes("BitCast", rule=as_onnx)
def write_bit_cast(step: Step) -> None:
    """Write BITCAST, which reads the bytes of a tensor as another type of the same size."""
    step.give(
        step.emit("BITCAST", [step.read(0)], step.held(), Options("BitcastOptions"), dtype=step.out_dtype())
    )


def _cast_rule(node: Node, graph: Graph) -> Rule:
    """Return the rule of a Cast: types that only CAST takes cannot be transposed."""
    names = (node.inputs[0], node.outputs[0])
    is_plain = any(graph.dtype(name).name in CAST_ONLY for name in names)
    return as_onnx(node, graph) if is_plain else elementwise(node, graph)


@writes("Cast", "CastLike", rule=_cast_rule)
def write_cast(step: Step) -> None:
    """Write CAST to the element type of the output; for booleans NOT_EQUAL with 0."""
    source, target = step.dtype(0), step.out_dtype()
    tensor = step.read(0)
    if target == np.bool_:
        inputs = [tensor, step.number(0, source)]
        step.give(step.emit("NOT_EQUAL", inputs, step.held(), Options("NotEqualOptions"), dtype=target))
        return
    step.give(step.emit("CAST", [tensor], step.held(), Options("CastOptions"), dtype=target))
