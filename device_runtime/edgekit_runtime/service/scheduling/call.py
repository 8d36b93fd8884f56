"""A call, which is one inference, and the protocol of the lanes that answer calls.

All of this runs on the event loop. A call is answered through its callback `reply`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.records import dataclass
from edgekit_runtime.tensors import Array

Answer: TypeAlias = "Mapping[str, Array] | EdgekitError"
Run: TypeAlias = Callable[[Mapping[str, Array]], Answer]


class Reused(Mapping[str, Array]):
    """Outputs that were computed for another call with equal inputs.

    Trials do not count these outputs in error rates or latencies.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self._outputs = outputs

    def __getitem__(self, name: str) -> Array:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def never() -> bool:
    """Return False. This is the default of `is_unwanted` for calls without a client."""
    return False


@dataclass(slots=True, eq=False)
class Call:
    """One inference.

    Attributes:
        inputs: The inputs by name, valid until `reply` is called. Inputs in shared memory may change at any
            time, so a value must not be read again after it was checked.
        reply: Called once on the event loop with the outputs or the error, possibly before `submit` returns.
            The outputs may be shared, so they must not be changed.
        priority: 1 is the highest priority, 0 is the default of the model.
        deadline_s: The latest time to start, on the clock of `time.monotonic`. A later call is refused.
        is_unwanted: Returns whether the client has disconnected, so that the call need not run.
        sequence: The position of the call in a sequence, or None if it belongs to none.
        work: A function that prepares the inputs, runs the model and returns the outputs on a thread, or
            None. It does not raise. If it is set, only the shapes of `inputs` are valid. Set it only if
            `Lane.takes_work` returns True.
    """

    inputs: Mapping[str, Array]
    reply: Callable[[Answer], None]
    priority: int = 0
    deadline_s: float | None = None
    is_unwanted: Callable[[], bool] = never
    sequence: SequenceStep | None = None
    work: "Callable[[Run], Answer] | None" = None

    def own_inputs(self) -> Mapping[str, Array]:
        """Return inputs that stay valid after `reply`. Arrays that do not own their memory are copied."""
        return {name: array if array.flags.owndata else array.copy() for name, array in self.inputs.items()}

    def answered_by(self, reply: Callable[[Answer], None]) -> "Call":
        """Return a copy of the call for another lane, with another `reply` and without `work`."""
        return Call(self.inputs, reply, self.priority, self.deadline_s, self.is_unwanted, self.sequence)


class Lane(Protocol):
    """Answers calls. Lanes are schedulers, caches, canaries or versions in worker processes."""

    __slots__ = ()

    def submit(self, call: Call) -> None:
        """Accept `call` and answer it with its `reply`. This does not raise."""

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":  # noqa: ARG002  # of a lane that never does
        """Return the answer if this thread can compute it at once. Otherwise return None without any effect.

        This serves very fast models, for which creating and answering a `Call` would take as long as the run.
        """
        return None

    def takes_work(self, inputs: Mapping[str, Array]) -> bool:  # noqa: ARG002  # of a lane that never does
        """Return whether a call with inputs of these shapes may have `work` now."""
        return False


class DrainingLane(Lane, Protocol):
    """A lane that can stop accepting calls."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """Whether no call is waiting, running or being answered."""

    def drain(self, done: Callable[[], None]) -> None:
        """Accept no more calls, and call `done` when all accepted calls are answered, possibly at once."""
