"""`edgekit fleet device`: one device, its tags, its end."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, print_json, read_tags
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.fleet.tag import set_tags


@click.command("device")
@click.argument("name")
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Set a tag; no value removes it.")
@click.option("--revoke", metavar="REASON", help="Shut the device out: its certificates count no more.")
@click.option("--yes", "is_sure", is_flag=True, help="Set tags also where that changes what it gets.")
@folder_and_json_options
def command(
    name: str, *, tags: tuple[str, ...], revoke: str | None, is_sure: bool, path: Path | None, as_json: bool
) -> None:
    """Show the device NAME, after changing it if that is asked for."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import RevokeDevice, get_device, revoke_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        if tags:
            set_tags(fleet, name, read_tags(tags), is_sure=is_sure)
        if revoke is not None:
            fleet.call(revoke_device, RevokeDevice(name=name, reason=revoke))
        device = fleet.call(get_device, Named(name=name))
    if as_json:
        print_json(device)
        return
    from edgekit_host.terminal import open_console, print_line, print_section

    console = open_console()
    print_line(console, (device.why, "bold"))
    summary = device.summary
    rows = [
        ("class", summary.target),
        ("status", f"{summary.status}{', online' if summary.is_online else ''}"),
        ("last seen", format_time(summary.last_seen_at)),
        ("document", f"{device.desired_sent} sent, {device.desired_held} held"),
        ("certificate", f"{device.certificate_serial}, until {format_time(device.certificate_expires_at)}"),
    ]
    print_section(console, "Device", rows)
    print_section(console, "Tags", sorted(summary.tags.items()))
    names = sorted({*summary.models, *device.desired})
    models = [
        (
            name,
            f"runs {summary.models.get(name) or 'nothing'}",
            f"should run {device.desired.get(name, 'the same')}",
        )
        for name in names
    ]
    print_section(console, "Models", models)
    steps = [
        (execution["model"], execution["version"], execution["state"], execution["reason"])
        for execution in device.executions
    ]
    print_section(console, "Attempts, newest first", steps)
    print_section(console, "Facts", sorted(device.facts.items()))
