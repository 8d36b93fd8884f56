"""One inference, and the protocol of the lanes that answer it.

Everything here happens on the thread of the event loop. A call is answered by calling `reply`, not through a
future: for a model of 20 us a future and a turn of the loop would be half of the work again.
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
    """Outputs computed for another, equal call. They say nothing new about a version."""

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
    """Return False: the default of `is_unwanted` for a call without a client."""
    return False


@dataclass(slots=True, eq=False)
class Call:
    """One inference on its way.

    Attributes:
        inputs: input name -> array, valid until `reply` is called. The client may still change an array: read
            each value only once, and check the value that you read.
        reply: called once with the outputs or the error, on the loop's thread, maybe before `submit` returns.
            The outputs must not be written to: several readers may hold them.
        priority: 1 is the highest, 0 the model's default.
        deadline_s: latest time on the clock of `time.monotonic`; a call that has not begun by then is
            refused.
        is_unwanted: returns whether the client has gone; such a call need not run.
        sequence: its place in a sequence; None for a single call, also if `inputs` hold its states.
        work: makes the inputs, runs the model and returns its outputs, on the thread of the run; raises
            nothing. `inputs` then only show the shapes. Only for lanes whose `takes_work` is True.
    """

    inputs: Mapping[str, Array]
    reply: Callable[[Answer], None]
    priority: int = 0
    deadline_s: float | None = None
    is_unwanted: Callable[[], bool] = never
    sequence: SequenceStep | None = None
    work: "Callable[[Run], Answer] | None" = None

    def own_inputs(self) -> Mapping[str, Array]:
        """Return inputs that stay valid after `reply`: arrays in foreign memory are copied."""
        return {name: array if array.flags.owndata else array.copy() for name, array in self.inputs.items()}

    def answered_by(self, reply: Callable[[Answer], None]) -> "Call":
        """Return the call with another `reply` and without `work`, to pass it on to another lane."""
        return Call(self.inputs, reply, self.priority, self.deadline_s, self.is_unwanted, self.sequence)


class Lane(Protocol):
    """Answers calls: a scheduler in front of sessions, a canary in front of two lanes, a remote version."""

    __slots__ = ()

    def submit(self, call: Call) -> None:
        """Accept `call` and answer it through its `reply`; raises nothing."""

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":  # noqa: ARG002  # of a lane that never does
        """Return the answer if this thread can compute it at once; else return None, without any effect.

        It is for the shortest models, for which a `Call` and its reply would take as long as their run.
        """
        return None

    def takes_work(self, inputs: Mapping[str, Array]) -> bool:  # noqa: ARG002  # of a lane that never does
        """Return whether a call with inputs of these shapes may carry `work` now."""
        return False


class DrainingLane(Lane, Protocol):
    """A lane that can come to its end."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """True if no call waits, runs or is being answered."""

    def drain(self, done: Callable[[], None]) -> None:
        """Accept no more calls. Call `done` once all accepted calls are answered, maybe at once."""
