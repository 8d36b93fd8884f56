"""`edgekit fleet up`: runs a whole fleet on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.fleet.fleet_options import find_folder, folder_option
from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from edgekit_fleet.admin_listener import AdminListener
    from edgekit_fleet.operations.running import RunningFleet
    from edgekit_fleet.store.fleet_folder import FleetSettings

_SWITCH_S = 0.0005
"""The time that a thread holds the interpreter while others wait for it, in seconds."""
_OBJECTS_A_COLLECTION = 20_000
_OF_ONE_MACHINE = {"host", "console_port", "console_certificate", "console_key", "trusted_proxies"} | {
    f"sign_on_{part}" for part in ("proxies", "headers", "roles", "secret")
}


def _read_brokers(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(address.removeprefix("mqtts://") for address in value.split(",")) if value else ()


@click.command("up")
@folder_option
@click.option("--host", help="Address to listen on, or 0.0.0.0 for all addresses.  [default: 127.0.0.1]")
@click.option(
    "--name", "names", multiple=True, help="DNS name or address under which devices find this machine."
)
@click.option("--broker-port", type=click.IntRange(1, 65535), help="TCP port of MQTT.  [default: 8883]")
@click.option("--web-port", type=click.IntRange(1, 65535), help="TCP port of HTTPS.  [default: 8443]")
@click.option(
    "--database",
    "store_url",
    metavar="URL",
    help="PostgreSQL database, as postgresql://USER@HOST[,HOST]/NAME.  [default: SQLite in the folder]",
)
@click.option(
    "--broker",
    "brokers",
    callback=_read_brokers,
    metavar="mqtts://HOST:PORT[,HOST:PORT]",
    help="External brokers, which devices try one after the other.  [default: a mosquitto that this command"
    " starts]",
)
@click.option(
    "--join",
    "joins",
    is_flag=True,
    help="Start a further manager with console and API for a running fleet. See docs/guide/scale.md.",
)
@click.option(
    "--artifacts-storage",
    help="Storage to which packages are copied: s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER.",
)
@click.option(
    "--artifacts-url",
    help="URL from which devices download packages, such as a CDN.  [default: this machine]",
)
@click.option(
    "--encrypt/--no-encrypt",
    "encrypts",
    default=None,
    help="Encrypt releases, unless a release says otherwise.  [default: no encryption]",
)
@click.option(
    "--console-port", type=click.IntRange(1, 65535), help="TCP port of console and API.  [default: 8444]"
)
@click.option("--console-certificate", help="PEM file that browsers trust.  [default: the fleet's own]")
@click.option("--console-key", help="PEM file of its private key.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address or network of a proxy in front of console or web server. Its X-Forwarded-For header names"
    " the client.",
)
@click.option(
    "--require-second-factor/--no-second-factor",
    "requires_second_factor",
    default=None,
    help="Whether each user with a password needs one-time codes.",
)
@click.option(
    "--sign-on-proxy",
    "sign_on_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address or network of a proxy that logs users in, such as oauth2-proxy. See docs/guide/scale.md.",
)
@click.option(
    "--sign-on-headers", metavar="BEGIN", help="Prefix of the proxy's headers.  [default: X-Auth-Request]"
)
@click.option(
    "--sign-on-role", "sign_on_roles", multiple=True, metavar="GROUP=ROLE", help="Role of a group of users."
)
@click.option(
    "--sign-on-secret", metavar="FILE", help="Secret that the proxy sends as X-Edgekit-Proxy-Secret."
)
@click.option(
    "--root-keys",
    "root_folder",
    type=click.Path(path_type=Path),
    help="Folder for the root's keys at the first start, such as a USB stick.  [default: in the fleet's"
    " folder]",
)
@as_json_option
def command(
    path: Path | None, *, as_json: bool, joins: bool, root_folder: Path | None, **options: Any
) -> None:
    """Start broker, web server and manager, and run them until Ctrl-C.

    The first start creates the fleet with its authority, keys and store. Options are saved for the next
    start. All connections are encrypted, and each device needs a certificate of the fleet.
    """
    folder = find_folder(path)
    from edgekit_fleet.admin_listener import serve_people
    from edgekit_fleet.operations.running import start
    from edgekit_fleet.store.fleet_folder import FleetSettings
    from edgekit_runtime.system.own_process import share_heap

    share_heap()  # before threads start
    settings = folder.read_settings() if joins or folder.has_settings else FleetSettings()
    chosen: dict[str, Any] = {name: value for name, value in options.items() if value or value is False}
    if joins and chosen.keys() - _OF_ONE_MACHINE:
        raise click.UsageError(
            "--join takes all but --host, --console-... and --trusted-proxy from the folder"
        )
    settings = dataclasses.replace(settings, **chosen)
    with contextlib.ExitStack() as parts:
        fleet = parts.enter_context(start(folder, settings, joins=joins, root_folder=root_folder))
        name = _find_own_name(settings) if joins else settings.names[0]
        people = parts.enter_context(serve_people(fleet.store, folder, settings, fleet.authority, name))
        asyncio.run(_run(fleet, people, as_json=as_json))
    if not as_json:
        click.echo("Stopped.")


def _find_own_name(settings: FleetSettings) -> str:
    """Return the name of this additional manager's machine. The fleet's first name is another machine."""
    if settings.host not in ("0.0.0.0", "::"):  # noqa: S104 - compared
        return settings.host
    own = socket.gethostname()
    return next((name for name in settings.names if name.partition(".")[0] == own.partition(".")[0]), own)


async def _run(fleet: RunningFleet, people: AdminListener, *, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    _print(fleet, people, as_json=as_json)
    prepare_interpreter()
    await fleet.loop.run(stop)


def prepare_interpreter() -> None:
    """Make Python switch threads more often and collect garbage less often.

    The garbage collector ignores the objects that exist at this call.
    """
    # Beside a long plan a page waits for the interpreter at each row that it reads: with the 5 ms of Python
    # it took 250 to 450 ms, 90 without a plan. The manager's turns are on the same interpreter.
    sys.setswitchinterval(_SWITCH_S)
    # Devices in memory stay, and messages leave no cycles: collections took a quarter of the time of a wave.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_A_COLLECTION)


def _print(fleet: RunningFleet, people: AdminListener, *, as_json: bool) -> None:
    settings = fleet.settings
    facts = {
        "folder": str(fleet.folder.path),
        "broker": f"mqtts://{','.join(settings.broker_addresses)}",
        "web": f"https://{settings.web_address}",
        "console": people.url,
        "store": fleet.store.name,
        "devices": len(fleet.loop.index.devices),
        "shards": len(fleet.loop.shards.epochs),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"Fleet in {facts['folder']}{' (new)' if fleet.is_new else ''}")
    own = "" if fleet.broker is None else f"   mosquitto, process {fleet.broker.pid}"
    click.echo(f"  broker   {facts['broker']}{own}")
    click.echo(f"  web      {facts['web']}")
    click.echo(f"  console  {people.url}")
    click.echo(f"  store    {facts['store']}")
    click.echo(f"  devices  {facts['devices']}")
    if any(fleet.folder.repository_keys.glob("root-*.pem")):
        click.echo(
            "The root's keys lie beside the others, where one thief gets all. Move them off this machine:"
            f" mv {shlex.quote(str(fleet.folder.repository_keys))}/root-*.pem STICK/"
        )
    if people.first_link:
        click.echo(f"Make the first administrator, within an hour: {people.first_link}")
    if settings.is_local:
        click.echo("Only this machine reaches it; for others: --host 0.0.0.0 --name NAME")
    click.echo("Next, in another terminal: edgekit fleet enroll --name d1")
    click.echo("Ctrl-C stops all of it.")
