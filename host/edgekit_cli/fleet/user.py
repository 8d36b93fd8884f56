"""`edgekit fleet user`: manages the users of the console."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, show
from edgekit_cli.fleet.fleet_server import connect

if TYPE_CHECKING:
    from edgekit_fleet.access.principal import Role
    from edgekit_fleet.api.endpoints.endpoint import Endpoint

_role_option = click.option(
    "--role",
    type=click.Choice(["viewer", "operator", "admin"]),
    default="viewer",
    show_default=True,
    help="An operator also manages releases, rollouts and devices. An admin also manages users and tokens.",
)


@click.group("user")
def command() -> None:
    """Add, list and remove users of the console."""


@command.command("add")
@click.argument("name")
@_role_option
@folder_and_json_options
def add(name: str, role: Role, path: Path | None, as_json: bool) -> None:
    """Add the user NAME. The password is asked for, or read from standard input."""
    from edgekit_fleet.api.endpoints.access import AddUser, add_user

    _call(add_user, AddUser(name=name, password=_read_password(), role=role), path, as_json=as_json)


@command.command("list")
@folder_and_json_options
def list_command(path: Path | None, as_json: bool) -> None:
    """List the users."""
    from edgekit_fleet.api.endpoints.access import list_users
    from edgekit_fleet.api.endpoints.endpoint import Nothing

    _call(list_users, Nothing(), path, as_json=as_json)


@command.command("remove")
@click.argument("name")
@folder_and_json_options
def remove(name: str, path: Path | None, as_json: bool) -> None:
    """Remove the user NAME, and end the user's logins."""
    from edgekit_fleet.api.endpoints.access import remove_user
    from edgekit_fleet.api.endpoints.endpoint import Named

    _call(remove_user, Named(name=name), path, as_json=as_json)


@command.command("password")
@click.argument("name")
@folder_and_json_options
def password(name: str, path: Path | None, as_json: bool) -> None:
    """Change the password of the user NAME, and end the user's logins."""
    from edgekit_fleet.api.endpoints.access import SetPassword, set_password

    _call(set_password, SetPassword(name=name, password=_read_password()), path, as_json=as_json)


@command.command("role")
@click.argument("name")
@click.argument("role", type=click.Choice(["viewer", "operator", "admin"]))
@folder_and_json_options
def set_role(name: str, role: Role, path: Path | None, as_json: bool) -> None:
    """Change the role of the user NAME to ROLE."""
    from edgekit_fleet.api.endpoints.access import SetRole, set_role

    _call(set_role, SetRole(name=name, role=role), path, as_json=as_json)


@command.command("second-factor")
@click.argument("name")
@click.option(
    "--remove", "is_removal", is_flag=True, help="Remove the second factor, for example if the phone is lost."
)
@folder_and_json_options
def second_factor(name: str, path: Path | None, *, is_removal: bool, as_json: bool) -> None:
    """Require one-time codes from the user NAME. The key and recovery codes are shown only once."""
    from edgekit_fleet.api.endpoints.access import add_second_factor, remove_second_factor
    from edgekit_fleet.api.endpoints.endpoint import Named

    if is_removal:
        _call(remove_second_factor, Named(name=name), path, as_json=as_json)
        return
    with connect(path) as fleet:
        factor = fleet.call(add_second_factor, Named(name=name))
    if not as_json:
        _print_qr_code(factor.uri)
    lines = [
        f"For the authenticator app of {name}: {factor.uri}",
        "Recovery codes, each for one login without the app:",
        *(f"  {code}" for code in factor.recovery_codes),
    ]
    show(factor, lines, as_json=as_json)


def _print_qr_code(text: str) -> None:
    try:
        import segno
    except ImportError:
        click.echo("(With `pip install segno` this shows a QR code.)")
        return
    if sys.stdout.isatty():
        segno.make(text, micro=False).terminal(compact=True)


def _call(endpoint: Endpoint[Any, Any], request: Any, path: Path | None, *, as_json: bool) -> None:
    with connect(path) as fleet:
        users = fleet.call(endpoint, request).items
    lines = [f"{user.name}: {user.role}, last seen {format_time(user.seen_at)}" for user in users]
    none = "no users; make one: edgekit fleet user add NAME --role admin"
    show(users, lines or [none], as_json=as_json)


def _read_password() -> str:
    """Read a password, twice from a terminal or once from the first line of standard input."""
    if sys.stdin.isatty():
        typed: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        return typed
    return sys.stdin.readline().rstrip("\n")
