"""Gates whose figure no device knows, such as a shop's conversion: a judge outside adds the evidence.

A rollout declares them at its start, so that it can wait for them. An example: `conversion` is compared with
a reference by difference, lower is worse, and the limit is -0.02.

    value 0.031, reference 0.034                         -0.003: pass
    value 0.031 (0.005 to 0.057), reference 0.034        the limit lies in the interval: unclear
    value 0.005 (0.002 to 0.008), reference 0.034        all of the interval is beyond the limit: stop
    statement `stop`, reason "complaints"                stop

A stop ends the rollout at the manager's next turn, whatever comes before or after it. A pass ends the wait
for its gate. Unclear evidence changes nothing. Evidence after the gate's deadline counts all the same, as
long as the rollout is open.
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
        limit: the worst compared value that passes. With a limit the judge sends a value or `stop`; without
            one, `pass` or `stop`.
        unit: unit of the compared value, to show.
        compare: the value alone, its difference from the reference, or its ratio to the reference.
        worse: direction in which the value gets worse.
        min_samples: evidence from fewer samples is unclear.
        deadline_s: how long the rollout waits for the evidence, in seconds from its start; by default for
            ever.
        judge: the only actor whose evidence counts, such as `token:shop`; by default anybody with the scope.
    """

    limit: Annotated[float | None, _FIGURE] = None
    unit: str = ""
    compare: Literal["level", "difference", "ratio"] = "level"
    worse: Literal["higher", "lower"] = "higher"
    min_samples: Annotated[int, Range(0, 1 << 50)] = 0
    deadline_s: float | None = None
    judge: str = ""

    def compute_figure(self, value: float, reference: float | None) -> float:
        """Return the figure to compare with the limit: value and reference, combined as `compare` says."""
        if reference is None or self.compare == "level":
            return value
        return value / reference if self.compare == "ratio" else value - reference

    def is_beyond(self, figure: float, limit: float) -> bool:
        return figure > limit if self.worse == "higher" else figure < limit


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedEvidence:
    """Evidence as an outside judge sends it: a value, or a statement.

    Attributes:
        gate: name of the gate.
        statement: the judge's own verdict, in place of a value.
        value, reference: figure with the release, and without it; a gate that compares by `level` takes no
            reference.
        low, high: ends of the interval of uncertainty around the value; both or neither.
        samples: number of samples behind the value.
        reason: a sentence to show.
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
    """Evidence as an entry in the log of its rollout; `who` is the judge."""

    who: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideFinding:
    """What evidence says about a release.

    Attributes:
        outcome: `unclear` if the samples are too few or the limit lies within the interval.
        sentence: the statement in words.
        figures: the figures in the sentence, by name.
    """

    outcome: Outcome
    sentence: str
    figures: Mapping[str, float]

    def outweighs(self, other: "OutsideFinding | None") -> bool:
        """Return whether this finding replaces an earlier one of the same gate.

        `stop` outweighs `pass`, and `pass` outweighs `unclear`; of two equal ones the newer counts. None is
        always replaced.
        """
        return other is None or _WEIGHTS[self.outcome] >= _WEIGHTS[other.outcome]


def check_gates(gates: Mapping[str, OutsideGate]) -> None:
    """Check the gates that a rollout declares.

    Raises:
        ValueError: there are too many, a name is malformed, or the fleet itself has a gate of this name.
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
        FleetError: the gate does not exist or belongs to another judge, or the figures do not fit it.
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
    """Return what the evidence says about the release. It must have passed `check_evidence`."""
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
