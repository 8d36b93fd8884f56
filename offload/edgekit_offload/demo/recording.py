"""The course of a demo: phases, requests, and figures computed from them. Without input or output."""

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
    """A part of the demo with one state of link and server.

    Attributes:
        event: what happens at its begin.
        mbit_s: bandwidth that the link is set to, each way.
        share: share of the demo's duration.
    """

    title: str
    event: Event
    mbit_s: float
    rtt_ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, as measured on the device.

    Attributes:
        at_s: begin of the request, in seconds from the start of the first phase.
        policy: `edgekit`, or the plan that was forced.
        plan: the plan that gave the answer; empty if there was no answer.
        latency_s: time until the answer; infinity if there was none.
        is_right: whether the answer equals the whole model's, within the tolerance of its plan.
        reason: why edgekit chose this plan, in words; only for `edgekit`.
    """

    at_s: float
    policy: str
    plan: str
    latency_s: float
    is_right: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """A phase with the times of its begin and, once it is over, its end."""

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
    """The demo so far.

    Attributes:
        label: how the machines and the link are emulated.
        plans: names of the plans that were forced, `local` first.
        begun: phases, in order; the last one may still go on.
        requests: requests, in the order of their begin.
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
        """The number of edgekit's requests with a wrong answer or none."""
        return sum(not request.is_right for request in self.own)

    def within(self, phase: PhaseTimes, policy: str) -> list[float]:
        """Return the latencies of a policy in a phase, in seconds; infinity if there was no answer."""
        return [
            request.latency_s
            for request in self.requests
            if request.policy == policy and phase.begin_s <= request.at_s < phase.end_s
        ]

    def oracle(self, phase: PhaseTimes) -> tuple[str, float] | None:
        """Return (plan, seconds) of the forced plan with the least median latency in a phase.

        None if a plan had no request in the phase, since that plan may be the best, or if no plan answers.
        """
        latencies = [(self.within(phase, policy), policy) for policy in self.plans]
        if not latencies or not all(values for values, _ in latencies):
            return None
        value, policy = min((statistics.median(values), policy) for values, policy in latencies)
        return (policy, value) if math.isfinite(value) else None

    def switches(self) -> Iterator[Switch]:
        """Yield each change of the plan that gives edgekit's answers; `no answer` stands for none."""
        runs = [(plan, next(group)) for plan, group in groupby(self.own, key=lambda request: request.plan)]
        for (before, _), (after, first) in pairwise(runs):
            yield Switch(first.at_s, before or "no answer", after or "no answer", first.reason)

    def mean_to_oracle(self) -> float | None:
        """Return edgekit's mean latency as a multiple of the oracle's, over the phases that have an oracle.

        None if no phase has one, or a request of edgekit in these phases has no answer.
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
    """Return the value below which `share` (0 to 1) of all values lie; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def to_json(recording: Recording) -> dict[str, Any]:
    """Return a recording as values of JSON; the latency of a request without an answer is null."""
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
