"""The verdict on a rollout, for a CI job or another rollout tool: the sum of the decisions that were taken.

decision   verdict      what may follow
succeed    pass         stop, if somebody rolls it back
abort      stop         nothing
pause      undecided    pass or stop, once a person resumes or aborts it
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from edgekit_fleet.rollouts.progress import Action

Verdict: TypeAlias = Literal["pass", "stop", "undecided"]
VERDICT_ACTION: Final = "rollout.verdict"
"""Action of the entry in the audit log, and type of the message to webhooks."""
VERDICTS: Final[dict[Action, Verdict]] = {"succeed": "pass", "abort": "stop", "pause": "undecided"}
_OF_STATES: Final[dict[str, Verdict]] = {"succeeded": "pass", "aborted": "stop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutVerdict:
    """What the fleet has decided about a release.

    Attributes:
        rollout, release: names.
        verdict: `pass` or `stop` once it is decided, `undecided` until then.
        state: state of the rollout; after the verdict devices may still install or go back.
        reasons: sentences with the figures behind the verdict, or about what is missing.
    """

    rollout: str
    release: str
    verdict: Verdict
    state: str
    reasons: tuple[str, ...]


def give_verdict(state: str, logged: Verdict | None) -> Verdict:
    """Return the verdict on a rollout.

    Args:
        state: state of the rollout.
        logged: the newest verdict in the audit log; if it is None, `state` decides.
    """
    return logged or _OF_STATES.get(state, "undecided")
