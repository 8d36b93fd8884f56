"""`edgekit fleet keys`: replaces the keys of the repository's roles and of the manager."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import find_actor, folder_and_json_options, open_fleet, show


@click.group("keys")
def command() -> None:
    """Replace the keys that sign the fleet's packages and the manager's documents."""


@command.command("rotate")
@click.argument("roles", nargs=-1, metavar="[ROLE]...")
@click.option(
    "--root-keys",
    "root_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the root's private keys, which sign the change of keys.  [default: in the fleet's"
    " folder]",
)
@folder_and_json_options
def rotate(roles: tuple[str, ...], root_folder: Path | None, path: Path | None, as_json: bool) -> None:
    """Replace the keys of each ROLE: manager, root, targets, snapshot, timestamp or class-CLASS.

    Devices accept the new keys automatically. If the manager's key is replaced, a running manager signs all
    documents for devices again. Without ROLE, the command replaces no key. It only signs the root
    again, which is then valid for two years. The fleet may be running. After an interruption, run the command
    again.
    """
    with open_fleet(path) as (folder, store):
        from edgekit_fleet.operations import releases

        releases.rotate_keys(folder, store, roles, actor=find_actor(), root_folder=root_folder)
    line = "the root is signed again, with the same keys"
    if roles:
        line = f"new keys for {', '.join(roles)}; back the fleet up: edgekit fleet backup FILE"
    show({"rotated": roles}, [line], as_json=as_json)
