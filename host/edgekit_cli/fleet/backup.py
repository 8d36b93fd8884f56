"""`edgekit fleet backup` and `restore`: write a whole fleet to one file, and restore it."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_cli.fleet.fleet_options import find_folder, folder_and_json_options, show


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
@folder_and_json_options
def command(file: Path, *, path: Path | None, as_json: bool) -> None:
    """Write settings, authority, keys, releases and store to FILE. The fleet may be running.

    Protect FILE like the manager itself, because it contains the fleet's private keys.
    """
    folder = find_folder(path)
    from edgekit_fleet.operations import records

    records.back_up(folder, file)
    size_bytes = file.stat().st_size
    line = f"{file}: {size_bytes / 1e6:.1f} MB. It holds private keys: keep it safe."
    show({"file": str(file), "size_bytes": size_bytes}, [line], as_json=as_json)


@click.command("restore")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--database",
    default="",
    metavar="URL",
    help="PostgreSQL database for the store from now on. A store in FILE is copied into it. If FILE contains"
    " no store, the database must contain the fleet.  [default: as before]",
)
@folder_and_json_options
def restore(file: Path, *, database: str, path: Path | None, as_json: bool) -> None:
    """Restore a fleet from the backup FILE into an empty folder. Never run the old and the new fleet at once.

    With --database a fleet moves from SQLite to PostgreSQL.

    Devices that were updated after the backup keep their versions. They accept the documents of the restored
    manager.
    """
    folder = find_folder(path)
    from edgekit_fleet.operations import records

    records.restore(folder, file, database)
    line = f"Restored to {folder.path}. Next: edgekit fleet up"
    show({"folder": str(folder.path)}, [line], as_json=as_json)
