"""`edgekit fleet enroll`: creates one-time codes for devices."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, read_tags, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange


@click.command("enroll")
@click.option("--name", default="device", show_default=True, help="Name of the device.")
@click.option(
    "--count", type=click.IntRange(1, 10_000), help="Number of codes, for NAME-1, NAME-2 and so on."
)
@click.option("--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Tag that the device gets.")
@click.option("--target", default="", help="Target of its packages.  [default: the device states it]")
@click.option(
    "--hours", default=24.0, show_default=True, type=NumberRange(0.01, 8760), help="Hours of validity."
)
@folder_and_json_options
def command(
    *,
    name: str,
    count: int | None,
    tags: tuple[str, ...],
    target: str,
    hours: float,
    path: Path | None,
    as_json: bool,
) -> None:
    """Create one-time codes. Each code enrols one device with `edgekit-device enroll --code CODE`."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import InviteDevices, invite_devices

        names = (name,) if count is None else tuple(f"{name}-{number}" for number in range(1, count + 1))
        request = InviteDevices(names=names, target=target, tags=read_tags(tags), hours=hours)
        invitations = fleet.call(invite_devices, request).items
    lines = []
    for invitation in invitations:
        lines.append(f"On {invitation.device}, within {hours:g} hours:")
        lines.append(f"  edgekit-device enroll --code {invitation.code}")
    show(invitations, lines, as_json=as_json)
