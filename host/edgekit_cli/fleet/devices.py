"""`edgekit fleet devices`: the list of devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, print_json
from edgekit_cli.fleet.fleet_server import connect

if TYPE_CHECKING:
    from edgekit_fleet.operations.devices import DeviceSummary


@click.command("devices")
@click.argument("selector", default="all")
@folder_and_json_options
def command(selector: str, *, path: Path | None, as_json: bool) -> None:
    """List the devices that SELECTOR means, such as "class=jetson and site=lyon"; all by default."""
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.devices import ListDevices, list_devices

        devices = list(list_all(fleet, list_devices, ListDevices, selector=selector))
    if as_json:
        print_json(devices)
        return
    from edgekit_host.terminal import open_console, print_line, print_section

    console = open_console()
    if not devices:
        hint = f"; if that is a name: edgekit fleet device {selector}" if selector.isidentifier() else ""
        print_line(console, f"No device matches '{selector}'{hint}. `edgekit fleet enroll` lets devices in.")
        return
    titles = "Devices: class, status, connection, models, tags, last seen"
    print_section(console, titles, [_describe(device) for device in devices])


def _describe(device: DeviceSummary) -> tuple[str, ...]:
    return (
        device.name,
        device.target,
        device.status,
        "online" if device.is_online else "offline",
        ", ".join(f"{name} {version}" for name, version in device.models.items()) or "no model",
        ", ".join(f"{name}={value}" for name, value in device.tags.items()) or "no tag",
        format_time(device.last_seen_at),
    )
