"""Repeats the decisions of a rollout from its log, to check that the same entries give the same decisions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from edgekit_fleet.rollouts.decide import decide
from edgekit_fleet.rollouts.progress import Decision, Entry, Progress, StartEntry, apply, begin
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import FleetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A decision that differs between the log and the replay.

    Attributes:
        at: The time of the decision in the log, in seconds since 1970.
        logged: The decision in the log.
        decided: The decision in the replay, or None if the replay makes no decision at this time.
    """

    at: Annotated[float, Range(0, 10**11)]
    logged: Decision
    decided: Decision | None


def replay(entries: Iterable[tuple[float, Entry]]) -> tuple[Progress, list[Difference]]:
    """Replay a log, and return the final progress and the decisions that differ.

    Args:
        entries: Pairs of a time, in seconds since 1970, and an entry. The first is a `StartEntry`.

    Raises:
        FleetError: The log does not begin with the start of a rollout.
    """
    progress: Progress | None = None
    differences: list[Difference] = []
    for at, entry in entries:
        if progress is None:
            if not isinstance(entry, StartEntry):
                raise FleetError("the log of the rollout does not begin with its start; restore the store")
            progress = begin(entry, at)
            continue
        if isinstance(entry, Decision):
            decided = decide(progress, at)
            if decided != entry:
                differences.append(Difference(at=at, logged=entry, decided=decided))
        apply(progress, entry, at)
    if progress is None:
        raise FleetError("the rollout has no log; restore the store")
    return progress, differences
