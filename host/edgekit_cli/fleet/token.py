"""`edgekit fleet token`: manages the access tokens of programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange

if TYPE_CHECKING:
    from edgekit_fleet.access.principal import Scope


@click.group("token")
def command() -> None:
    """Create, list and revoke access tokens of programs, such as a CI job."""


@command.command("add")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(["read", "release", "rollout", "evidence", "device", "sample", "admin"]),
    help="Scope of what the token allows. May be repeated.",
)
@click.option(
    "--days", default=90.0, show_default=True, type=NumberRange(0.001, 3650), help="Days of validity."
)
@folder_and_json_options
def add(name: str, scopes: tuple[Scope, ...], days: float, path: Path | None, as_json: bool) -> None:
    """Create the token NAME and print it. It cannot be shown again."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import AddToken, add_token

        token = fleet.call(add_token, AddToken(name=name, scopes=scopes, days=days))
    show(token, [token.token], as_json=as_json)


@command.command("list")
@folder_and_json_options
def list_command(path: Path | None, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import list_tokens
        from edgekit_fleet.api.endpoints.endpoint import Nothing

        tokens = fleet.call(list_tokens, Nothing()).items
    lines = []
    for token in tokens:
        end = "for ever" if token.expires_at is None else f"until {format_time(token.expires_at)}"
        lines.append(
            f"{token.name}: {', '.join(token.scopes)}; {end}, last used {format_time(token.used_at)}"
        )
    none = "no tokens; make one: edgekit fleet token add NAME --scope read"
    show(tokens, lines or [none], as_json=as_json)


@command.command("revoke")
@click.argument("name")
@folder_and_json_options
def revoke(name: str, path: Path | None, as_json: bool) -> None:
    """Revoke the token NAME."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.access import revoke_token
        from edgekit_fleet.api.endpoints.endpoint import Named

        tokens = fleet.call(revoke_token, Named(name=name)).items
    show(tokens, [f"{name} has ended; {len(tokens)} tokens are left"], as_json=as_json)
