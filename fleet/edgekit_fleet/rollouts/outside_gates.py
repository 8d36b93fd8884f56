"""Outside gates, which compare a figure that only an external system knows, such as a shop's conversion rate.

A rollout declares its outside gates at its start, and an external judge sends the evidence. In this example
the gate `conversion` compares the value with a reference by difference. Lower is worse, and the limit is
-0.02.

    value 0.031, reference 0.034                         pass: the difference is -0.003
    value 0.031 (0.005 to 0.057), reference 0.034        unclear: the interval contains the limit
    value 0.005 (0.002 to 0.008), reference 0.034        stop: the whole interval is below the limit
    statement `stop`, reason "complaints"                stop

A stop ends the rollout at the manager's next turn, even if other evidence was a pass. After a pass the
rollout no longer waits for the gate. Unclear evidence changes nothing. Evidence after the gate's deadline
still counts while the rollout is open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

from edgekit_fleet.rollouts.gate_table import GATES
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import FleetError
from edgekit_runtime.system.shown_text import clean_line

MAX_REASON: Final = 300
_MAX_GATES: Final = 16
_MAX_NAME: Final = 64
_FIGURE: Final = Range(-1e12, 1e12)
Outcome: TypeAlias = Literal["unclear", "pass", "stop"]
_WEIGHTS: Final[Mapping[Outcome, int]] = {"unclear": 0, "pass": 1, "stop": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideGate:
    """A gate that a rollout declares at its start.

    Attributes:
        limit: The worst figure that passes (see `compare`). With a limit, the judge sends a value or `stop`.
            Without a limit, the judge sends `pass` or `stop`.
        unit: The unit of the figure in messages.
        compare: What is compared with the limit: the value itself, its difference from the reference, or its
            ratio to the reference.
        worse: The direction in which the value gets worse.
        min_samples: The minimum number of samples. Evidence from fewer samples is unclear.
        deadline_s: How long the rollout waits for the evidence, in seconds from its start. By default the
            time is unlimited.
        judge: The only actor whose evidence counts, such as `token:shop`. By default all actors with the
            scope `evidence` count.
    """

    limit: Annotated[float | None, _FIGURE] = None
    unit: str = ""
    compare: Literal["level", "difference", "ratio"] = "level"
    worse: Literal["higher", "lower"] = "higher"
    min_samples: Annotated[int, Range(0, 1 << 50)] = 0
    deadline_s: float | None = None
    judge: str = ""

    def compute_figure(self, value: float, reference: float | None) -> float:
        """Return the value, difference or ratio to compare with the limit, as `compare` says."""
        if reference is None or self.compare == "level":
            return value
        return value / reference if self.compare == "ratio" else value - reference

    def is_beyond(self, figure: float, limit: float) -> bool:
        return figure > limit if self.worse == "higher" else figure < limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedEvidence:
    """Evidence as an outside judge sends it, which is either a value or a statement.

    Attributes:
        statement: The judge's own verdict instead of a value.
        value: The figure with the release.
        reference: The figure without the release. It is None if the gate compares by `level`.
        low, high: The uncertainty interval of the value. Both are None if it is unknown.
        samples: The number of samples behind the value.
        reason: A sentence for the reader of the verdict.
    """

    gate: str
    statement: Literal["", "pass", "stop"] = ""
    value: Annotated[float | None, _FIGURE] = None
    reference: Annotated[float | None, _FIGURE] = None
    low: Annotated[float | None, _FIGURE] = None
    high: Annotated[float | None, _FIGURE] = None
    samples: Annotated[int | None, Range(0, 1 << 50)] = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(StatedEvidence):
    """Evidence in the log of a rollout.

    Attributes:
        who: The name of the judge who sent the evidence.
    """

    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFinding:
    """The result of judging evidence about a release.

    Attributes:
        outcome: `unclear` if there are too few samples or the limit lies within the interval.
        sentence: The result as a sentence.
        figures: The figures in `sentence` by name.
    """

    outcome: Outcome
    sentence: str
    figures: Mapping[str, float]

    def outweighs(self, other: "OutsideFinding | None") -> bool:
        """Return whether this finding replaces an earlier one of the same gate.

        `stop` replaces `pass`, and `pass` replaces `unclear`. Any finding replaces None or a finding with an
        equal outcome.
        """
        return other is None or _WEIGHTS[self.outcome] >= _WEIGHTS[other.outcome]


def check_gates(gates: Mapping[str, OutsideGate]) -> None:
    """Check the outside gates of a new rollout.

    Raises:
        ValueError: There are too many gates, or a name is malformed or the name of a built-in gate.
    """
    if len(gates) > _MAX_GATES:
        raise ValueError(f"evidence: {len(gates)} gates, expected at most {_MAX_GATES}")
    for name in gates:
        is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not is_name or len(name) > _MAX_NAME or any(name == gate.name for gate in GATES):
            raise ValueError(
                f"evidence: gate name {name[:80]!r}, expected 1 to {_MAX_NAME} letters, digits, '-' and '_',"
                " and none of the fleet's own gates"
            )


def check_evidence(gates: Mapping[str, OutsideGate], evidence: Evidence) -> None:
    """Check evidence against the gates that its rollout has declared.

    Raises:
        FleetError: The gate does not exist, it has another judge, or the evidence does not suit the gate.
    """
    gate = gates.get(evidence.gate)
    if gate is None:
        names = ", ".join(sorted(gates)) or "none"
        raise FleetError(f"the rollout has no outside gate '{evidence.gate[:80]}', it declared: {names}")
    if gate.judge not in ("", evidence.who):
        raise FleetError(
            f"gate '{evidence.gate}' takes evidence of {gate.judge} alone, not of {evidence.who}"
        )
    bounds = evidence.low, evidence.high
    problem = ""
    if (evidence.value is None) == (not evidence.statement):
        problem = "expected either a value or a statement, pass or stop"
    elif evidence.value is None:
        if (*bounds, evidence.reference) != (None, None, None):
            problem = "a statement has no reference and no interval"
        elif evidence.statement == "pass" and gate.limit is not None:
            problem = "the gate has a limit: a pass needs a value"
    elif gate.limit is None:
        problem = "the gate has no limit: state pass or stop"
    elif (gate.compare == "level") != (evidence.reference is None):
        needs = "needs no" if gate.compare == "level" else f"compares by {gate.compare} and needs a"
        problem = f"the gate {needs} reference"
    elif gate.compare == "ratio" and evidence.reference is not None and evidence.reference < 1e-9:
        problem = f"a ratio to the reference {evidence.reference:g}: expected one above 0"
    elif (bounds[0] is None) != (bounds[1] is None):
        problem = "low and high belong together"
    elif bounds[0] is not None and bounds[1] is not None and not bounds[0] <= evidence.value <= bounds[1]:
        problem = "expected low <= value <= high"
    if problem:
        raise FleetError(f"evidence for '{evidence.gate}': {problem}")


def judge_evidence(gate: OutsideGate, evidence: Evidence) -> OutsideFinding:
    """Return the result for evidence that has passed `check_evidence`."""
    by = f" by {clean_line(evidence.who, _MAX_NAME)}" if evidence.who else ""
    why = f": {clean_line(evidence.reason, MAX_REASON)}" if evidence.reason else ""
    if evidence.value is None or gate.limit is None:
        outcome: Outcome = "stop" if evidence.statement == "stop" else "pass"
        return OutsideFinding(outcome=outcome, sentence=f"{evidence.gate}: {outcome}{by}{why}", figures={})
    figure = gate.compute_figure(evidence.value, evidence.reference)
    ends = [
        gate.compute_figure(bound, evidence.reference)
        for bound in (evidence.low, evidence.high)
        if bound is not None
    ]
    beyond = [gate.is_beyond(end, gate.limit) for end in ends or [figure]]
    is_small = evidence.samples is not None and evidence.samples < gate.min_samples
    is_small = is_small or (evidence.samples is None and gate.min_samples > 0)
    outcome = "unclear" if is_small or len(set(beyond)) > 1 else "stop" if beyond[0] else "pass"
    unit = f" ({clean_line(gate.unit, _MAX_NAME)})" if gate.unit else ""
    interval = f" ({ends[0]:.6g} to {ends[1]:.6g})" if ends else ""
    count = "" if evidence.samples is None else f" from {evidence.samples:,} samples"
    expected = f"expected {'at most' if gate.worse == 'higher' else 'at least'} {gate.limit:.6g}"
    sentence = f"{evidence.gate}{unit} is {figure:.6g}{interval}{count}, {expected}{by}{why}"
    figures = {"figure": min(max(figure, -1e12), 1e12), "limit": gate.limit}
    return OutsideFinding(outcome=outcome, sentence=sentence, figures=figures)
