"""`edgekit fleet withdraw`: withdraw a release."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, print_json
from edgekit_cli.fleet.fleet_server import connect


@click.command("withdraw")
@click.argument("release")
@folder_and_json_options
def command(release: str, path: Path | None, as_json: bool) -> None:
    """Withdraw RELEASE: no rollout can use it, and no device can fetch it. Those that run it keep it."""
    from edgekit_runtime.system.shown_text import clean

    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.endpoint import Named
        from edgekit_fleet.api.endpoints.releases import withdraw_release

        withdrawal = fleet.call(withdraw_release, Named(name=release))
    if as_json:
        print_json(withdrawal)
    else:
        click.echo(
            clean(f"{withdrawal.name} is withdrawn; to take devices back: edgekit fleet rollback ROLLOUT")
        )
