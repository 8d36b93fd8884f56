"""`edgekit fleet tag`: set tags of a device, and ask first where that changes what it gets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, print_json, read_tags
from edgekit_cli.fleet.fleet_server import connect
from edgekit_runtime.errors import FleetError, RequestError

if TYPE_CHECKING:
    from edgekit_fleet.api.client import FleetCaller
    from edgekit_fleet.operations.devices import DeviceSummary

_ASK = "; repeat it with "


@click.command("tag")
@click.argument("device")
@click.argument("tags", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--yes", "is_sure", is_flag=True, help="Also where that changes what the device gets.")
@folder_and_json_options
def command(device: str, tags: tuple[str, ...], *, is_sure: bool, path: Path | None, as_json: bool) -> None:
    """Set tags of DEVICE, such as site=lyon; a tag without a value is removed."""
    read = read_tags(tags)
    with connect(path) as fleet:
        summary = set_tags(fleet, device, read, is_sure=is_sure)
    if as_json:
        print_json(summary)
        return
    tag_text = ", ".join(f"{name}={value}" for name, value in sorted(summary.tags.items()))
    click.echo(f"{device}: {tag_text or 'no tags'}")


def set_tags(fleet: FleetCaller, device: str, tags: Mapping[str, str], *, is_sure: bool) -> DeviceSummary:
    """Set tags, and return the device; asks on a terminal if this affects an open rollout.

    `tags`: an empty value removes one.

    Raises:
        FleetError: there is no such device, or nobody can be asked.
    """
    from edgekit_fleet.api.endpoints.devices import TagDevice, tag_device

    try:
        return fleet.call(tag_device, TagDevice(name=device, tags=tags, is_sure=is_sure))
    except (FleetError, RequestError) as error:
        if _ASK not in str(error) or not sys.stdin.isatty():
            raise
        click.confirm(f"{str(error).partition(_ASK)[0]}. Go on?", abort=True)
    return fleet.call(tag_device, TagDevice(name=device, tags=tags, is_sure=True))
