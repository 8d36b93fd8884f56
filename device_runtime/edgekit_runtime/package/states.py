"""States of a model: outputs that are inputs of the next run, such as the memory of a recurrent network.

A state starts as zeros. Each of its free dimensions must also be a dimension of another input, which
determines the size:

    x [batch, 576], h [batch, 2, 128]    if x has 3 rows, h starts as zeros of shape [3, 2, 128]
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from edgekit_runtime.canonical_json import Record
from edgekit_runtime.errors import DataError
from edgekit_runtime.package.golden import Golden
from edgekit_runtime.package.manifest_entries import require
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import DTYPES, Array, TensorSpec

MAX_STATES: Final = 256
_OBJECT_BYTES: Final = 2048  # approximate size of Python's objects around a sequence's states


@dataclass(frozen=True, slots=True)
class RecurrentState(Record):
    """An output whose value becomes an input of the next run."""

    output: str
    input: str

    def __post_init__(self) -> None:
        for side in ("output", "input"):
            name = getattr(self, side)
            require(isinstance(name, str), f"states: {side} is {name!r}, expected the name of a tensor")


def find_states_problem(
    states: Sequence[RecurrentState], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> str | None:
    """Return why a model with these inputs and outputs cannot have these states, or None."""
    by_side = {"input": {spec.name: spec for spec in inputs}, "output": {spec.name: spec for spec in outputs}}
    names = [(side, getattr(state, side)) for state in states for side in by_side]
    for side, name in names:
        if name not in by_side[side]:
            return f"no {side} is named '{name}'; {side}s are {', '.join(by_side[side])}"
        if names.count((side, name)) > 1:
            return f"{side} '{name}' stands twice"
    if len(states) in (len(inputs), len(outputs)):
        side = "input" if len(states) == len(inputs) else "output"
        return f"every {side} is a state; at least one must be none"
    names_of_states = {state.input for state in states}
    sizes = {size for spec in inputs if spec.name not in names_of_states for size in spec.shape}
    for state in states:
        target, source = by_side["input"][state.input], by_side["output"][state.output]
        if (target.dtype, len(target.shape)) != (source.dtype, len(source.shape)) or not all(
            size == other or isinstance(size, str) or isinstance(other, str)
            for size, other in zip(target.shape, source.shape, strict=True)
        ):
            return (
                f"output '{source.name}' is {source.dtype} {list(source.shape)}, but input '{target.name}'"
                f" takes {target.dtype} {list(target.shape)}"
            )
        unknown = [size for size in target.shape if isinstance(size, str) and size not in sizes]
        if unknown:
            return (
                f"input '{target.name}' {list(target.shape)}: no other input tells the size of"
                f" '{unknown[0]}'; fix it, or give it the name of a dimension of another input"
            )
    return None


def count_state_bytes(states: Sequence[RecurrentState], golden: Golden) -> int:
    """Return the estimated size in bytes of the states of one sequence, from the golden input shapes."""
    if not states:
        return 0
    names = {state.input for state in states}
    return _OBJECT_BYTES + sum(
        math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        for tensor in golden.inputs
        if tensor.name in names
    )


class StateInputs:
    """Adds the states to the inputs of a run."""

    __slots__ = ("_plans", "_states")

    def __init__(self, states: Sequence[RecurrentState], inputs: Sequence[TensorSpec]) -> None:
        """Find the inputs that determine the sizes of the states, which `find_states_problem` has checked."""
        self._states = tuple(states)
        named = {state.input for state in states}
        axes: dict[int | str, tuple[str, int]] = {}
        for spec in inputs:
            if spec.name not in named:
                for axis, size in enumerate(spec.shape):
                    axes.setdefault(size, (spec.name, axis))
        self._plans = [
            (
                spec.name,
                DTYPES[spec.dtype],
                [size if isinstance(size, int) else axes[size] for size in spec.shape],
            )
            for spec in inputs
            if spec.name in named
        ]

    def complete(
        self, inputs: Mapping[str, Array], stored: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Return a copy of `inputs` with the missing states added.

        `stored` contains the states from `take`. Without it, the states are zeros.

        Raises:
            DataError: A stored state has another shape than these inputs need.
        """
        complete = dict(inputs)
        for name, dtype, plan in self._plans:
            if name in complete:
                continue
            shape = tuple(
                [size if isinstance(size, int) else inputs[size[0]].shape[size[1]] for size in plan]
            )
            state = stored[name] if stored else np.zeros(shape, dtype)
            if state.shape != shape:
                raise DataError(
                    f"the sequence has a state '{name}' of shape {list(state.shape)}, and these inputs need"
                    f" {list(shape)}; all requests of a sequence take the same sizes"
                )
            complete[name] = state
        return complete

    def pick(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return a dict from input names to the states in the inputs of a run."""
        return {name: inputs[name] for name, _, _ in self._plans}

    def take(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return a dict from input names to copies of the states for the next run."""
        return {state.input: outputs[state.output].copy() for state in self._states}
