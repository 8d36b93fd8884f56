"""Element-wise operators that have an equal TFLite operator, and casts."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from edgekit_toolkit.tflite.builder import Options
from edgekit_toolkit.tflite.kernel_types import CAST_ONLY
from edgekit_toolkit.tflite.layout.rules import Rule, as_onnx, elementwise
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step
from edgekit_toolkit.tflite.view import Graph, Node


class _Kernel(NamedTuple):
    """A TFLite operator, its table of options, and the types that its first input may have; () for all."""

    kind: str
    options: str | None = None
    dtypes: tuple[str, ...] = ("float32",)


_NUMBERS: Final = ("float32", "int32", "int64")
_KERNELS: Final[Mapping[str, _Kernel]] = {
    "Abs": _Kernel("ABS", "AbsOptions", ("float32", "int32")),
    "And": _Kernel("LOGICAL_AND", "LogicalAndOptions", ()),
    "BitwiseXor": _Kernel("BITWISE_XOR", "BitwiseXorOptions", ()),
    "Ceil": _Kernel("CEIL"),
    "Cos": _Kernel("COS", "CosOptions"),
    "Elu": _Kernel("ELU"),  # with another alpha than 1 it is lowered
    "Equal": _Kernel("EQUAL", "EqualOptions", (*_NUMBERS, "bool")),
    "Exp": _Kernel("EXP", "ExpOptions"),
    "Floor": _Kernel("FLOOR"),
    "Greater": _Kernel("GREATER", "GreaterOptions", _NUMBERS),
    "GreaterOrEqual": _Kernel("GREATER_EQUAL", "GreaterEqualOptions", _NUMBERS),
    "HardSwish": _Kernel("HARD_SWISH"),
    "Less": _Kernel("LESS", "LessOptions", _NUMBERS),
    "LessOrEqual": _Kernel("LESS_EQUAL", "LessEqualOptions", _NUMBERS),
    "Log": _Kernel("LOG"),
    "Neg": _Kernel("NEG", "NegOptions", _NUMBERS),
    "Not": _Kernel("LOGICAL_NOT", "LogicalNotOptions", ()),
    "Or": _Kernel("LOGICAL_OR", "LogicalOrOptions", ()),
    "Relu": _Kernel("RELU"),
    "Round": _Kernel("ROUND"),
    "Sigmoid": _Kernel("LOGISTIC"),
    "Sign": _Kernel("SIGN"),
    "Sin": _Kernel("SIN"),
    "Sqrt": _Kernel("SQRT"),
    "Tanh": _Kernel("TANH"),
    "Where": _Kernel("SELECT_V2", "SelectV2Options", ()),
    "Xor": _Kernel("NOT_EQUAL", "NotEqualOptions", ()),
}


@writes(*_KERNELS, rule=elementwise)
def write_elementwise(step: Step) -> None:
    kernel = _KERNELS[step.node.op_type]
    if kernel.dtypes:
        step.require(*kernel.dtypes)
    inputs = [step.read(number) for number in range(len(step.node.inputs))]
    options = Options(kernel.options) if kernel.options else None
    step.give(step.emit(kernel.kind, inputs, step.held(), options, dtype=step.out_dtype()))


@writes("Atan", rule=elementwise)
def write_atan(step: Step) -> None:
    """Write ATAN2 of x and 1."""
    step.require("float32")
    step.give(
        step.emit(
            "ATAN2", [step.read(0), step.builder.constant(np.ones(step.held(), np.float32))], step.held()
        )
    )


@writes("BitCast", rule=as_onnx)
def write_bit_cast(step: Step) -> None:
    """Write BITCAST, which interprets the bytes of a tensor as another type of the same size."""
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
    """Write CAST, or a comparison with 0 by NOT_EQUAL if the output is boolean."""
    source, target = step.dtype(0), step.out_dtype()
    tensor = step.read(0)
    if target == np.bool_:
        inputs = [tensor, step.number(0, source)]
        step.give(step.emit("NOT_EQUAL", inputs, step.held(), Options("NotEqualOptions"), dtype=target))
        return
    step.give(step.emit("CAST", [tensor], step.held(), Options("CastOptions"), dtype=target))
