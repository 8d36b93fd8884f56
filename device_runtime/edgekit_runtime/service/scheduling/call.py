"""What passes between the rooms of the service: one inference, and who takes it.

Everything here happens on the thread of the event loop. A call is answered by calling `reply`, not through a
future: for a model of 20 us a future and a turn of the loop would be half of the work again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.tensors import Array

Answer: TypeAlias = "Mapping[str, Array] | EdgekitError"


class Reused(Mapping[str, Array]):
    """Outputs that were computed for another call: whoever judges what a version does leaves them out."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self._outputs = outputs

    def __getitem__(self, name: str) -> Array:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class Call:
    """One inference on its way.

    Attributes:
        inputs: input name -> array; they may lie in shared memory that the client can write to, so whatever
            is checked must be read once. They are valid until `reply` is called: a receive buffer is used
            again after that, and shared memory may shrink. Who needs them for longer copies them before.
        reply: takes the outputs or the error, exactly once, on the loop's thread, maybe before `submit`
            returns. Nobody writes to outputs that were handed over: several readers may hold them.
        priority: 1 is the highest, 0 the model's default.
        deadline_s: on the clock of `time.monotonic`; a call that has not begun by then is refused.
        is_unwanted: returns whether nobody waits for the answer any more; such a call need not run.
    """

    inputs: Mapping[str, Array]
    reply: Callable[[Answer], None]
    priority: int = 0
    deadline_s: float | None = None
    is_unwanted: Callable[[], bool] = _never

    def own_inputs(self) -> Mapping[str, Array]:
        """Return the inputs as they stay after `reply`: what others may write to is copied."""
        return {name: array if array.flags.owndata else array.copy() for name, array in self.inputs.items()}

    def answered_by(self, reply: Callable[[Answer], None]) -> "Call":
        """Return the same call with another taker of its answer, for a lane in front of another."""
        return Call(self.inputs, reply, self.priority, self.deadline_s, self.is_unwanted)


class Lane(Protocol):
    """Takes calls: a scheduler in front of one session, a canary in front of two lanes, a worker process."""

    __slots__ = ()

    def submit(self, call: Call) -> None:
        """Take `call`, which is answered through its `reply`; raises nothing."""

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":  # noqa: ARG002  # of a lane that never does
        """Return the answer where it can be computed at once and on this thread; None has changed nothing.

        For the shortest models: a `Call`, and an answer that goes back the way it came, would cost as much as
        they do.

        Args:
            inputs: of a call, as there.
        """
        return None


class DrainingLane(Lane, Protocol):
    """A lane that can come to its end."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, is under way or is being answered."""

    def drain(self, done: Callable[[], None]) -> None:
        """Take no more calls, and call `done` once those that were taken are answered, maybe at once."""
