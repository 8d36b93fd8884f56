"""`edgekit fleet verdict` and `evidence`: show the verdict on a rollout, and add external evidence."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange

_STEP_S = 30.0
_PAUSE_S = 0.5
_EXIT_CODES = {"pass": 0, "stop": 22, "undecided": 23}


@click.command("verdict")
@click.argument("rollout")
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the verdict, also while the rollout is paused or needs an approval.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(0, 10**7),
    default=3600.0,
    show_default=True,
    help="Maximum time to wait in seconds.",
)
@folder_and_json_options
def command(rollout: str, *, wait: bool, timeout_s: float, path: Path | None, as_json: bool) -> None:
    """Show the verdict on ROLLOUT and the reasons. The exit code is 0 (pass), 22 (stop) or 23 (undecided)."""
    end = time.monotonic() + (timeout_s if wait else 0.0)
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.verdicts import GetVerdict, get_verdict

        while True:
            rest_s = max(0.0, end - time.monotonic())
            verdict = fleet.call(get_verdict, GetVerdict(name=rollout, wait=min(rest_s, _STEP_S)))
            if verdict.verdict != "undecided" or time.monotonic() >= end:
                break
            time.sleep(min(rest_s, _PAUSE_S))  # a fleet in a folder answers at once
    lines = [f"{rollout}: {verdict.verdict}", *(f"  {reason}" for reason in verdict.reasons)]
    show(verdict, lines, as_json=as_json)
    click.get_current_context().exit(_EXIT_CODES[verdict.verdict])


@click.command("evidence")
@click.argument("rollout")
@click.option("--gate", required=True, help="Gate that the rollout has declared.")
@click.option("--value", type=NumberRange(-1e12, 1e12), help="Value of the figure with the release.")
@click.option("--reference", type=NumberRange(-1e12, 1e12), help="Value of the figure without the release.")
@click.option("--low", type=NumberRange(-1e12, 1e12), help="Lower end of the value's interval.")
@click.option("--high", type=NumberRange(-1e12, 1e12), help="Upper end of the value's interval.")
@click.option("--samples", type=click.IntRange(0, 1 << 50), help="Number of samples behind the value.")
@click.option(
    "--pass", "statement", flag_value="pass", help="State that the gate passes, instead of a value."
)
@click.option(
    "--stop", "statement", flag_value="stop", help="State that the rollout must stop, instead of a value."
)
@click.option("--reason", default="", help="Sentence that is shown with the verdict.")
@folder_and_json_options
def evidence(
    rollout: str, *, statement: str | None, path: Path | None, as_json: bool, **figures: object
) -> None:
    """Add external evidence for a gate of ROLLOUT, such as the value of a business metric."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.verdicts import AddEvidence, add_evidence

        request = AddEvidence(name=rollout, statement=statement or "", **figures)  # type: ignore[arg-type]
        finding = fleet.call(add_evidence, request)
    show(finding, [f"{finding.outcome}: {finding.sentence}"], as_json=as_json)
