"""Connects a command to its fleet, which is in a local folder or on a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import (
    check_installed,
    check_local,
    find_actor,
    find_chosen,
    open_fleet,
)

if TYPE_CHECKING:
    from edgekit_fleet.api.client import FleetCaller


def is_remote(path: Path | None) -> bool:
    """Return whether the user chose a server and did not give `--folder`."""
    chosen = find_chosen()
    return path is None and chosen is not None and bool(chosen.url)


@contextlib.contextmanager
def connect(path: Path | None) -> Iterator[FleetCaller]:
    """Yield the fleet in the folder `path`.

    If `path` is None, yield the fleet on the chosen server, or in the default folder if no server was chosen.

    Raises:
        ConfigError: There is no fleet, the URL is malformed, or a package is not installed.
        click.UsageError: There is no token for the server, or both `--folder` and `--server` were given.
    """
    check_installed()
    from edgekit_fleet.api.client import LocalFleet, RemoteFleet
    from edgekit_fleet.api.endpoints.endpoint import Fleet

    chosen = find_chosen()
    if path is not None:
        check_local()
    elif chosen is not None and chosen.url:
        yield RemoteFleet(chosen.url, _read_token(chosen.token_file), chosen.authority)
        return
    with open_fleet(path) as (folder, store):
        yield LocalFleet(Fleet(folder, store), find_actor())


def _read_token(path: Path | None) -> str:
    token = os.environ.get("EDGEKIT_FLEET_TOKEN", "") if path is None else path.read_text(errors="replace")
    if not token.strip():
        raise click.UsageError("--server needs a token: --token-file FILE, or EDGEKIT_FLEET_TOKEN")
    return token.strip()
