"""How fast the choice of a plan follows a link that changes, beside simpler rules.

    scripts/python benchmarks/offload_adaptation.py
        [--requests 12 | --trace 4g|wifi|train] [--json FILE]

At most 4 minutes, with `--trace` too. It needs root for the emulated device (10 % of a processor) and link.
The model is that of the demo, two of them on one image: 320 x 320 pixels, 8 billion operations; all of it
runs on the device, or the pixels are sent (307 kB).

The link goes 20 -> 2 -> 20 Mbit/s with a round trip of 20 ms. Each rule goes through it alone, one request
after the other with pauses of 50 ms:

- edgekit: the session of `open_session` with the package as it was planned and signed;
- static: the plan that is best on the first link, for ever;
- send() timed: bandwidth is what was sent by the time that `send` took;
- plain EWMA: bandwidth is what was sent by the time of the request without the round trip, smoothed by 1/8;
- oracle: the plan with the lowest measured median on the link as it is set.

With `--trace` the link follows a synthetic trace of half a minute instead, a second at a time, and each rule
sends as many requests as it can. The oracle is then the plan that is predicted to be best on the true link.

The rules but edgekit run sessions of packages with one plan. After a change counted are the requests until
the first with the oracle's plan, and the switches of plan. Right: all outputs within 10 %
of the whole model's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from tests.offload.traces import TRACE_KINDS, TraceStep, make_trace

from edgekit_offload.demo.demo_model import make_images, make_model
from edgekit_runtime.offload.latency_model import Conditions, LinkState, predict_s
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan
from offload_product import ALL, ROWS, UINT8, ProductBench, describe_load, whole_bench
from results import make_parser, print_table, write_json

SHARE: Final = 0.1
STEPS_MBIT_S: Final = (20.0, 2.0, 20.0)
RTT_MS: Final = 20.0
PAUSE_S: Final = 0.05
CALIBRATION: Final = 3  # requests of each plan on each link, of which the first warms up
START_LIMIT_S: Final = 20.0
TRACE_S: Final = 30
SEED: Final = 0  # of the trace
EDGEKIT, STATIC, SEND, EWMA, ORACLE = "edgekit", "static", "send() timed", "plain EWMA", "oracle"
RULES: Final = (EDGEKIT, STATIC, SEND, EWMA, ORACLE)


class Rule:
    """The fastest plan at an estimated bandwidth: fixed, of the last `send`, or smoothed."""

    def __init__(
        self, name: str, plans: Mapping[str, OffloadPlan], best: Mapping[float, str], rtt_ms: float = RTT_MS
    ) -> None:
        """Begin with the first link: that of the first key of `best`."""
        self.name, self._plans, self._best = name, plans, best
        self._first = next(iter(best))
        self._link = LinkState(self._first * 1e6, self._first * 1e6, rtt_ms / 1e3)

    def choose(self, mbit_s: float) -> str:
        """Return the session that runs the next request; only the oracle looks at the link."""
        if self.name in (EDGEKIT, ORACLE):
            return ALL if self.name == EDGEKIT else self._best[mbit_s]
        if self.name == STATIC:
            return self._best[self._first]
        return min(self._plans, key=lambda one: predict_s(self._plans[one], Conditions(self._link)))

    def note(self, found: Mapping[str, Any]) -> None:
        plan = self._plans[found["plan"]]
        if plan.tail is None or "error" in found:
            return
        bits = plan.costs.upload_bytes * 8
        if self.name == SEND:
            rate = bits / max(found["send_s"], 1e-6)
        else:
            moving_s = found["s"] - plan.costs.device_s - plan.costs.server_s - self._link.rtt_s
            rate = 0.875 * self._link.up_bits_per_s + 0.125 * bits / max(moving_s, 1e-3)
        self._link = replace(self._link, up_bits_per_s=rate, down_bits_per_s=rate)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=12, help="of each rule on each step")
    parser.add_argument("--trace", choices=list(TRACE_KINDS), help="instead of the three steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s, load = time.monotonic(), describe_load()
    images, medians = make_images(ROWS), dict[float, dict[str, float]]()
    link = STEPS_MBIT_S[0], RTT_MS
    with whole_bench("demo", make_two(images), images, SHARE, link) as (bench, planned):
        if arguments.trace is not None:
            found = follow(bench, planned.plans, make_trace(arguments.trace, TRACE_S, seed=SEED))
            rows = summarise(found)
        else:
            medians = calibrate(bench)
            best = {mbit_s: min(each, key=lambda one: each[one]) for mbit_s, each in medians.items()}
            found = {
                name: run_steps(bench, Rule(name, planned.plans, best), arguments.requests) for name in RULES
            }
            rows = summarise(found, best)
        label = bench.testbed.label
    if arguments.trace is not None:
        label += f"; synthetic trace '{arguments.trace}'"
    seconds = time.monotonic() - began_s
    show(label, load, medians, rows, seconds)
    document = {"label": label, "load": load, "medians_s": medians, "rows": rows, "requests": found}
    write_json(arguments.json, {**document, "seconds": seconds})


def make_two(images: NDArray[np.uint8]) -> bytes:
    """Return two models of the demo on one image: twice the work for the same upload."""
    one, other = (
        onnx.compose.add_prefix(
            onnx.load_from_string(make_model(images, seed)), f"m{seed}_", rename_inputs=False
        )
        for seed in (0, 1)
    )
    for field in ("node", "initializer", "output"):
        getattr(one.graph, field).extend(getattr(other.graph, field))
    content: bytes = one.SerializeToString()
    return content


def calibrate(bench: ProductBench) -> dict[float, dict[str, float]]:
    medians: dict[float, dict[str, float]] = {}
    for mbit_s in dict.fromkeys(STEPS_MBIT_S):
        bench.set_link(mbit_s, RTT_MS)
        medians[mbit_s] = {}
        for plan in (LOCAL, UINT8):
            records = bench.order("run", name=plan, count=CALIBRATION, pause_s=PAUSE_S)[1:]
            medians[mbit_s][plan] = float(np.median([one["s"] for one in records]))
    return medians


def run_steps(bench: ProductBench, rule: Rule, requests: int) -> list[dict[str, Any]]:
    bench.set_link(STEPS_MBIT_S[0], RTT_MS)
    if rule.name == EDGEKIT:
        bench.order("wait_for_server", name=ALL, seconds=START_LIMIT_S)
    found = []
    for step, mbit_s in enumerate(STEPS_MBIT_S):
        bench.set_link(mbit_s, RTT_MS)
        for _ in range(requests):
            (record,) = bench.order("run", name=rule.choose(mbit_s), count=1, pause_s=PAUSE_S)
            if rule.name != EDGEKIT:
                rule.note(record)
            found.append({**record, "step": step})
    return found


def follow(
    bench: ProductBench, plans: Mapping[str, OffloadPlan], trace: Sequence[TraceStep]
) -> dict[str, list[dict[str, Any]]]:
    best = {
        one.up_mbit_s: min(plans, key=lambda name: predict_s(plans[name], Conditions(link)))
        for one in trace
        for link in [LinkState(one.up_mbit_s * 1e6, one.down_mbit_s * 1e6, one.rtt_ms / 1e3)]
    }
    found = {}
    for name in RULES:
        set_step(bench, trace[0])
        if name == EDGEKIT:
            bench.order("wait_for_server", name=ALL, seconds=START_LIMIT_S)
        found[name] = run_trace(bench, Rule(name, plans, best, trace[0].rtt_ms), trace)
    return found


def run_trace(bench: ProductBench, rule: Rule, trace: Sequence[TraceStep]) -> list[dict[str, Any]]:
    """Return the requests of a rule along a trace; the link changes between two requests."""
    found: list[dict[str, Any]] = []
    began_s, at = time.monotonic(), -1
    while (second := int(time.monotonic() - began_s)) < len(trace):
        if second != at:
            at = second
            set_step(bench, trace[at])
        name = rule.choose(trace[at].up_mbit_s)
        (record,) = bench.order("run", name=name, count=1, pause_s=PAUSE_S)
        rule.note(record)
        found.append({**record, "step": at})
    return found


def set_step(bench: ProductBench, step: TraceStep) -> None:
    if step.up_mbit_s:
        bench.testbed.set_link(up_mbit_s=step.up_mbit_s, down_mbit_s=step.down_mbit_s, rtt_ms=step.rtt_ms)
    else:
        bench.testbed.block()


def summarise(
    found: Mapping[str, Sequence[Mapping[str, Any]]], best: Mapping[float, str] | None = None
) -> dict[str, Any]:
    """Return the figures of each rule; with `best`, also how it followed the three steps."""
    means = {name: float(np.mean([one["s"] for one in each])) for name, each in found.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, each in found.items():
        plans = [one["plan"] for one in each]
        rows[name] = {
            "requests": len(each),
            "switches": sum(one != other for one, other in pairwise(plans)),
            "mean_ms": means[name] * 1e3,
            "against_oracle": means[name] / means[ORACLE],
            "right": float(np.mean([one["is_right"] for one in each])),
            "hedged": sum(one.get("is_hedged", False) for one in each),
        }
        if best is not None:
            rows[name] |= count_steps(each, best)
    return rows


def count_steps(each: Sequence[Mapping[str, Any]], best: Mapping[float, str]) -> dict[str, Any]:
    """Return for both changes of the link how many requests and switches of plan they took."""
    until, switches = [], []
    for step in range(1, len(STEPS_MBIT_S)):
        plans = [one["plan"] for one in each if one["step"] == step]
        before = [one["plan"] for one in each if one["step"] == step - 1][-1]
        wanted = best[STEPS_MBIT_S[step]]
        until.append(plans.index(wanted) + 1 if wanted in plans else None)
        switches.append(sum(one != other for one, other in pairwise([before, *plans])))
    return {"requests_until": until, "switches": switches}


def show(
    label: str,
    load: str,
    medians: Mapping[float, Mapping[str, float]],
    rows: Mapping[str, Any],
    seconds: float,
) -> None:
    print(f"{label}; before: {load}; after: {describe_load()}; {seconds:.0f} s")
    for mbit_s, each in medians.items():
        print(f"{mbit_s:g} Mbit/s: " + ", ".join(f"{name} {one * 1e3:.0f} ms" for name, one in each.items()))
    keys = list(rows[EDGEKIT])
    print_table(["rule", *keys], [[name, *(row[key] for key in keys)] for name, row in rows.items()])
    print("goals for edgekit: at most 2 requests, 1 switch a step, 1.15 x the oracle, all answers right")


if __name__ == "__main__":
    main()
