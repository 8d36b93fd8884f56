"""Input and result of a step."""

import random
import threading
from collections.abc import Callable
from typing import Annotated, Final, Literal, Protocol, TypeAlias

from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.reconcile import Step
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.records import dataclass

_COUNT: Final = Range(0, 1 << 60)  # --month-mb takes up to 10^12 megabytes
_MAX_WIDTH_S: Final = 300.0

NoteKind: TypeAlias = Literal["attack", "delta", "disk-full", "slow-retrieval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """A step and its limits.

    Attributes:
        step: the step that `reconcile` returned.
        most_bytes: maximum number of bytes that a download receives or an upload sends, or None.
        known_time_s: lower bound of the current time, in seconds since 1970.
        bytes_per_s: maximum rate in bytes per second, or None.
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
        outcome: `unchanged` keeps the state of the execution, `installed` begins the trial of the new
            version, `retry` repeats the step, `refused` and `failed` end the execution.
        code, reason: the same fields as in `Execution`.
        wait_s: wait before the next attempt, or None for a random time that grows with each failure.
        max_failures: number of consecutive failures with the same code after which the execution fails, or
            None.
    """

    outcome: Literal["unchanged", "installed", "retry", "refused", "failed"] = "unchanged"
    code: str = ""
    reason: str = ""
    wait_s: float | None = None
    max_failures: int | None = None

    def apply(self, progress: Progress) -> Progress:
        """Return the execution after the step. An execution that has already ended does not change."""
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
    """Carries out downloads, installations, refreshes and uploads on the calling thread."""

    def carry_out(
        self,
        order: StepOrder,
        stop: threading.Event,
        note: Callable[[NoteKind, str], None],
        count: Callable[[int], None],
    ) -> StepResult:
        """Carry out a `download`, `install`, `refresh` or `upload`, and return the result.

        Args:
            order: the step and its limits.
            stop: event that tells the step to stop. Some steps run to their end.
            note: called with the kind and text of an event that must be reported at once.
            count: called with the number of received or sent bytes.
        """
