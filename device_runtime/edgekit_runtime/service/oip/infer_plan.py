"""What an inference request asks for, laid out so that it can be used again for the same JSON."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgekit_runtime.service.oip.json_arrays import NumberArray
from edgekit_runtime.tensors import Array


@dataclass(frozen=True, slots=True)
class Shared:
    """A place in shared memory.

    Attributes:
        region: its name.
        offset_bytes, size_bytes: within it.
    """

    region: str
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedInput:
    """Where the values of one input come from: exactly one of three places.

    Attributes:
        name, dtype, shape: of the tensor.
        start_bytes: behind the JSON, for binary data.
        shared: in shared memory, or None.
        values: from the JSON, not read yet where they are many; or None.
    """

    name: str
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]
    start_bytes: int = 0
    shared: Shared | None = None
    values: "Array | NumberArray | None" = None


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """How one output goes back.

    Attributes:
        name: of the tensor.
        is_binary: behind the JSON instead of in it.
        shared: in shared memory, or None.
    """

    name: str
    is_binary: bool
    shared: Shared | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a request asks for.

    Attributes:
        inputs: one for each of the model.
        outputs: in the order of the answer.
        binary_bytes: of all binary data behind the JSON.
        id: that the answer repeats, or None.
        priority: 1 is the highest, 0 the model's default.
        timeout_us: for waiting, or None.
        heads: of answers, by the shapes of their outputs; filled by the codec.
        shares_outputs: whether an output goes to shared memory.
        has_json_outputs: whether the values of an output go into the JSON.
    """

    inputs: tuple[PlannedInput, ...]
    outputs: tuple[PlannedOutput, ...]
    binary_bytes: int
    id: str | None
    priority: int
    timeout_us: int | None
    heads: dict[tuple[tuple[int, ...], ...], bytes] = field(default_factory=dict)
    shares_outputs: bool = field(init=False)
    has_json_outputs: bool = field(init=False)

    def __post_init__(self) -> None:
        shares = any(planned.shared is not None for planned in self.outputs)
        writes = any(planned.shared is None and not planned.is_binary for planned in self.outputs)
        object.__setattr__(self, "shares_outputs", shares)  # both are asked for every request
        object.__setattr__(self, "has_json_outputs", writes)

    @property
    def is_repeatable(self) -> bool:
        """Whether the plan holds for the next request with the same JSON and is worth keeping."""
        return all(planned.values is None for planned in self.inputs)
