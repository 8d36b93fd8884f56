"""Endpoints of verdicts on rollouts, and of the evidence of outside judges."""

from dataclasses import dataclass

from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import Fleet, WaitSeconds, endpoint
from edgekit_fleet.operations import verdicts
from edgekit_fleet.rollouts.outside_gates import Evidence, OutsideFinding, StatedEvidence
from edgekit_fleet.rollouts.verdict import RolloutVerdict
from edgekit_runtime.dataclass_json import to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class GetVerdict:
    """The rollout whose verdict to return, and how long to wait for it.

    Attributes:
        name: The name of the rollout.
        wait: The maximum time to wait, in seconds. After that, the verdict is `undecided`.
    """

    name: str
    wait: WaitSeconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddEvidence(StatedEvidence):
    """Evidence for a gate with an outside judge, which the rollout has declared.

    Attributes:
        name: The name of the rollout.
    """

    name: str


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
