"""Activation functions that need several operators or have options."""

import math

import numpy as np

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import axis_last, elementwise
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step


@writes("Clip", rule=elementwise)
def write_clip(step: Step) -> None:
    """Write MAXIMUM and MINIMUM, or a ReLU operator if it has the same limits as the Clip."""
    limits = clip_limits(step)
    tensor = step.read(0)
    if limits is not None and tensor.dtype == np.float32 and limits in CLIPS:
        step.give(step.unary(CLIPS[limits], tensor))
        return
    for position, kind in ((1, "MAXIMUM"), (2, "MINIMUM")):
        if step.has(position):
            options = Options("MaximumMinimumOptions")
            tensor = step.emit(kind, [tensor, step.read(position)], step.held(), options)
    step.give(tensor if tensor is not step.read(0) else step.builder.copy(tensor, tensor.shape))


# Limits for which TFLite has an activation.
CLIPS = {(0.0, 6.0): "RELU6", (0.0, math.inf): "RELU", (-1.0, 1.0): "RELU_N1_TO_1"}


def clip_limits(step: Step) -> tuple[float, float] | None:
    """Return the limits of a Clip, or None if a limit is not constant. Missing limits are infinite."""
    bounds = []
    for position, default in ((1, -math.inf), (2, math.inf)):
        value = step.value(position)
        if step.has(position) and value is None:
            return None
        bounds.append(default if value is None else float(value.reshape(())))
    high = math.inf if bounds[1] >= np.finfo(np.float32).max else bounds[1]
    return bounds[0], high


@writes("LeakyRelu", rule=elementwise)
def write_leaky_relu(step: Step) -> None:
    options = Options("LeakyReluOptions", {"alpha": step.attribute("alpha", 0.01)})
    step.give(step.unary("LEAKY_RELU", _float_input(step), options))


@writes("PRelu", rule=elementwise)
def write_prelu(step: Step) -> None:
    """Write PRELU, or LEAKY_RELU for a single constant slope."""
    slopes = step.value(1)
    if slopes is not None and slopes.size == 1:
        options = Options("LeakyReluOptions", {"alpha": float(slopes.reshape(()))})
        step.give(step.unary("LEAKY_RELU", _float_input(step), options))
        return
    step.give(step.emit("PRELU", [_float_input(step), step.read(1)], step.held()))


@writes("HardSigmoid", rule=elementwise)
def write_hard_sigmoid(step: Step) -> None:
    """Write relu6(6 * alpha * x + 6 * beta) / 6. The product with x is omitted if alpha is 1/6."""
    slope = 6 * step.attribute("alpha", 0.2)
    tensor = _float_input(step)
    if not math.isclose(slope, 1, rel_tol=1e-6):
        tensor = step.binary("MUL", tensor, step.number(slope))
    tensor = step.binary("ADD", tensor, step.number(6 * step.attribute("beta", 0.5)), "RELU6")
    step.give(step.binary("MUL", tensor, step.number(1 / 6)))


@writes("Gelu", rule=elementwise)
def write_gelu(step: Step) -> None:
    options = Options("GeluOptions", {"approximate": step.attribute("approximate", "none") == "tanh"})
    step.give(step.unary("GELU", _float_input(step), options))


@writes("Erf", rule=elementwise)
def write_erf(step: Step) -> None:
    """Write a rational approximation, because TFLite has no error function.

    The formula is sign(x) * (1 - (a1 t + ... + a5 t^5) exp(-x^2)) with t = 1 / (1 + p |x|). Its error is at
    most 1.5e-7.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    tensor = _float_input(step)
    size = step.unary("ABS", tensor)
    line = step.binary("ADD", step.binary("MUL", size, step.number(0.3275911)), step.number(1))
    t = step.binary("DIV", step.number(1), line)
    sum_ = step.number(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        sum_ = step.binary("ADD", step.binary("MUL", sum_, t), step.number(factor))
    bell = step.unary("EXP", step.unary("NEG", step.binary("MUL", tensor, tensor)))
    tail = step.binary("MUL", step.binary("MUL", sum_, t), bell)
    step.give(step.binary("MUL", step.unary("SIGN", tensor), step.binary("SUB", step.number(1), tail)))


def _float_input(step: Step) -> Tensor:
    step.require("float32")
    return step.read(0)


@writes("Softmax", rule=axis_last(-1))
def write_softmax(step: Step) -> None:
    step.give(step.emit("SOFTMAX", [step.read(0)], step.held(), Options("SoftmaxOptions", {"beta": 1.0})))


@writes("LogSoftmax", rule=axis_last(-1))
def write_log_softmax(step: Step) -> None:
    step.give(step.emit("LOG_SOFTMAX", [step.read(0)], step.held(), Options("LogSoftmaxOptions")))
