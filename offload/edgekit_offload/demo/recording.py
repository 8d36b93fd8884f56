"""The recording of a demo with its phases and requests, and figures computed from it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Final, Literal, TypeAlias

Event: TypeAlias = Literal["link", "load", "kill"]
EDGEKIT: Final = "edgekit"


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the demo. The state of link and server does not change during a phase.

    Attributes:
        event: The event at the start of the phase.
        mbit_s: The bandwidth of the link in each direction.
        share: The fraction of the demo's duration.
    """

    title: str
    event: Event
    mbit_s: float
    rtt_ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, as measured on the device.

    Attributes:
        at_s: The start of the request in seconds, relative to the start of the first phase.
        policy: `edgekit`, or the name of the plan that was forced.
        plan: The plan that gave the answer, empty if there was no answer.
        latency_s: The time until the answer, infinite if there was none.
        is_right: Whether the answer equals that of the whole model, within the tolerance of the plan.
        reason: The reason why edgekit chose this plan. It is set only for `edgekit`.
    """

    at_s: float
    policy: str
    plan: str
    latency_s: float
    is_right: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """A phase with its start and its end. The end of the current phase is updated while it runs."""

    phase: Phase
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    at_s: float
    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The recording of a demo up to now.

    Attributes:
        label: How the machines and the link are emulated.
        plans: The names of the plans that were forced, `local` first.
        begun: The phases up to now, in order.
        requests: The requests, in order of their start.
    """

    model: str
    machine: str = ""
    label: str = ""
    plans: tuple[str, ...] = ()
    begun: tuple[PhaseTimes, ...] = ()
    requests: tuple[Request, ...] = ()
    is_over: bool = False

    @property
    def own(self) -> list[Request]:
        return [request for request in self.requests if request.policy == EDGEKIT]

    @property
    def wrong(self) -> int:
        """The number of edgekit's requests with a wrong answer or without an answer."""
        return sum(not request.is_right for request in self.own)

    def within(self, phase: PhaseTimes, policy: str) -> list[float]:
        """Return the latencies of a policy in a phase in seconds, infinite for requests without an answer."""
        return [
            request.latency_s
            for request in self.requests
            if request.policy == policy and phase.begin_s <= request.at_s < phase.end_s
        ]

    def oracle(self, phase: PhaseTimes) -> tuple[str, float] | None:
        """Return the forced plan with the lowest median latency in a phase, and this latency in seconds.

        Return None if a plan had no request in the phase, because it might be the best, or if no plan
        answered.
        """
        latencies = [(self.within(phase, policy), policy) for policy in self.plans]
        if not latencies or not all(values for values, _ in latencies):
            return None
        value, policy = min((statistics.median(values), policy) for values, policy in latencies)
        return (policy, value) if math.isfinite(value) else None

    def switches(self) -> Iterator[Switch]:
        """Yield each change of the plan that answers edgekit's requests.

        The name `no answer` means that no plan has answered.
        """
        runs = [(plan, next(group)) for plan, group in groupby(self.own, key=lambda request: request.plan)]
        for (before, _), (after, first) in pairwise(runs):
            yield Switch(first.at_s, before or "no answer", after or "no answer", first.reason)

    def mean_to_oracle(self) -> float | None:
        """Return the ratio of edgekit's mean latency to the mean latency with the best plan of each phase.

        Phases in which `oracle` returns None are ignored. Return None if no phase remains, or if one of
        edgekit's requests in these phases has no answer.
        """
        own, ideal = 0.0, 0.0
        for phase in self.begun:
            latencies, oracle = self.within(phase, EDGEKIT), self.oracle(phase)
            if latencies and oracle is not None:
                own += sum(latencies)
                ideal += oracle[1] * len(latencies)
        return own / ideal if ideal > 0 and math.isfinite(own) else None


def median_of(latencies: Sequence[float]) -> float | None:
    return statistics.median(latencies) if latencies else None


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the percentile of the values at `share` (0 to 1), or None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def to_json(recording: Recording) -> dict[str, Any]:
    """Return a recording as JSON values. The latency of a request without an answer is null."""
    plain = asdict(recording)
    for request in plain["requests"]:
        if math.isinf(request["latency_s"]):
            request["latency_s"] = None
    oracles = [recording.oracle(phase) for phase in recording.begun]
    return {
        **plain,
        "oracles": oracles,
        "mean_to_oracle": recording.mean_to_oracle(),
        "wrong": recording.wrong,
        "switches": [asdict(switch) for switch in recording.switches()],
    }
