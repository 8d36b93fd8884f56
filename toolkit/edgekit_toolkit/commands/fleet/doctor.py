"""`edgekit fleet doctor`: what a broker really does."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit_runtime.errors import FleetError
from edgekit_toolkit.commands.fleet.fleet_options import (
    as_json_option,
    find_folder,
    folder_option,
    print_json,
)


@click.command("doctor")
@click.argument("brokers", nargs=-1, metavar="[HOST:PORT]...")
@click.option("--no-tls", is_flag=True, help="Probe a broker on this machine without TLS.")
@folder_option
@as_json_option
def command(brokers: tuple[str, ...], *, no_tls: bool, path: Path | None, as_json: bool) -> None:
    """Probe a broker: the one at HOST:PORT, several nodes of a cluster, or a mosquitto as `up` starts it.

    It must trust the fleet's authority. The fleet's manager must not be connected to it.
    """
    folder = find_folder(path)
    from edgekit_fleet.operations.doctor import probe_broker, probe_own
    from edgekit_fleet.operations.running import open_authority

    if brokers:
        addresses = tuple(_read_address(text) for text in brokers)
        authority = None if no_tls else open_authority(folder, folder.read_settings())
        found = probe_broker(authority, addresses)
    else:
        found = probe_own()
    if as_json:
        print_json(found)
    else:
        from edgekit_toolkit.console import open_console, print_section

        rows = [(each.check, "yes" if each.works else "no", each.effect, each.text) for each in found]
        print_section(open_console(), "Broker", rows)
    refused = [each.check for each in found if each.effect == "refused"]
    if refused:
        raise FleetError(f"no fleet may run on this broker: {', '.join(refused)}")


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError(f"{text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)
