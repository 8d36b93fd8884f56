"""Chooses a candidate, and confirms it on held-back samples (ADR 0031 gives the reasons).

A candidate can be chosen if its estimated drop is within the limit. The best candidate is checked on the
held-back samples. It is rejected if the 99.5 % interval of its drop is entirely above the limit, and then the
next candidate is checked. Each check has half the error level of the check before, so that the total error is
at most 5 %.

The limit counts as *kept* only if the whole interval on held-back samples is within the limit. Otherwise it
is *not resolved*. The estimate on held-back samples is not used to reject candidates, because the estimates
of the remaining candidates would then be too optimistic.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from edgekit_toolkit.engines.tensorrt_check import TensorRtCheck
from edgekit_toolkit.evaluation.drops import CONFIDENCE, Drop, Interval
from edgekit_toolkit.evaluation.scoring import CONFIRMATION_SHARE, LEAST_TO_HOLD_BACK, Scores
from edgekit_toolkit.packaging.device_engine import EngineProof
from edgekit_toolkit.selection.budget import Budget
from edgekit_toolkit.selection.choice import CandidateFigures, Choice

State = Literal["ok", "over", "not resolved", "not checked"]
_LIMIT: Final = "drop"
# At 95 %, the estimates that are not rejected would flatter by 0.06 standard errors.
_REJECTION_CONFIDENCE: Final = 0.995


@dataclass(frozen=True, slots=True)
class HeldDrop:
    """The drop of a candidate, for comparison with the limit.

    Attributes:
        confidence: The confidence level of the interval of the drop, 0..1.
        held_back: Whether the drop was measured on samples that were not used for the choice.
    """

    drop: Drop
    confidence: float
    held_back: bool

    @property
    def interval(self) -> Interval:
        return self.drop.interval(self.confidence)

    def state(self, limit_points: float) -> State:
        """Return `ok`, `over` or `not resolved`. Only a drop on held-back samples can be `ok`."""
        low = self.drop.points
        if self.held_back:
            low = self.drop.interval(_REJECTION_CONFIDENCE).low
        if low > limit_points:
            return "over"
        return "ok" if self.held_back and self.interval.high <= limit_points else "not resolved"

    def exceeds(self, limit_points: float | None, *, strict: bool) -> bool:
        """Return whether the drop is over the limit, or False if there is no limit.

        If `strict` is True, a drop that is `not resolved` counts as over the limit.
        """
        if limit_points is None:
            return False
        state = self.state(limit_points)
        return state == "over" or (strict and state != "ok")

    def samples_needed(self, limit_points: float) -> int | None:
        """Return roughly how many samples would show that the drop is within a limit.

        Return None if the drop is not below the limit, or if more than 10 million samples would be needed.
        """
        count = self.drop.samples_for(limit_points, self.confidence)
        return None if count is None else max(LEAST_TO_HOLD_BACK, math.ceil(count / CONFIRMATION_SHARE))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of checking a candidate with the target's engine.

    Attributes:
        refuser: The engine that refuses the candidate, or an empty string.
        refusal: The reason for which the engine refuses the candidate, or an empty string.
        notes: Sentences for the report about checks that were skipped.
        tensorrt: The result of TensorRT's check, or None if it was not made.
        proof: The result of a test with the engine release on the devices, or None if it was not made.
    """

    refuser: str = ""
    refusal: str = ""
    notes: tuple[str, ...] = ()
    tensorrt: TensorRtCheck | None = None
    proof: EngineProof | None = None


@dataclass(frozen=True, slots=True)
class AcceptedChoice:
    """A choice, and the engine's check of the chosen candidate.

    Attributes:
        choice: The choice among the candidates that are not refused.
        acceptance: The check of the chosen candidate, or None if none was chosen.
        notes: Remarks for the report on candidates that were refused or not checked.
    """

    choice: Choice
    acceptance: Acceptance | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ConfirmedChoice:
    """A choice, and the drops that were compared with the limit.

    Attributes:
        measured: The candidates with the figures that were compared.
        held: The drop of each candidate in `measured`, or None without samples.
    """

    accepted: AcceptedChoice
    measured: tuple[CandidateFigures, ...]
    held: tuple[HeldDrop, ...] | None


def limits_in_force(budget: Budget, *, has_data: bool, strict: bool) -> Budget:
    """Return the limits to apply. Without data the limit on the drop is removed, unless `strict` is True."""
    if has_data or strict:
        return budget
    return Budget({name: most for name, most in budget.limits.items() if name != _LIMIT})


def choose_confirmed(
    measured: Sequence[CandidateFigures],
    scores: Scores,
    limits: Budget,
    choose: Callable[[Sequence[CandidateFigures]], AcceptedChoice],
    *,
    has_data: bool,
    strict: bool,
) -> ConfirmedChoice:
    """Return the best choice that the held-back samples do not reject.

    `limits` come from `limits_in_force`. `choose` is called again after each rejection. If `strict` is True,
    the upper end of the drop's interval is compared with the limit instead of the estimate.
    """
    if not has_data:
        unknown = {_LIMIT: math.inf} if strict else {}
        unjudged = tuple(
            replace(candidate, figures={**candidate.figures, **unknown}) for candidate in measured
        )
        accepted = choose(unjudged)
        if strict and accepted.choice.needed is not None:
            needed = f"{accepted.choice.needed}, or samples (--calibration, --eval): --strict needs them"
            accepted = replace(accepted, choice=replace(accepted.choice, needed=needed))
        return ConfirmedChoice(accepted, unjudged, None)
    stated_drops = [HeldDrop(drop, CONFIDENCE, held_back=False) for drop in scores.choosing.drops]
    judged = [
        _hold(candidate, drop, scores, strict=strict)
        for candidate, drop in zip(measured, stated_drops, strict=True)
    ]
    error = 1 - CONFIDENCE
    while True:
        accepted = choose(judged)
        chosen = accepted.choice.chosen
        if chosen is None or scores.confirmation is None or _LIMIT not in limits.limits:
            break
        index = next(index for index, candidate in enumerate(judged) if candidate.id == chosen)
        stated_drops[index] = HeldDrop(scores.confirmation.drops[index], 1 - error, held_back=True)
        error /= 2
        if strict or stated_drops[index].state(limits.limits[_LIMIT]) == "over":
            judged[index] = _hold(judged[index], stated_drops[index], scores, strict=strict)
        if not limits.violations(judged[index].figures):
            break
    return ConfirmedChoice(
        _explained(accepted, stated_drops, judged, limits), tuple(judged), tuple(stated_drops)
    )


def _hold(
    candidate: CandidateFigures, stated_drop: HeldDrop, scores: Scores, *, strict: bool
) -> CandidateFigures:
    """Return the candidate with the drop that counts against the limit."""
    points = stated_drop.drop.points
    if strict:
        points = math.inf if scores.confirmation is None else stated_drop.interval.high
    return replace(candidate, figures={**candidate.figures, _LIMIT: points})


def _explained(
    accepted: AcceptedChoice,
    stated_drops: Sequence[HeldDrop],
    measured: Sequence[CandidateFigures],
    limits: Budget,
) -> AcceptedChoice:
    """Add to a refusal because of the drop the evidence of the samples."""
    choice = accepted.choice
    if choice.closest is None or _LIMIT not in choice.binding:
        return accepted
    index = next(index for index, candidate in enumerate(measured) if candidate.id == choice.closest)
    interval, samples, limit = (
        stated_drops[index].interval,
        stated_drops[index].drop.samples,
        limits.limits[_LIMIT],
    )
    if interval.low > limit or (stated_drops[index].held_back and stated_drops[index].state(limit) == "over"):
        return accepted
    note = (
        f"the drop of {choice.closest} is not resolved: {interval.low:.2f} to {interval.high:.2f} points"
        f" ({100 * interval.confidence:g} % interval, {samples} samples)"
    )
    samples_needed = stated_drops[index].samples_needed(limit)
    needed = choice.needed
    if samples_needed is not None:
        needed = f"{needed}, or at least {samples_needed:,} evaluation samples"
    return replace(accepted, choice=replace(choice, reason=f"{choice.reason}; {note}", needed=needed))
