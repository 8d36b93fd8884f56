"""LSTM, GRU and simple recurrent layers, unrolled step by step.

TFLite's own recurrent operators keep their state between runs. In ONNX, the state starts at zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.builder import Options, Tensor
from edgekit_toolkit.tflite.layout.rules import as_onnx
from edgekit_toolkit.tflite.ops.linear import fully_connected
from edgekit_toolkit.tflite.refusal import RefusedError
from edgekit_toolkit.tflite.registry import writes
from edgekit_toolkit.tflite.step import Step

# Each step is about ten operators in each direction. Longer sequences make files slow to load and run.
MAX_STEPS = 512

_DEFAULTS = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


@dataclass(frozen=True, slots=True)
class _Direction:
    """The weights of one direction: [G * H, I], [G * H, H], [G * H], [G * H]."""

    inner: NDArray[np.float32]
    recurrent: NDArray[np.float32]
    bias: NDArray[np.float32]
    recurrent_bias: NDArray[np.float32]
    backwards: bool


@writes("LSTM", "GRU", "RNN", rule=as_onnx)
def write_recurrent(step: Step) -> None:
    """Write the operators for all steps and directions.

    The input is X [T, B, I]. The outputs are Y [T, D, B, H], Y_h [D, B, H] and Y_c [D, B, H], with T steps,
    batch size B, I inputs, D directions and H hidden values.
    """
    _check(step)
    directions = _directions(step)
    runs = [_run(step, direction, index) for index, direction in enumerate(directions)]
    batch, hidden = step.shape(0)[1], directions[0].recurrent.shape[1]
    names = [*step.node.outputs, "", ""]
    if names[0]:
        rows: list[Tensor] = []
        for moment in range(step.shape(0)[0]):
            rows.extend(states[moment] for states, _ in runs)
        step.give(step.builder.reshape(_joined(step, rows, batch, hidden), step.out_shape(0)), 0)
    lasts = [
        states[0 if direction.backwards else -1]
        for (states, _), direction in zip(runs, directions, strict=True)
    ]
    for output_number, tensors in ((1, lasts), (2, [cell for _, cell in runs if cell is not None])):
        if names[output_number]:
            joined = _joined(step, tensors, batch, hidden)
            step.give(step.builder.reshape(joined, step.out_shape(output_number)), output_number)


def _check(step: Step) -> None:
    kind, steps = step.node.op_type, step.shape(0)[0]
    lengths = step.value(4)
    stated = step.attribute("activations")
    usual = [name.lower() for name in _DEFAULTS[kind]]
    faults = {
        f"{steps} steps are more than the {MAX_STEPS} that are written out": steps > MAX_STEPS,
        "layout=1 is not covered": step.attribute("layout", 0) != 0,
        "clip is not covered": step.attribute("clip") is not None,
        "input_forget=1 is not covered": step.attribute("input_forget", 0) != 0,
        "peepholes are not covered": step.has(7),
        "sequence_lens shorter than the sequence are not covered": step.has(4)
        and (lengths is None or bool((lengths != steps).any())),
        f"activations other than {usual} are not covered": stated is not None
        and [_text(name) for name in stated] != usual * (len(stated) // len(usual)),
    }
    present = [fault for fault, holds in faults.items() if holds]
    if present:
        raise RefusedError("; ".join(present))


def _text(name: bytes | str) -> str:
    return (name.decode() if isinstance(name, bytes) else name).lower()


def _directions(step: Step) -> list[_Direction]:
    inner, recurrent = step.constant(1, "the weights W"), step.constant(2, "the weights R")
    bias = (
        step.constant(3, "the bias B")
        if step.has(3)
        else np.zeros((len(inner), 2 * inner.shape[1]), np.float32)
    )
    half = inner.shape[1]
    stated = step.attribute("direction", "forward")
    return [
        _Direction(inner[index], recurrent[index], bias[index, :half], bias[index, half:], backwards)
        for index, backwards in enumerate({"forward": [False], "reverse": [True]}.get(stated, [False, True]))
    ]


def _run(step: Step, direction: _Direction, number: int) -> tuple[list[Tensor], Tensor | None]:
    """Write one direction; returns the states [B, H] by moment, and the last cell of an LSTM."""
    steps, batch, _ = step.shape(0)
    kind, hidden = step.node.op_type, direction.recurrent.shape[1]
    # The reset gate of a GRU also scales the recurrent bias.
    bias = direction.bias if kind == "GRU" else direction.bias + direction.recurrent_bias
    flat = step.builder.reshape(step.read(0), (steps * batch, step.shape(0)[2]))
    inputs = _split(step, fully_connected(step, flat, direction.inner, bias), steps, axis=0)
    state = _initial(step, 5, number, (batch, hidden))
    cell = _initial(step, 6, number, (batch, hidden)) if kind == "LSTM" else None
    states: dict[int, Tensor] = {}
    for moment in reversed(range(steps)) if direction.backwards else range(steps):
        if cell is not None:
            state, cell = _lstm(step, direction, inputs[moment], state, cell)
        elif kind == "GRU":
            state = _gru(step, direction, inputs[moment], state)
        else:
            state = step.unary("TANH", _sum(step, inputs[moment], state, direction.recurrent))
        states[moment] = state
    return [states[moment] for moment in range(steps)], cell


def _lstm(
    step: Step, direction: _Direction, inputs: Tensor, state: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """Source: ONNX operators, LSTM; gates lie in the order input, output, forget, cell."""
    gates = _split(step, _sum(step, inputs, state, direction.recurrent), 4, axis=1)
    into, out, forget = (step.unary("LOGISTIC", gate) for gate in gates[:3])
    fresh = step.binary("MUL", into, step.unary("TANH", gates[3]))
    cell = step.binary("ADD", step.binary("MUL", forget, cell), fresh)
    return step.binary("MUL", out, step.unary("TANH", cell)), cell


def _gru(step: Step, direction: _Direction, inputs: Tensor, state: Tensor) -> Tensor:
    """Source: ONNX operators, GRU; gates lie in the order update, reset, hidden."""
    hidden = state.shape[1]
    from_input = _split(step, inputs, 3, axis=1)
    weights, bias = direction.recurrent, direction.recurrent_bias
    if step.attribute("linear_before_reset", 0):
        from_state = _split(step, fully_connected(step, state, weights, bias), 3, axis=1)
        update, reset = (
            step.unary("LOGISTIC", step.binary("ADD", a, b))
            for a, b in zip(from_input[:2], from_state[:2], strict=True)
        )
        inner = step.binary("MUL", reset, from_state[2])
    else:
        both = fully_connected(step, state, weights[: 2 * hidden], bias[: 2 * hidden])
        update, reset = (
            step.unary("LOGISTIC", step.binary("ADD", a, b))
            for a, b in zip(from_input[:2], _split(step, both, 2, axis=1), strict=True)
        )
        reset_state = step.binary("MUL", reset, state)
        inner = fully_connected(step, reset_state, weights[2 * hidden :], bias[2 * hidden :])
    fresh = step.unary("TANH", step.binary("ADD", from_input[2], inner))
    # (1 - z) * fresh + z * state
    return step.binary("ADD", fresh, step.binary("MUL", update, step.binary("SUB", state, fresh)))


def _sum(step: Step, inputs: Tensor, state: Tensor, weights: NDArray[np.float32]) -> Tensor:
    return step.binary("ADD", inputs, fully_connected(step, state, weights, None))


def _split(step: Step, tensor: Tensor, parts: int, axis: int) -> tuple[Tensor, ...]:
    if parts == 1:
        return (tensor,)
    shape = [size // parts if index == axis else size for index, size in enumerate(tensor.shape)]
    options = Options("SplitOptions", {"numSplits": parts})
    return step.builder.operator(
        "SPLIT", [step.numbers([axis]), tensor], [(shape, tensor.dtype)] * parts, options
    )


def _initial(step: Step, input_number: int, direction: int, shape: tuple[int, int]) -> Tensor:
    """Return the state before the first step, [B, H]."""
    if not step.has(input_number):
        return step.builder.constant(np.zeros(shape, np.float32))
    value = step.value(input_number)
    if value is not None:
        return step.builder.constant(value[direction])
    tensor, count = step.read(input_number), step.shape(input_number)[0]
    return step.builder.reshape(_split(step, tensor, count, axis=0)[direction], shape)


def _joined(step: Step, tensors: Sequence[Tensor], batch: int, hidden: int) -> Tensor:
    if len(tensors) == 1:
        return step.builder.copy(tensors[0], (1, batch, hidden))
    options = Options("ConcatenationOptions", {"axis": 0})
    return step.emit("CONCATENATION", tensors, (len(tensors) * batch, hidden), options)
