"""`edgekit fleet rollback`: take the devices of a rollout back to what they ran before it."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options


@click.command("rollback")
@click.argument("rollout")
@click.option("--note", default="", help="A note for the audit log.")
@folder_and_json_options
def command(rollout: str, note: str, path: Path | None, as_json: bool) -> None:
    """Stop ROLLOUT, or undo it after its end: every device that it updated goes back."""
    from edgekit_cli.fleet.rollout import give_order

    give_order(rollout, "abort", note, path=path, as_json=as_json)
