"""Shared by the commands of `edgekit fleet`: folder or server, JSON, and the error without the extra."""

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
    """The server that the options of `edgekit fleet` choose.

    Attributes:
        url: None if no server is chosen.
        token_file: file of the token to log in with; None for the environment variable.
        authority: PEM file of the authority that signed the server's certificate; None for the system's
            authorities.
        is_explicit: whether the URL comes from the option `--server`, not from the environment variable.
    """

    url: str | None
    token_file: Path | None
    authority: Path | None
    is_explicit: bool


def keep_server(server: str | None, token_file: Path | None, ca: Path | None) -> None:
    """Keep the options of `edgekit fleet` in click's context, where `find_chosen` finds them."""
    context = click.get_current_context()
    source = context.get_parameter_source("server")
    is_explicit = source is click.core.ParameterSource.COMMANDLINE
    context.meta[_KEY] = ChosenServer(server, token_file, ca, is_explicit)


def check_local() -> None:
    """Refuse `--server` for a command that works only on the fleet's own machine.

    Raises:
        click.UsageError: `--server` is given.
    """
    chosen = find_chosen()
    if chosen is not None and chosen.is_explicit:
        name = click.get_current_context().info_name
        raise click.UsageError(f"`{name}` works on the fleet's own machine; leave --server out")


def find_chosen() -> ChosenServer | None:
    """Return what `keep_server` has kept; None if no option of `edgekit fleet` was kept."""
    chosen: ChosenServer | None = click.get_current_context().meta.get(_KEY)
    return chosen


def check_installed() -> None:
    """Check that everything that a fleet needs is installed.

    Raises:
        ConfigError: something is missing.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is missing; install what a fleet needs: pip install edgekit[fleet]")


def find_folder(path: Path | None) -> FleetFolder:
    """Return the fleet's folder at `path`; for None, the default folder. The folder need not exist.

    Raises:
        ConfigError: something that a fleet needs is not installed.
        click.UsageError: `--server` is given: the folder is on the fleet's own machine.
    """
    check_local()
    check_installed()
    from edgekit_fleet.store.fleet_folder import FleetFolder, default_folder

    return default_folder() if path is None else FleetFolder(path)


@contextlib.contextmanager
def open_fleet(path: Path | None) -> Iterator[tuple[FleetFolder, Store]]:
    """Yield the folder and the open store of an existing fleet; close the store at the end.

    Raises:
        ConfigError: there is no fleet, or a package that a fleet needs is not installed.
        click.UsageError: `--server` is given: the folder is on the fleet's own machine.
    """
    folder = find_folder(path)
    with contextlib.closing(folder.open_store()) as store:
        yield folder, store


def find_actor() -> str:
    """Return the login name of whoever runs the command, for the audit log; `unknown` without one."""
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
    """Return the tags in texts such as `site=lyon`, as name -> value; the value may be empty.

    Raises:
        click.UsageError: a text is not NAME=VALUE.
    """
    tags = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.UsageError(f"{option} {text!r}: expected NAME=VALUE")
        tags[name] = value
    return tags


def format_time(at: float | None) -> str:
    """Return a time, in seconds since 1970, as `2026-11-22 23:05:18 UTC`; None as `never`."""
    from edgekit_runtime.agent.trusted_time import format_utc

    return "never" if at is None else format_utc(at)
