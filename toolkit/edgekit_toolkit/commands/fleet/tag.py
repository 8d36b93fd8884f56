"""`edgekit fleet tag`: set tags of a device, and ask first where that changes what it gets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_runtime.errors import FleetError
from edgekit_toolkit.commands.fleet.fleet_options import (
    as_json_option,
    find_actor,
    folder_option,
    open_fleet,
    print_json,
    read_tags,
)

if TYPE_CHECKING:
    from edgekit_fleet.store.database import Store


@click.command("tag")
@click.argument("device")
@click.argument("tags", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--yes", "is_sure", is_flag=True, help="Also where that changes what the device gets.")
@folder_option
@as_json_option
def command(device: str, tags: tuple[str, ...], *, is_sure: bool, path: Path | None, as_json: bool) -> None:
    """Set tags of DEVICE, such as site=lyon; a tag without a value is removed."""
    read = read_tags(tags)
    with open_fleet(path) as (_folder, store):
        set_tags(store, device, read, is_sure=is_sure)
        from edgekit_fleet.operations import devices

        summary = devices.describe(store, device).summary
    if as_json:
        print_json(summary)
        return
    shown = ", ".join(f"{name}={value}" for name, value in sorted(summary.tags.items()))
    click.echo(f"{device}: {shown or 'no tags'}")


def set_tags(store: Store, device: str, tags: Mapping[str, str], *, is_sure: bool) -> None:
    """Set tags; asks on a terminal where an open rollout is concerned.

    Args:
        store: of the fleet.
        device: whose.
        tags: an empty value removes one.
        is_sure: do not ask.

    Raises:
        FleetError: there is no such device, or nobody is there to be asked.
    """
    from edgekit_fleet.operations import devices, rollouts

    effects = [] if is_sure else rollouts.find_tag_effects(store, device, tags)
    if effects:
        text = "; ".join(effects)
        if not sys.stdin.isatty():
            raise FleetError(f"{text}; repeat the command with --yes if that is meant")
        click.confirm(f"{text}. Go on?", abort=True)
    devices.tag(store, device, tags, find_actor())
