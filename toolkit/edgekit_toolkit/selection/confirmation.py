"""Chooses a candidate, and checks it on the held-back samples. Pure.

The rule (reasons in ADR 0031): a candidate is within the limit on the drop if its estimate is. The best one
is then checked on the held-back samples. If its 99.5 % interval there lies over the limit, the next one is
checked, each time at half the error level, so that all attempts together err with at most 5 %. The limit is
*kept* only if the whole interval on samples held back lies within it; else it is *not resolved*. The estimate
on held-back samples rejects nothing: if it did, the estimates that remain would flatter.
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
    """The drop of a candidate that is compared with the limit.

    Attributes:
        confidence: confidence level of the drop's interval, 0..1.
        held_back: whether the samples of the estimate were held back from the choice.
    """

    drop: Drop
    confidence: float
    held_back: bool

    @property
    def interval(self) -> Interval:
        return self.drop.interval(self.confidence)

    def state(self, limit_points: float) -> State:
        """Return `ok`, `over` or `not resolved`; it is `ok` only on held-back samples."""
        low = self.drop.points
        if self.held_back:
            low = self.drop.interval(_REJECTION_CONFIDENCE).low
        if low > limit_points:
            return "over"
        return "ok" if self.held_back and self.interval.high <= limit_points else "not resolved"

    def exceeds(self, limit_points: float | None, *, strict: bool) -> bool:
        """Return True if the drop is over the limit; False without a limit.

        `strict`: return True also if the state is `not resolved`.
        """
        if limit_points is None:
            return False
        state = self.state(limit_points)
        return state == "over" or (strict and state != "ok")

    def samples_needed(self, limit_points: float) -> int | None:
        """Return about how many samples would show that the drop keeps a limit; None if far too many."""
        count = self.drop.samples_for(limit_points, self.confidence)
        return None if count is None else max(LEAST_TO_HOLD_BACK, math.ceil(count / CONFIRMATION_SHARE))


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the target's engine says about a candidate.

    Attributes:
        refuser, refusal: engine that refuses the candidate, and its reason; empty if none does.
        notes: sentences for the report on checks that were not made.
        tensorrt: result of TensorRT's check; None without one.
        proof: result of a test with the engine release that devices run; None without a test.
    """

    refuser: str = ""
    refusal: str = ""
    notes: tuple[str, ...] = ()
    tensorrt: TensorRtCheck | None = None
    proof: EngineProof | None = None


@dataclass(frozen=True, slots=True)
class AcceptedChoice:
    """A choice, and what the target's engine says about it.

    Attributes:
        choice: choice among the candidates that are not refused.
        acceptance: what the engine says about the chosen candidate; None if none was chosen.
        notes: remarks on candidates that were refused or not checked, for the report.
    """

    choice: Choice
    acceptance: Acceptance | None
    notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class ConfirmedChoice:
    """A choice, and the drop of each candidate that was compared with the limit.

    Attributes:
        measured: the candidates with the figures that the choice compared.
        held: the drop of each of `measured`; None without samples.
    """

    accepted: AcceptedChoice
    measured: tuple[CandidateFigures, ...]
    held: tuple[HeldDrop, ...] | None


def limits_in_force(budget: Budget, *, has_data: bool, strict: bool) -> Budget:
    """Return the limits to keep. Without data the limit on the drop is left out, unless `strict`."""
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
    """Return the choice that the held-back samples do not contradict.

    `limits`: see `limits_in_force`. `choose` is called again after each candidate that is rejected. `strict`:
    compare the upper end of the drop's interval with the limit, instead of the estimate.
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
