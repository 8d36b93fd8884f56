"""`edgekit device uninstall`: removes edgekit from a device."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekit_cli.device.device_options import (
    host_option,
    parse_host,
    ssh_config_option,
)
from edgekit_cli.shared_options import as_json_option


@click.command("uninstall")
@host_option
@click.option("--purge", is_flag=True, help="Remove models, keys and membership in a fleet too.")
@ssh_config_option
@as_json_option
def command(*, host: str, purge: bool, ssh_config: Path | None, as_json: bool) -> None:
    """Remove edgekit from a device. Models, keys and the fleet membership are kept unless --purge."""
    device = parse_host(host, ssh_config)
    from edgekit_hil.provisioning.install import uninstall

    changed = uninstall(device, purge=purge)
    if as_json:
        click.echo(json.dumps({"host": host, "changed": changed}, indent=2))
        return
    for change in changed:
        click.echo(f"  {change}")
    click.echo(f"{host}: {'removed' if changed else 'edgekit was not installed'}")
