"""Options and checks that the commands of `edgekit fleet` share."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from edgekit_cli.shared_options import as_json_option
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.system.shown_text import clean

if TYPE_CHECKING:
    from edgekit_fleet.store.database import Store
    from edgekit_fleet.store.fleet_folder import FleetFolder

_KEY: Final = "edgekit.fleet.server"
_LIBRARIES: Final = ("alembic", "argon2", "jinja2", "paho", "sqlalchemy", "starlette", "tuf", "uvicorn")
Command = TypeVar("Command", bound=Callable[..., Any])

folder_option = click.option(
    "--folder",
    "path",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="EDGEKIT_FLEET",
    help="Folder of the fleet.  [default: fleet/ in the state folder]",
)


def folder_and_json_options(function: Command) -> Command:
    return folder_option(as_json_option(function))


@dataclass(frozen=True, slots=True)
class ChosenServer:
    """The options of `edgekit fleet` that select a server.

    Attributes:
        url: The URL of the server, or None if the fleet is in a local folder.
        token_file: The path of a file with the token, or None if `EDGEKIT_FLEET_TOKEN` contains it.
        authority: The PEM file of the authority that signed the server's certificate, or None for the
            authorities of the system.
        is_explicit: Whether the URL comes from the option `--server` and not from the environment variable.
    """

    url: str | None
    token_file: Path | None
    authority: Path | None
    is_explicit: bool


def keep_server(server: str | None, token_file: Path | None, ca: Path | None) -> None:
    """Store the options of `edgekit fleet` in click's context for `find_chosen`."""
    context = click.get_current_context()
    source = context.get_parameter_source("server")
    is_explicit = source is click.core.ParameterSource.COMMANDLINE
    context.meta[_KEY] = ChosenServer(server, token_file, ca, is_explicit)


def check_local() -> None:
    """Refuse `--server` for a command that only works on the fleet's own machine.

    Raises:
        click.UsageError: `--server` was given.
    """
    chosen = find_chosen()
    if chosen is not None and chosen.is_explicit:
        name = click.get_current_context().info_name
        raise click.UsageError(f"`{name}` works on the fleet's own machine; leave --server out")


def find_chosen() -> ChosenServer | None:
    """Return the options that `keep_server` stored, or None."""
    chosen: ChosenServer | None = click.get_current_context().meta.get(_KEY)
    return chosen


def check_installed() -> None:
    """Check that all packages that a fleet needs are installed.

    Raises:
        ConfigError: A package is missing.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is missing; install what a fleet needs: pip install edgekit[fleet]")


def find_folder(path: Path | None) -> FleetFolder:
    """Return the folder at `path`, or the default folder for None. The folder need not exist.

    Raises:
        ConfigError: A package that a fleet needs is not installed.
        click.UsageError: `--server` was given, but the command needs a folder on this machine.
    """
    check_local()
    check_installed()
    from edgekit_fleet.store.fleet_folder import FleetFolder, default_folder

    return default_folder() if path is None else FleetFolder(path)


@contextlib.contextmanager
def open_fleet(path: Path | None) -> Iterator[tuple[FleetFolder, Store]]:
    """Yield the folder and the open store of a fleet, and close the store at the end.

    Raises:
        ConfigError: There is no fleet, or a package that a fleet needs is not installed.
        click.UsageError: `--server` was given, but the command needs a folder on this machine.
    """
    folder = find_folder(path)
    with contextlib.closing(folder.open_store()) as store:
        yield folder, store


def find_actor() -> str:
    """Return the login name of the current user for the audit log, or `unknown`."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without an entry
        return "unknown"


def print_json(value: Any) -> None:
    import dataclasses

    def plain(value: Any) -> Any:
        return (
            dataclasses.asdict(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type)
            else str(value)
        )

    click.echo(json.dumps(value, indent=2, default=plain))


def show(result: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result as JSON, or the lines that describe it."""
    if as_json:
        print_json(result)
        return
    for line in lines:
        click.echo(clean(line))


def read_tags(texts: tuple[str, ...], option: str = "--tag") -> dict[str, str]:
    """Parse tags such as `site=lyon`, and return their values by name. A value may be empty.

    Raises:
        click.UsageError: A text is not NAME=VALUE.
    """
    tags = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"{option} {text!r}: expected NAME=VALUE")
        tags[name] = value
    return tags


def format_time(at: float | None) -> str:
    """Return a time in seconds since 1970 as `2026-11-22 23:05:18 UTC`, or `never` for None."""
    from edgekit_runtime.agent.trusted_time import format_utc

    return "never" if at is None else format_utc(at)
