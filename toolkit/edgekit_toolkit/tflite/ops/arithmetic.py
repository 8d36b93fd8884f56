"""Arithmetic with broadcasting."""

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import elementwise
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step


@writes("Add", "Sub", "Mul", "Div", rule=elementwise, fuses=True)
def write_arithmetic(step: Step) -> None:
    """Write ADD, SUB, MUL or DIV."""
    kind = step.node.op_type.upper()
    _check(step, kind)
    step.give(step.binary(kind, step.read(0), step.read(1), step.node.activation))


@writes("Sum", "Mean", "Max", "Min", rule=elementwise)
def write_variadic(step: Step) -> None:
    """Write ADD, MAXIMUM or MINIMUM for each input after the first. For a Mean, a MUL divides the sum."""
    kind = {"Sum": "ADD", "Mean": "ADD", "Max": "MAXIMUM", "Min": "MINIMUM"}[step.node.op_type]
    _check(step, kind)
    result = step.read(0)
    for index in range(1, len(step.node.inputs)):
        result = _extreme(step, kind, result, step.read(index))
    if step.node.op_type == "Mean" and len(step.node.inputs) > 1:
        result = step.binary("MUL", result, step.number(1 / len(step.node.inputs)))
    step.give(step.builder.copy(result, result.shape) if len(step.node.inputs) == 1 else result)


@writes("Pow", rule=elementwise)
def write_pow(step: Step) -> None:
    """Write POW. For the exponents -1, 0.5, 1, 2 and 3, simpler operators such as MUL are written."""
    exponent = step.value(1)
    tensor = step.read(0)
    if tensor.dtype == np.int32 and step.dtype(1) == np.int32:
        step.give(step.emit("POW", [tensor, step.read(1)], step.held(), Options("PowOptions")))
        return
    step.require("float32")
    power = float(exponent.reshape(())) if exponent is not None and exponent.size == 1 else None
    if tensor.shape == step.held() and power in {1.0, 2.0, 3.0, 0.5, -1.0}:
        step.give(_known_power(step, tensor, power or 0.0))
        return
    if exponent is not None:
        right = step.builder.reshape(step.read(1), step.read(1).shape)
        if right.dtype != np.float32 and right.data is not None:
            right = step.builder.constant(right.data.astype(np.float32))
    else:
        right = step.read(1)
    if right.dtype != np.float32:
        right = step.emit("CAST", [right], right.shape, Options("CastOptions"), dtype=np.dtype(np.float32))
    step.give(step.emit("POW", [tensor, right], step.held(), Options("PowOptions")))


def _known_power(step: Step, tensor: Tensor, power: float) -> Tensor:
    if power == 0.5:
        return step.unary("SQRT", tensor)
    if power == -1:
        return step.binary("DIV", step.number(1), tensor)
    if power == 1:
        return step.builder.copy(tensor, tensor.shape)
    square = step.binary("MUL", tensor, tensor)
    return square if power == 2 else step.binary("MUL", square, tensor)


@writes("Mod", rule=elementwise)
def write_mod(step: Step) -> None:
    """Write FLOOR_MOD. The result has the sign of the divisor, like ONNX's Mod without `fmod`."""
    _check(step, "FLOOR_MOD")
    if step.attribute("fmod", 0):
        raise RefusedError("fmod=1 takes the sign of the dividend, and TFLite has only the divisor's")
    step.give(step.emit("FLOOR_MOD", [step.read(0), step.read(1)], step.held(), Options("FloorModOptions")))


def _extreme(step: Step, kind: str, first: Tensor, right: Tensor) -> Tensor:
    if kind == "ADD":
        return step.binary(kind, first, right)
    shape = np.broadcast_shapes(first.shape, right.shape)
    return step.emit(kind, [first, right], shape, Options("MaximumMinimumOptions"))


def _check(step: Step, kind: str) -> None:
    """Check that the kernel takes the element type.

    Raises:
        RefusedError: it does not.
    """
    step.require("float32", "int32", *(() if kind == "DIV" else ("int64",)))
