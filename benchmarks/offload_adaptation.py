"""How fast each rule for the choice of a plan follows a link that changes.

    PYTHONPATH=device_runtime:toolkit:offload .venv/bin/python benchmarks/offload_adaptation.py
        [--model efficientnet_lite0] [--requests 20] [--trace 40] [--json FILE]

At most 4 minutes. It needs root for the emulated device (10 % of a processor) and link, and ../shared/models.

The link goes 20 -> 2 -> 20 Mbit/s, and then through each synthetic trace (`emulation/traces.py`). At every
step each rule in turn answers one request, so that noise hits all alike. All know the first link. Rules:

- edgekit: `remote/choose.py` on the estimate of `remote/link_estimate.py`; after a local request it sends a
  probe, which is a real request of the cut with the least upload, and whose time counts for nobody;
- static: the plan that is best on the first link, for ever;
- send() timed: bandwidth is what was sent by the time that `send` took;
- plain EWMA: bandwidth is what was sent by the time of the request without the round trip, smoothed by 1/8;
- oracle: the best plan of the link as it is set, by measured medians (on traces: by predictions).

After a change counted are the requests until the first with the oracle's plan, and the switches of plan.
"""

import telemetry_off  # noqa: F401

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edgekit_offload.emulation.traces import TRACE_KINDS, make_trace
from edgekit_runtime.remote.cut_table import CutTable, OffloadPlan
from edgekit_runtime.remote.latency_model import Conditions, LinkState, predict_s
from offload_bench import OffloadBench, print_table, write_json
from offload_prediction import (
    HEAD_ROUNDS,
    MODELS,
    TOLERANCE,
    make_probes,
    measure_transport,
    plan_model,
    tail_feeds,
)

SHARE = 0.1  # of a processor: at 0.2 the device is the fastest at both bandwidths
STEPS_MBIT_S = (20.0, 2.0, 20.0)
RTT_S = 0.02
CALIBRATION_S = 6.0
LEAST_MBIT_S = 0.5


class Rule(Protocol):
    """How a plan is chosen."""

    name: str

    def choose(self, link: LinkState) -> OffloadPlan:
        """Return the plan of the next request; only the oracle looks at the link."""

    def note(self, plan: OffloadPlan, found: Mapping[str, Any]) -> None:
        """Take what a request took."""


class EdgekitRule:
    """What the runtime does, here without its threads."""

    name = "edgekit"

    def __init__(self, table: CutTable, link: LinkState) -> None:
        from edgekit_runtime.remote.choose import choose
        from edgekit_runtime.remote.link_estimate import Exchange, LinkEstimate

        self._choose, self._exchange = choose, Exchange
        self._table, self._estimate = table, LinkEstimate()
        self._decision: Any = None
        now_s = time.monotonic()
        self._estimate.note_round_trip(now_s, link.rtt_s)
        self._estimate.note(now_s, self._exchange(1e6, 0.0, 8e6 / link.up_bits_per_s + link.rtt_s, 0.0))

    def choose(self, link: LinkState) -> OffloadPlan:  # noqa: ARG002  # only the oracle looks at it
        conditions = Conditions(self._estimate.state(time.monotonic()))
        self._decision = self._choose(self._table, conditions, self._decision)
        plan: OffloadPlan = self._decision.plan
        return plan

    def note(self, plan: OffloadPlan, found: Mapping[str, Any]) -> None:
        if plan.tail is not None and "error" not in found:
            costs = plan.costs
            moving_s = found["s"] - costs.device_s
            self._estimate.note(
                time.monotonic(),
                self._exchange(costs.upload_bytes, costs.download_bytes, moving_s, costs.server_s),
            )

    @property
    def probe(self) -> OffloadPlan:
        """The plan with the least upload."""
        remote = [plan for plan in self._table.plans if plan.tail is not None]
        return min(remote, key=lambda plan: plan.costs.upload_bytes)


class RateRule:
    """The fastest plan at an estimated bandwidth: fixed, of the last `send`, or smoothed."""

    def __init__(self, name: str, table: CutTable, link: LinkState) -> None:
        self.name, self._table, self._link = name, table, link

    def choose(self, link: LinkState) -> OffloadPlan:  # noqa: ARG002  # only the oracle looks at it
        return best_plan(self._table, self._link)

    def note(self, plan: OffloadPlan, found: Mapping[str, Any]) -> None:
        if plan.tail is None or self.name == "static" or "error" in found:
            return
        bits = plan.costs.upload_bytes * 8
        if self.name == "send() timed":
            rate = bits / max(found["send_s"], 1e-6)
        else:
            moving_s = found["s"] - plan.costs.device_s - plan.costs.server_s - self._link.rtt_s
            rate = 0.875 * self._link.up_bits_per_s + 0.125 * bits / max(moving_s, 1e-3)
        self._link = replace(self._link, up_bits_per_s=rate, down_bits_per_s=rate)


class OracleRule:
    """The best plan of the link as it is set."""

    name = "oracle"

    def __init__(self, table: CutTable, measured: Mapping[float, str]) -> None:
        self._table, self._measured = table, measured

    def choose(self, link: LinkState) -> OffloadPlan:
        name = self._measured.get(link.up_bits_per_s)
        if name is None:
            return best_plan(self._table, link)
        return next(plan for plan in self._table.plans if plan.name == name)

    def note(self, plan: OffloadPlan, found: Mapping[str, Any]) -> None:
        """Learn nothing."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="efficientnet_lite0", choices=list(MODELS))
    parser.add_argument("--requests", type=int, default=20, help="of each rule on each step")
    parser.add_argument("--trace", type=int, default=40, help="seconds of each trace, a request each")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began_s = time.monotonic()
    feeds, ways, costs, whole = plan_model(arguments.model, [2, 20], [RTT_S * 1e3])
    with tempfile.TemporaryDirectory() as folder, OffloadBench(Path(folder), SHARE) as bench:
        probes = make_probes()
        for way in ways:
            if way.tail is not None:
                bench.add_tail(way.tail_name or "", way.tail, tail_feeds(way, feeds))
        for way, probe_feeds in probes:
            bench.add_tail(way.tail_name or "", way.tail or b"", probe_feeds)
        bench.serve()
        bench.start_device()
        transport_s, _ = measure_transport(bench, probes)
        bench.load(whole, ways, feeds, TOLERANCE)
        names = [way.name for way in ways]
        heads = bench.order("time_heads", ways=names, rounds=HEAD_ROUNDS, pause_s=0.02)
        plans = tuple(
            OffloadPlan(
                way.name,
                replace(
                    costs[way.name],
                    device_s=heads.get(way.name, 0.0) + (transport_s if way.tail is not None else 0.0),
                ),
                tail=way.tail_name,
            )
            for way in ways
        )
        table = CutTable(plans)
        found = {"20-2-20": run_steps(bench, table, names, arguments.requests)}
        for kind in TRACE_KINDS:
            found[kind] = run_trace(bench, table, kind, arguments.trace)
        label = bench.testbed.label
    show(label, found, time.monotonic() - began_s)
    write_json(arguments.json, {"label": label, "model": arguments.model, "runs": found})


def best_plan(table: CutTable, link: LinkState) -> OffloadPlan:
    """Return the plan with the least predicted latency."""
    return min(table.plans, key=lambda plan: predict_s(plan, Conditions(link)))


def set_link(bench: OffloadBench, mbit_s: float, rtt_s: float) -> LinkState:
    """Change the link."""
    bench.testbed.set_link(up_mbit_s=mbit_s, down_mbit_s=mbit_s, rtt_ms=rtt_s * 1e3)
    return LinkState(mbit_s * 1e6, mbit_s * 1e6, rtt_s)


def make_rules(table: CutTable, link: LinkState, measured: Mapping[float, str]) -> list[Rule]:
    """Return all rules, which know the first link."""
    rates = [RateRule(name, table, link) for name in ("static", "send() timed", "plain EWMA")]
    return [EdgekitRule(table, link), *rates, OracleRule(table, measured)]


def run_steps(bench: OffloadBench, table: CutTable, names: list[str], requests: int) -> dict[str, Any]:
    """Return what each rule took on the steps of bandwidth."""
    measured: dict[float, str] = {}
    for mbit_s in dict.fromkeys(STEPS_MBIT_S):
        set_link(bench, mbit_s, RTT_S)
        rounds = bench.order(
            "rounds", ways=names, seconds=CALIBRATION_S, least=3, way_seconds=CALIBRATION_S / len(names)
        )
        medians = {name: float(np.median([one["s"] for one in rounds[name]])) for name in names}
        measured[mbit_s * 1e6] = min(medians, key=lambda name: medians[name])
    link = set_link(bench, STEPS_MBIT_S[0], RTT_S)
    rules = make_rules(table, link, measured)
    rows: dict[str, list[dict[str, Any]]] = {rule.name: [] for rule in rules}
    for number, mbit_s in enumerate(STEPS_MBIT_S):
        link = set_link(bench, mbit_s, RTT_S)
        for _ in range(requests):
            ask_all(bench, rules, link, rows, number)
    found = summarise(rows)
    for name, each in rows.items():
        found[name] |= count_changes(each, [measured[mbit_s * 1e6] for mbit_s in STEPS_MBIT_S])
    return found


def run_trace(bench: OffloadBench, table: CutTable, kind: str, seconds: int) -> dict[str, Any]:
    """Return what each rule took on a trace, without the seconds below 0.5 Mbit/s: nothing is hedged here."""
    trace = make_trace(kind, seconds, seed=0)
    trace = tuple(step for step in trace if step.up_mbit_s >= LEAST_MBIT_S)
    link = set_link(bench, trace[0].up_mbit_s, trace[0].rtt_ms / 1e3)
    rules = make_rules(table, link, {})
    rows: dict[str, list[dict[str, Any]]] = {rule.name: [] for rule in rules}
    for number, step in enumerate(trace):
        link = set_link(bench, step.up_mbit_s, step.rtt_ms / 1e3)
        ask_all(bench, rules, link, rows, number)
    return summarise(rows)


def ask_all(
    bench: OffloadBench,
    rules: Sequence[Rule],
    link: LinkState,
    rows: dict[str, list[dict[str, Any]]],
    step: int,
) -> None:
    """Let each rule answer one request."""
    for rule in rules:
        plan = rule.choose(link)
        found = bench.order("run", name=plan.name)
        rule.note(plan, found)
        if isinstance(rule, EdgekitRule) and plan.tail is None:
            rule.note(rule.probe, bench.order("run", name=rule.probe.name))
        rows[rule.name].append({"step": step, "plan": plan.name, "s": found["s"]})


def summarise(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return mean latencies and their ratio to the oracle's."""
    means = {name: float(np.mean([one["s"] for one in each])) for name, each in rows.items()}
    return {
        name: {"mean_ms": mean * 1e3, "against_oracle": mean / means["oracle"], "requests": list(rows[name])}
        for name, mean in means.items()
    }


def count_changes(rows: Sequence[Mapping[str, Any]], best: Sequence[str]) -> dict[str, Any]:
    """Return requests until the best plan, and switches, of each step after the first."""
    until, switches = [], []
    for step in range(1, len(best)):
        plans = [one["plan"] for one in rows if one["step"] == step]
        before = [one["plan"] for one in rows if one["step"] == step - 1][-1]
        until.append(plans.index(best[step]) + 1 if best[step] in plans else None)
        switches.append(sum(one != other for one, other in zip([before, *plans], plans, strict=False)))
    return {"requests_until": until, "switches": switches}


def show(label: str, found: Mapping[str, Any], seconds: float) -> None:
    """Print the tables."""
    runs = list(found.values())
    print(f"{label}; {seconds:.0f} s")
    print_table(
        ["rule", "20-2-20: requests until the best plan", "switches a step"]
        + [f"{name}: mean ms (x oracle)" for name in found],
        [
            [
                rule,
                found["20-2-20"][rule]["requests_until"],
                found["20-2-20"][rule]["switches"],
                *(f"{one[rule]['mean_ms']:.0f} ({one[rule]['against_oracle']:.2f})" for one in runs),
            ]
            for rule in found["20-2-20"]
        ],
    )
    print("goals for edgekit: at most 2 requests, 1 switch, 1.15 x the oracle")


if __name__ == "__main__":
    main()
