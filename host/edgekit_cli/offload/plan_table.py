"""A plan on the terminal: the chart, a table of all ways, and advice."""

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
from edgekit_offload.planning.result import NEVER, PlanningResult, Way
from edgekit_offload.report.terminal_chart import render_terminal

_SHOWN: Final = 4  # bandwidths of the table
_CHART_WIDTH: Final = 100


def print_plan(result: PlanningResult, console: Console, written: Sequence[Path]) -> None:
    """Print a plan, and the files that hold it."""
    rtt_ms = result.rtts_ms[len(result.rtts_ms) // 2]
    width = min(console.width, _CHART_WIDTH)
    console.print(render_terminal(result, rtt_ms=rtt_ms, width=width, ascii_only=is_ascii_only(console)))
    for machine, role in ((result.device, "device"), (result.server, "server")):
        limits = describe_limits(machine)
        print_line(console, f"{role}:", machine.name, f"({machine.label}){limits and f'; at most {limits}'}")
    row = result.rtts_ms.index(rtt_ms)
    count = len(result.bandwidths_mbit_s)
    columns = sorted({round(n * (count - 1) / max(_SHOWN - 1, 1)) for n in range(_SHOWN)})
    head = (
        "way", "sends", "device", "server",
        *(f"at {result.bandwidths_mbit_s[column]:.3g}" for column in columns), "times",
    )  # fmt: skip
    rows = [head, *(_row(way, row, columns) for way in result.ways)]
    title = f"Ways: ms on device and server; {result.unit} at some Mbit/s, RTT {rtt_ms:g} ms"
    title += "; lossy: not within --max-loss" if any(way.is_over_loss for way in result.ways) else ""
    print_section(console, title, rows)
    found = [(way.name, *_effects(way, result.samples)) for way in result.ways]
    effects = [one for one in found if any(one[1:])]
    one = f"one is {100 / max(result.samples, 1):.2g} points"
    title = f"Answers that it changes, of {result.samples} samples ({one}); what it leaks of the input"
    print_section(console, title, effects)
    print_section(console, "What each does", [(way.name, way.explanation) for way in result.ways])
    proofs = [
        (way.name, describe_certificate(way.certificate))
        for way in result.ways
        if way.certificate is not None
    ]
    print_section(console, "Proof, by sums over kernels", proofs)
    print_section(console, "What to make of it", [(one,) for one in result.sentences])
    print_section(console, "Not offered", [(one.name, one.reason) for one in result.refusals])
    print_section(console, "Warnings", [(one,) for one in result.warnings])
    print_section(console, "Three tiers", [_tier_row(result, number) for number in range(len(result.tiers))])
    print_section(console, "Written", [(path,) for path in written])


def _row(way: Way, row: int, columns: Sequence[int]) -> tuple[str, ...]:
    costs = way.plan.costs
    scores = (way.score[row][column] for column in columns)
    return (
        way.name, size(costs.upload_bytes), f"{costs.device_s * 1e3:.3g}", f"{costs.server_s * 1e3:.3g}",
        *("-" if score >= NEVER else f"{score:.4g}" for score in scores),
        f"{way.label}, lossy" if way.is_over_loss else way.label,
    )  # fmt: skip


def _effects(way: Way, samples: int) -> tuple[str, str]:
    changed = "" if way.plan.answers_changed is None else describe_answers(way, samples)
    is_known = way.sends_input or way.plan.leakage_db is not None
    return changed, describe_leakage(way) if is_known else ""


def _tier_row(result: PlanningResult, number: int) -> tuple[str, str, str]:
    found = result.tiers[number]
    sent = " | ".join(", ".join(one.name for one in tensors) or "nothing" for tensors in found.sent)
    kernels = " + ".join(str(count) for count in found.kernels)
    link = f"{found.bandwidths_mbit_s[0]:g} Mbit/s, RTT {found.rtts_ms[0]:g} ms"
    return link, f"{found.total_ms:.4g} ms", f"kernels {kernels}; sends {sent}; {found.certificate.proof}"
