"""Endpoints of verdicts on rollouts, and of the evidence of outside judges."""

from dataclasses import dataclass
from typing import Annotated, Literal

from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import Fleet, WaitSeconds, endpoint
from edgekit_fleet.operations import verdicts
from edgekit_fleet.rollouts.outside_gates import Evidence, OutsideFinding
from edgekit_fleet.rollouts.verdict import RolloutVerdict
from edgekit_runtime.dataclass_json import Range, to_plain

_FIGURE = Range(-1e12, 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class GetVerdict:
    """Which verdict, and whether to wait for it.

    Attributes:
        name: name of the rollout.
        wait: seconds after which the answer is `undecided`.
    """

    name: str
    wait: WaitSeconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddEvidence:
    """Evidence for a gate that the rollout has declared: a value, or a statement.

    Attributes:
        name: name of the rollout.
        gate: name of the gate.
        statement: the judge's own verdict, in place of a value.
        value, reference: figure with the release, and without it.
        low, high: interval of the value.
        samples: number of samples behind the value.
        reason: a sentence to show.
    """

    name: str
    gate: str
    statement: Literal["", "pass", "stop"] = ""
    value: Annotated[float | None, _FIGURE] = None
    reference: Annotated[float | None, _FIGURE] = None
    low: Annotated[float | None, _FIGURE] = None
    high: Annotated[float | None, _FIGURE] = None
    samples: Annotated[int | None, Range(0, 1 << 50)] = None
    reason: str = ""


@endpoint(
    "GET",
    "/rollouts/{name}/verdict",
    scope="read",
    summary="Return the verdict on a rollout, at once or when it is decided.",
    is_done=lambda _request, answer: answer.verdict != "undecided",
)
def get_verdict(fleet: Fleet, _principal: Principal, request: GetVerdict) -> RolloutVerdict:
    return verdicts.find_verdict(fleet.store, request.name)


@endpoint(
    "POST",
    "/rollouts/{name}/evidence",
    scope="evidence",
    summary="Add evidence of an outside judge to a rollout that has declared a gate for it.",
    status=201,
)
def add_evidence(fleet: Fleet, principal: Principal, request: AddEvidence) -> OutsideFinding:
    plain = to_plain(request)
    return verdicts.add_evidence(fleet.store, plain.pop("name"), Evidence(**plain), principal.name)
