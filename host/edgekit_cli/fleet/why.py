"""`edgekit fleet why`: one sentence about a device."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, print_json
from edgekit_cli.fleet.fleet_server import connect


@click.command("why")
@click.argument("name")
@folder_and_json_options
def command(name: str, *, path: Path | None, as_json: bool) -> None:
    """Say what the device NAME runs, what it should run, and what stands between."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import get_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        device = fleet.call(get_device, Named(name=name))
    if as_json:
        print_json({"device": name, "why": device.why})
    else:
        from edgekit_host.terminal import open_console, print_line

        print_line(open_console(), device.why)
