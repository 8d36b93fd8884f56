"""Choose a candidate, and check it on the held-back samples. Pure.

The rule, with the reasons in ADR 0019: a candidate is within the limit on the drop if its estimate is. The
best one is then taken to the samples held back. Where its estimate there is over the limit, the next one is
taken, at half the error level each time, so that all attempts together err with 5 % at most. The limit is
*kept* only if the whole interval on samples held back lies within it; else it is *not resolved*.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from edgekit_toolkit.evaluation.drops import CONFIDENCE, Drop, Interval
from edgekit_toolkit.evaluation.scoring import CONFIRMATION_SHARE, LEAST_TO_HOLD_BACK, Scores
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import Choice, Measured
from edgekit_toolkit.tensorrt.check import TensorRtCheck

State = Literal["ok", "over", "not resolved", "not checked"]
_LIMIT: Final = "drop"


@dataclass(frozen=True, slots=True)
class HeldDrop:
    """The drop that a candidate is held to.

    Attributes:
        drop: the drop, with its samples.
        confidence: confidence level of the drop's interval, 0..1.
        held_back: whether its samples chose nothing.
    """

    drop: Drop
    confidence: float
    held_back: bool

    @property
    def interval(self) -> Interval:
        """The interval of the drop at this confidence."""
        return self.drop.interval(self.confidence)

    def state(self, limit_points: float) -> State:
        """What the samples show of a limit."""
        if self.drop.points > limit_points:
            return "over"
        return "ok" if self.held_back and self.interval.high <= limit_points else "not resolved"

    def samples_needed(self, limit_points: float) -> int | None:
        """Return about how many evaluation samples would show the limit to be kept, or None if none do."""
        count = self.drop.samples_for(limit_points, self.confidence)
        return None if count is None else max(LEAST_TO_HOLD_BACK, math.ceil(count / CONFIRMATION_SHARE))


@dataclass(frozen=True, slots=True)
class Accepted:
    """A choice, and what TensorRT said about it.

    Attributes:
        choice: among the candidates that are not refused.
        check: TensorRT's check of the chosen candidate, or None if none was checked.
        notes: what was refused or not checked, for the report.
    """

    choice: Choice
    check: TensorRtCheck | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A choice, and what each candidate was held to.

    Attributes:
        accepted: the choice.
        measured: the candidates; `drop` is what they were held to.
        held: the drop of each candidate; None without samples.
    """

    accepted: Accepted
    measured: tuple[Measured, ...]
    held: tuple[HeldDrop, ...] | None


def limits_in_force(budget: Budget, *, has_data: bool, strict: bool) -> Budget:
    """Return the limits that candidates are held against: without data there is no drop to hold.

    Args:
        budget: as asked for.
        has_data: whether there are real samples to judge by.
        strict: whether the drop must be shown to keep its limit.
    """
    if has_data or strict:
        return budget
    return Budget({name: most for name, most in budget.limits.items() if name != _LIMIT})


def choose_confirmed(
    measured: Sequence[Measured],
    scores: Scores,
    limits: Budget,
    choose: Callable[[Sequence[Measured]], Accepted],
    *,
    has_data: bool,
    strict: bool,
) -> Confirmed:
    """Return the choice that the samples held back do not contradict.

    Args:
        measured: candidates, at least one.
        scores: theirs, in the same order.
        limits: those in force.
        choose: chooses among candidates by their figures.
        has_data: whether there are real samples to judge by.
        strict: hold the upper end of the interval against the limit, not the estimate.
    """
    if not has_data:
        unknown = {_LIMIT: math.inf} if strict else {}
        found = tuple(replace(one, figures={**one.figures, **unknown}) for one in measured)
        return Confirmed(choose(found), found, None)
    held = [HeldDrop(drop, CONFIDENCE, held_back=False) for drop in scores.choosing.drops]
    left = [_hold(one, drop, scores, strict=strict) for one, drop in zip(measured, held, strict=True)]
    error = 1 - CONFIDENCE
    while True:
        accepted = choose(left)
        chosen = accepted.choice.chosen
        if chosen is None or scores.confirmation is None or _LIMIT not in limits.limits:
            break
        place = next(place for place, one in enumerate(left) if one.id == chosen)
        held[place] = HeldDrop(scores.confirmation.drops[place], 1 - error, held_back=True)
        left[place] = _hold(left[place], held[place], scores, strict=strict)
        error /= 2
        if not limits.violations(left[place].figures):
            break
    return Confirmed(_explained(accepted, held, left, limits), tuple(left), tuple(held))


def _hold(one: Measured, held: HeldDrop, scores: Scores, *, strict: bool) -> Measured:
    """Return the candidate with the drop that counts against the limit."""
    points = held.drop.points
    if strict:
        points = math.inf if scores.confirmation is None else held.interval.high
    return replace(one, figures={**one.figures, _LIMIT: points})


def _explained(
    accepted: Accepted, held: Sequence[HeldDrop], measured: Sequence[Measured], limits: Budget
) -> Accepted:
    """Add to a refusal over the drop what the samples can tell."""
    choice = accepted.choice
    if choice.closest is None or _LIMIT not in choice.binding:
        return accepted
    place = next(place for place, one in enumerate(measured) if one.id == choice.closest)
    interval, samples = held[place].interval, held[place].drop.samples
    if interval.low > limits.limits[_LIMIT]:
        return accepted
    note = (
        f"the drop of {choice.closest} is not resolved: {interval.low:.2f} to {interval.high:.2f} points"
        f" ({100 * interval.confidence:g} % interval, {samples} samples)"
    )
    return replace(accepted, choice=replace(choice, reason=f"{choice.reason}; {note}"))
