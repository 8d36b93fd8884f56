"""`edgekit fleet devices`: the list of devices."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_toolkit.commands.fleet.fleet_options import (
    as_json_option,
    folder_option,
    format_time,
    print_json,
)
from edgekit_toolkit.commands.fleet.fleet_server import connect


@click.command("devices")
@click.argument("selector", default="all")
@folder_option
@as_json_option
def command(selector: str, *, path: Path | None, as_json: bool) -> None:
    """List the devices that SELECTOR means, such as "class=jetson and site=lyon"; all by default."""
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.devices import LIST_DEVICES, ListDevices

        found = list(list_all(fleet, LIST_DEVICES, ListDevices, selector=selector))
    if as_json:
        print_json(found)
        return
    from rich.table import Table

    from edgekit_toolkit.console import open_console, plain

    console = open_console()
    table = Table()
    for title in ("device", "class", "status", "online", "models", "tags", "last seen"):
        table.add_column(title)
    for each in found:
        models = ", ".join(f"{name} {version}" for name, version in each.models.items())
        tags = ", ".join(f"{name}={value}" for name, value in each.tags.items())
        online = "yes" if each.is_online else "no"
        row = (each.name, each.target, each.status, online, models, tags, format_time(each.last_seen_at))
        table.add_row(*(plain(text, console) for text in row))
    if found:
        console.print(table)
    else:
        console.print("No such device. `edgekit fleet enroll` makes codes that let devices in.")
