"""The verdict on a rollout, for a CI job or another rollout tool.

The verdict follows from the decisions that the manager has logged.

    decision   verdict      possible later verdict
    succeed    pass         stop, if a person rolls the release back
    abort      stop         none
    pause      undecided    pass or stop, after a person resumes or aborts the rollout
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from edgekit_fleet.rollouts.progress import Action

Verdict: TypeAlias = Literal["pass", "stop", "undecided"]
VERDICT_ACTION: Final = "rollout.verdict"
"""The action of a verdict in the audit log, and the type of its message to webhooks."""
VERDICTS: Final[dict[Action, Verdict]] = {"succeed": "pass", "abort": "stop", "pause": "undecided"}
_OF_STATES: Final[dict[str, Verdict]] = {"succeeded": "pass", "aborted": "stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVerdict:
    """The verdict on a release.

    Attributes:
        rollout, release: The names of the rollout and the release.
        verdict: `pass` or `stop`, or `undecided` if there is no final verdict yet.
        state: The state of the rollout. Devices may still install or go back after the verdict.
        reasons: Sentences with the figures behind the verdict, or about missing evidence.
    """

    rollout: str
    release: str
    verdict: Verdict
    state: str
    reasons: tuple[str, ...]


def give_verdict(state: str, logged: Verdict | None) -> Verdict:
    """Return the verdict on a rollout.

    Args:
        state: The state of the rollout, which is only used if no verdict was logged.
        logged: The newest verdict in the audit log, or None.
    """
    return logged or _OF_STATES.get(state, "undecided")
