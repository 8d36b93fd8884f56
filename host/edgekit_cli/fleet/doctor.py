"""`edgekit fleet doctor`: tests a broker, and lists everything in the fleet that expires."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import find_folder, folder_and_json_options, print_json
from edgekit_runtime.errors import FleetError

if TYPE_CHECKING:
    from edgekit_fleet.broker.probe import Finding
    from edgekit_fleet.manager.expiry import Expiry


@click.command("doctor")
@click.argument("brokers", nargs=-1, metavar="[HOST:PORT]...")
@click.option("--no-tls", is_flag=True, help="Probe a broker on this machine without TLS.")
@folder_and_json_options
def command(brokers: tuple[str, ...], *, no_tls: bool, path: Path | None, as_json: bool) -> None:
    """Test a broker, and list what expires in the fleet and how to renew it.

    Pass each node of a cluster as HOST:PORT. The broker must trust the fleet's authority, and the fleet's
    manager must not be connected to it. Without HOST:PORT, the command starts and tests mosquitto with the
    settings of `edgekit fleet up`.
    """
    folder = find_folder(path)
    from edgekit_fleet.identity.authority import open_authority
    from edgekit_fleet.operations.doctor import find_expiries, probe_broker, probe_own

    if brokers:
        addresses = tuple(_read_address(text) for text in brokers)
        authority = None if no_tls else open_authority(folder, folder.read_settings())
        findings = probe_broker(authority, addresses)
    else:
        findings = probe_own()
    expiries = find_expiries(folder) if folder.has_settings else []
    if as_json:
        print_json({"broker": findings, "expiries": expiries})
    else:
        _print(findings, expiries)
    refused = [finding.check for finding in findings if finding.effect == "refused"]
    if refused:
        raise FleetError(f"no fleet may run on this broker: {', '.join(refused)}")


def _print(findings: list[Finding], expiries: list[Expiry]) -> None:
    from edgekit_host.terminal import open_console, print_section

    console, now = open_console(), time.time()
    rows = [
        (finding.check, "yes" if finding.works else "no", finding.effect, finding.text)
        for finding in findings
    ]
    print_section(console, "Broker", rows)
    due = [
        ("act now" if expiry.is_urgent(now) else "act soon", expiry)
        for expiry in expiries
        if expiry.is_due(now)
    ]
    print_section(
        console, "Ends to be valid", [(how, expiry.describe(now), expiry.advice) for how, expiry in due]
    )
    if expiries and not due:
        first = expiries[0]
        print_section(console, "Ends to be valid", [("nothing soon", f"first {first.describe(now)}")])


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError(f"{text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)
