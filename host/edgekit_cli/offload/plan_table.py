"""Prints a plan on the terminal, with a chart, a table of all candidates, and advice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from edgekit_host.terminal import is_ascii_only, print_line, print_section
from edgekit_offload.planning.explain import (
    describe_answers,
    describe_certificate,
    describe_leakage,
    describe_limits,
    size,
)
from edgekit_offload.planning.result import NEVER, Candidate, PlanningResult
from edgekit_offload.report.terminal_chart import render_terminal

_COLUMNS: Final = 4  # bandwidths of the table
_CHART_WIDTH: Final = 100


def print_plan(result: PlanningResult, console: Console, written: Sequence[Path]) -> None:
    rtt_ms = result.rtts_ms[len(result.rtts_ms) // 2]
    width = min(console.width, _CHART_WIDTH)
    console.print(render_terminal(result, rtt_ms=rtt_ms, width=width, ascii_only=is_ascii_only(console)))
    for machine, role in ((result.device, "device"), (result.server, "server")):
        limits = describe_limits(machine)
        print_line(console, f"{role}:", machine.name, f"({machine.label}){limits and f'; at most {limits}'}")
    row = result.rtts_ms.index(rtt_ms)
    count = len(result.bandwidths_mbit_s)
    columns = sorted({round(n * (count - 1) / max(_COLUMNS - 1, 1)) for n in range(_COLUMNS)})
    head = (
        "candidate",
        "sends",
        "device",
        "server",
        *(f"at {result.bandwidths_mbit_s[column]:.3g}" for column in columns),
        "times",
    )
    rows = [head, *(_row(candidate, row, columns) for candidate in result.candidates)]
    title = f"Candidates: ms on device and server; {result.unit} at some Mbit/s, RTT {rtt_ms:g} ms"
    title += (
        "; lossy: not within --max-loss"
        if any(candidate.is_over_loss for candidate in result.candidates)
        else ""
    )
    print_section(console, title, rows)
    rows = [(candidate.name, *_effects(candidate, result.samples)) for candidate in result.candidates]
    effects = [effect for effect in rows if any(effect[1:])]
    resolution = f"one is {100 / max(result.samples, 1):.2g} points"
    title = f"Answers that it changes, of {result.samples} samples ({resolution}); what it leaks of the input"
    print_section(console, title, effects)
    print_section(
        console,
        "What each candidate does",
        [(candidate.name, candidate.explanation) for candidate in result.candidates],
    )
    proofs = [
        (candidate.name, describe_certificate(candidate.certificate))
        for candidate in result.candidates
        if candidate.certificate is not None
    ]
    print_section(console, "Proof, by sums over kernels", proofs)
    print_section(console, "What to make of it", [(sentence,) for sentence in result.sentences])
    print_section(console, "Not offered", [(refusal.name, refusal.reason) for refusal in result.refusals])
    print_section(console, "Warnings", [(warning,) for warning in result.warnings])
    print_section(console, "Three tiers", [_tier_row(result, number) for number in range(len(result.tiers))])
    print_section(console, "Written", [(path,) for path in written])


def _row(candidate: Candidate, row: int, columns: Sequence[int]) -> tuple[str, ...]:
    costs = candidate.plan.costs
    scores = (candidate.score[row][column] for column in columns)
    return (
        candidate.name,
        size(costs.upload_bytes),
        f"{costs.device_s * 1e3:.3g}",
        f"{costs.server_s * 1e3:.3g}",
        *("-" if score >= NEVER else f"{score:.4g}" for score in scores),
        f"{candidate.label}, lossy" if candidate.is_over_loss else candidate.label,
    )


def _effects(candidate: Candidate, samples: int) -> tuple[str, str]:
    changed = "" if candidate.plan.answers_changed is None else describe_answers(candidate, samples)
    is_known = candidate.sends_input or candidate.plan.leakage_db is not None
    return changed, describe_leakage(candidate) if is_known else ""


def _tier_row(result: PlanningResult, number: int) -> tuple[str, str, str]:
    tier_plan = result.tiers[number]
    sent = " | ".join(", ".join(tensor.name for tensor in tensors) or "nothing" for tensors in tier_plan.sent)
    kernels = " + ".join(str(count) for count in tier_plan.kernels)
    link = f"{tier_plan.bandwidths_mbit_s[0]:g} Mbit/s, RTT {tier_plan.rtts_ms[0]:g} ms"
    return (
        link,
        f"{tier_plan.total_ms:.4g} ms",
        f"kernels {kernels}; sends {sent}; {tier_plan.certificate.proof}",
    )
