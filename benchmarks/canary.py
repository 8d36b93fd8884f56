"""What canaries, the response cache and drift statistics cost a call; how often a canary's verdict is wrong.

    python benchmarks/canary.py cost [--rounds N]
    python benchmarks/canary.py verdicts [--runs N] [--samples N] [--alpha A]

`cost` gives microseconds of processor time per call on top of a lane that answers at once, so that other work
on the machine does not count. `verdicts` simulates candidates with fixed seeds, with latencies that are
independent, and such that drift together, as under real load. `canary_identical.py` asks a whole service.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.service.rollout.canary_lane import CanaryLane
from edgekit_runtime.service.rollout.gates import Continue, Observations, Promote, Rollback, judge
from edgekit_runtime.service.rollout.observer import Observer
from edgekit_runtime.service.rollout.paired_runs import Pair, TakePair
from edgekit_runtime.service.rollout.shadow_lane import ShadowLane
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.drift_lane import DriftLane
from edgekit_runtime.service.scheduling.response_cache import CacheLane, ResponseCache
from edgekit_runtime.tensors import TensorSpec
from results import make_parser, print_head

IMAGE = TensorSpec("image", "float32", ("N", 3, 32, 32))
LOGITS = TensorSpec("logits", "float32", ("N", 10))
CALLS = 4000
LOOP = asyncio.new_event_loop()  # no call here has a deadline, so nothing happens on it
REFERENCE: dict[str, Any] = {
    "reference": {
        "inputs": {
            "image": {
                "low": 0.0,
                "high": 1.0,
                "edges": [place / 10 for place in range(1, 10)],
                "shares": [0.1] * 10,
            }
        },
        "outputs": {"logits": {"probabilities": False, "confidence": [0.1] * 10, "classes": [0.1] * 10}},
    }
}


class Instant:
    """A lane that has its answers ready."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.answers = [{"logits": rng.normal(0, 3, (1, 10)).astype(np.float32)} for _ in range(64)]
        self.count = 0

    def submit(self, call: Call) -> None:
        self.count += 1
        call.reply(self.answers[self.count & 63])


class NoPairs:
    """Pairs that cost nothing: each is there at once."""

    def may_start(self) -> bool:
        return True

    def start(self, _inputs: Any, done: TakePair) -> None:
        done(Pair(1.0, 1e-4, 1e-4))


class Later:
    """Calls that were put off, made between the measured calls of one round."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def __call__(self, _seconds: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        while self.calls:
            waiting, self.calls = self.calls, []
            for call in waiting:
                call()


def make_lanes() -> dict[str, tuple[Lane, Later]]:
    """Every lane that is measured, in front of one that answers at once; gates that never decide."""
    gates = Gates(min_samples=10**9, max_p50_ratio=0, max_p99_ratio=0, min_agreement=0)
    lanes: dict[str, tuple[Lane, Later]] = {"bare": (Instant(), Later())}
    for share in (0.01, 0.1, 0.5):
        later = Later()
        watch = Observer(gates, lambda _verdict: None, defer=later)
        canary = CanaryLane(
            *(Instant(), Instant(), watch, NoPairs()),
            options=CanaryOptions(share=share),
        )
        lanes[f"canary {share:.0%}"] = (canary, later)
    for share in (0.01, 0.1):
        later = Later()
        watch = Observer(gates, lambda _verdict: None, defer=later)
        options = ShadowOptions(share=share, quiet_s=0.0)
        shadow = ShadowLane(Instant(), Instant(), watch, NoPairs(), options=options, defer=later)
        lanes[f"shadow {share:.0%}"] = (shadow, later)
    lanes["cache, every call new"] = (CacheLane(ResponseCache(), Instant(), LOOP), Later())
    lanes["cache, every call known"] = (CacheLane(ResponseCache(), Instant(), LOOP), Later())
    lanes["drift"] = (DriftLane(Drift([IMAGE], [LOGITS], REFERENCE), Instant()), Later())
    return lanes


def measure(lane: Lane, later: Later, images: Sequence[Any]) -> float:
    """Microseconds of processor time per call, what was put off included."""

    def reply(_answer: Answer) -> None:
        pass

    calls = [Call({"image": image}, reply) for image in images]
    submit = lane.submit
    begin = time.process_time()
    for call in calls:
        submit(call)
        if later.calls:
            later.run()
    return (time.process_time() - begin) / len(calls) * 1e6


def print_costs(rounds: int) -> None:
    rng = np.random.default_rng(1)
    content = rng.random((CALLS, 1, 3, 32, 32), np.float32)
    # As they come from a receive buffer: views that do not own their values.
    new = [content[place] for place in range(CALLS)]
    known = [content[place % 16] for place in range(CALLS)]
    lanes = make_lanes()
    found: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(rounds):
        for name, (lane, later) in lanes.items():
            found[name].append(measure(lane, later, known if name.endswith("known") else new))
        content += 1e-3  # other inputs for the cache
    bare = statistics.median(found["bare"])
    print_head("lane", "us per call")
    for name, values in found.items():
        own = statistics.median(values) - (0 if name == "bare" else bare)
        print(f"| {name} | {own:.2f} |" if name == "bare" else f"| {name} | +{own:.2f} |")
    observed = Observations()
    for _ in range(5000):
        for arm in (observed.current, observed.candidate):
            arm.answers += 1
            arm.latency.add(float(rng.lognormal(-8, 0.3)))
        observed.paired.add(*rng.lognormal(-8, 0.3, 2), 1.5)
        observed.agreement, observed.compared = observed.agreement + 1, observed.compared + 1
    begin = time.process_time()
    for _ in range(200):
        judge(observed, Gates())
    print(f"| one look of 5,000 answers, every 313th | {(time.process_time() - begin) / 200 * 1e6:.0f} |")


# What is simulated: share of agreement, of failures, and latency of the candidate over the current version's.
GATES = {"min_agreement": 0.95, "max_extra_errors": 0.01, "max_p50_ratio": 1.25, "max_p99_ratio": 1.5}
CANDIDATES: Mapping[str, Mapping[str, float]] = {
    "keeps all limits with room": {"agreement": 0.99, "failing": 0.001, "slower": 1.0},
    "at the edge of agreement": {"agreement": 0.95, "slower": 1.0},
    "at the edge of errors": {"failing": 0.01, "slower": 1.0},
    "at the edge of p50": {"slower": 1.25},
    "agrees too seldom by 1 point": {"agreement": 0.94},
    "agrees too seldom by 5 points": {"agreement": 0.90},
    "fails in 3 % more": {"failing": 0.04},
    "fails in 10 % more": {"failing": 0.11},
    "slower by 30 %": {"slower": 1.30},
    "slower by 60 %": {"slower": 1.60},
    "four times as slow in 3 % of calls": {"tail": 4.0},
}


def latencies(rng: np.random.Generator, samples: int, *, together: bool) -> Any:
    """Seconds [2, samples] of both versions; where they drift together, with a memory of about 200 calls."""
    noise = rng.normal(0, 0.2, (2, samples))
    if together:
        load = np.zeros(samples)
        for place in range(1, samples):
            load[place] = 0.995 * load[place - 1] + rng.normal(0, 0.03)
        noise += load
    return np.exp(-8 + noise)


def simulate(gates: Gates, seed: int, samples: int, fault: Mapping[str, float], *, together: bool) -> Any:
    """The first verdict, looking when the service would, and after how many answers it fell."""
    rng = np.random.default_rng(seed)
    current_s, candidate_s = latencies(rng, samples, together=together) * [[1], [fault.get("slower", 1.0)]]
    candidate_s *= np.where(rng.random(samples) < 0.03, fault.get("tail", 1.0), 1.0)
    agrees = rng.random(samples) < fault.get("agreement", 0.99)
    fails = rng.random(samples) < fault.get("failing", 0.0)
    observed = Observations()
    current, candidate = observed.current, observed.candidate
    look = 32
    for place in range(samples):
        current.answers += 1
        current.latency.add(float(current_s[place]))
        candidate.answers += 1
        if fails[place]:
            candidate.failed += 1
        else:
            candidate.latency.add(float(candidate_s[place]))
            if place % 4 == 0:  # as the service does
                observed.agreement += float(agrees[place])
                observed.compared += 1
                pair_s = float(current_s[place]), float(candidate_s[place])
                observed.paired.add(*pair_s, gates.max_p99_ratio)
        if place + 1 >= look:
            look = place + 1 + max(32, (place + 1) // 16)  # as the service does
            verdict = judge(observed, gates)
            if not isinstance(verdict, Continue):
                return verdict, place + 1
    return Continue(()), samples


def print_verdicts(runs: int, samples: int, alpha: float) -> None:
    gates = Gates(**GATES, alpha=alpha, max_duration_s=1e9)  # type: ignore[arg-type]
    print(f"alpha {alpha:g}, {runs} runs of up to {samples} answers each\n")
    print_head("candidate | load | promoted | rolled back | undecided | answers to the verdict (median)")
    for name, fault in CANDIDATES.items():
        for together in (False, True):
            found = [simulate(gates, seed, samples, fault, together=together) for seed in range(runs)]
            kinds = [type(verdict) for verdict, _ in found]
            decided = [count for verdict, count in found if not isinstance(verdict, Continue)]
            counts = " | ".join(f"{kinds.count(kind) / runs:.1%}" for kind in (Promote, Rollback, Continue))
            median = f"{statistics.median(decided):.0f}" if decided else "-"
            print(f"| {name} | {'drifts' if together else 'even'} | {counts} | {median} |", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cost").add_argument("--rounds", type=int, default=9)
    verdicts = commands.add_parser("verdicts")
    verdicts.add_argument("--runs", type=int, default=300)
    verdicts.add_argument("--samples", type=int, default=4000)
    verdicts.add_argument("--alpha", type=float, default=0.01)
    given = parser.parse_args()
    if given.command == "cost":
        print_costs(given.rounds)
    else:
        print_verdicts(given.runs, given.samples, given.alpha)


if __name__ == "__main__":
    main()
