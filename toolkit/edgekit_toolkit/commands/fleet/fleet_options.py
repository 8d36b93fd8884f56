"""What the commands of `edgekit fleet` share: the folder, JSON, and a clear word without the extra."""

from __future__ import annotations

import contextlib
import getpass
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgekit_runtime.errors import ConfigError

if TYPE_CHECKING:
    from edgekit_fleet.store.database import Store
    from edgekit_fleet.store.fleet_folder import FleetFolder

Command = TypeVar("Command", bound=Callable[..., Any])

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
folder_option = click.option(
    "--folder",
    "path",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="EDGEKIT_FLEET",
    help="Folder of the fleet.  [default: fleet/ in the state folder]",
)


def check_installed() -> None:
    """Do nothing where all is installed that a fleet needs.

    Raises:
        ConfigError: something is missing.
    """
    try:
        import edgekit_fleet.operations.running  # noqa: F401  # imports all of it
    except ModuleNotFoundError as cause:
        raise ConfigError(
            f"{cause.name} is missing; install what a fleet needs: pip install edgekit[fleet]"
        ) from cause


def find_folder(path: Path | None) -> FleetFolder:
    """Return the folder of the fleet.

    Raises:
        ConfigError: what a fleet needs is not installed.
    """
    try:
        from edgekit_fleet.store.fleet_folder import FleetFolder, default_folder
    except ModuleNotFoundError as cause:
        raise ConfigError(
            f"{cause.name} is missing; install what a fleet needs: pip install edgekit[fleet]"
        ) from cause
    return default_folder() if path is None else FleetFolder(path)


@contextlib.contextmanager
def open_fleet(path: Path | None) -> Iterator[tuple[FleetFolder, Store]]:
    """Yield the folder and the open store of a fleet that is there.

    Raises:
        ConfigError: there is none.
    """
    folder = find_folder(path)
    with contextlib.closing(folder.open_store()) as store:
        yield folder, store


def find_actor() -> str:
    """Return who runs the command, for the audit log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry
        return "unknown"


def print_json(value: Any) -> None:
    """Print dataclasses and plain values as JSON."""
    import dataclasses

    def plain(each: Any) -> Any:
        return (
            dataclasses.asdict(each)
            if dataclasses.is_dataclass(each) and not isinstance(each, type)
            else str(each)
        )

    click.echo(json.dumps(value, indent=2, default=plain))


def read_tags(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the tags in texts such as `site=lyon`.

    Raises:
        click.UsageError: one is malformed.
    """
    tags = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"--tag {text!r}: expected NAME=VALUE")
        tags[name] = value
    return tags


def format_time(at: float | None) -> str:
    """Return a time as `2026-11-22 23:05:18`, in the local time zone."""
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
