"""Input and result of a step: all data to and from the process that carries it out."""

import random
import threading
from collections.abc import Callable
from typing import Annotated, Final, Literal, Protocol, TypeAlias

from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.reconcile import Step
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

_COUNT: Final = Range(0, 1 << 53)
_MAX_WIDTH_S: Final = 300.0

NoteKind: TypeAlias = Literal["attack", "delta", "disk-full", "slow-retrieval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """A step, and its limits.

    Attributes:
        step: the step that `reconcile` returned.
        most_bytes: limit of the bytes that a download may receive or an upload send, or None.
        known_time_s: lower bound of the time in seconds since 1970, whatever the clock shows.
        bytes_per_s: cap of the bandwidth, or None for the cap of the agent's command line.
        held_orders: ids of the orders whose samples must not be sent yet.
    """

    step: Step
    most_bytes: Annotated[int, _COUNT] | None = None
    known_time_s: Annotated[float, _COUNT] = 0.0
    bytes_per_s: float | None = None
    held_orders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step.

    Attributes:
        outcome: `unchanged` keeps the state of the execution, `installed` begins its trial, `retry` repeats
            the step, `refused` and `failed` end the execution.
        code, reason: the same fields as in `Execution`.
        wait_s: wait before the step is tried again; None for a random time that grows with the failures.
        max_failures: failures with the same code in a row after which the execution fails; None for no limit.
    """

    outcome: Literal["unchanged", "installed", "retry", "refused", "failed"] = "unchanged"
    code: str = ""
    reason: str = ""
    wait_s: float | None = None
    max_failures: int | None = None

    def apply(self, progress: Progress) -> Progress:
        """Return the execution after the step; unchanged if it has ended meanwhile."""
        if self.outcome == "unchanged" or progress.has_ended:  # it has ended meanwhile, by its timeout
            return progress
        if self.outcome == "installed":
            return progress.enter("trying", code="installed")
        if self.outcome != "retry":
            return progress.enter(self.outcome, code=self.code, reason=self.reason)
        if self.max_failures is not None and progress.count_same(self.code) + 1 >= self.max_failures:
            return progress.enter("failed", code=self.code, reason=self.reason)
        width_s = min(_MAX_WIDTH_S, 2.0 ** min(progress.failures + 1, 9))
        wait_s = random.uniform(0.0, width_s) if self.wait_s is None else self.wait_s  # noqa: S311  # no secret
        return progress.fail_once(self.code, self.reason, wait_s)


class StepCarrier(Protocol):
    """Downloads, installs, refreshes and uploads, on the thread of its caller."""

    def carry_out(
        self,
        order: StepOrder,
        stop: threading.Event,
        note: Callable[[NoteKind, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        """Carry out a `download`, `install`, `refresh` or `upload`, and return the result.

        Args:
            order: see `StepOrder`.
            stop: set to stop a step; a step in a separate process stops only while it downloads.
            note: called with kind and text of an event, which must be reported at once.
            count: called with the number of received or sent bytes.
        """
