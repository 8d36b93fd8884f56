"""`edgekit fleet device`, `tag` and `why` for one device, and `devices` for the list."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, format_time, print_json, read_tags, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_runtime.errors import FleetError, RequestError
from edgekit_runtime.protocol.device_settings import SETTINGS

if TYPE_CHECKING:
    from edgekit_fleet.api.client import FleetCaller
    from edgekit_fleet.operations.devices import DeviceDetail, DeviceSummary

_LOGS_S = 30.0
_PAUSE_S = 0.25
_ASK = "; repeat it with "


@click.command("device")
@click.argument("name")
@click.option(
    "--tag", "tags", multiple=True, metavar="NAME=VALUE", help="Set a tag. An empty value removes it."
)
@click.option(
    "--revoke",
    metavar="REASON",
    help="Revoke the device's certificates for this reason, so that it can no longer connect.",
)
@click.option(
    "--config",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help=f"Change a setting ({', '.join(SETTINGS)}). An empty value lets the device decide again.",
)
@click.option(
    "--logs",
    "lines",
    type=click.IntRange(1, 1000),
    help="Show this number of lines from the end of its logs.",
)
@click.option("--yes", "is_sure", is_flag=True, help="Set tags even if the device then gets another version.")
@folder_and_json_options
def command(
    name: str,
    *,
    tags: tuple[str, ...],
    revoke: str | None,
    settings: tuple[str, ...],
    lines: int | None,
    is_sure: bool,
    path: Path | None,
    as_json: bool,
) -> None:
    """Show the device NAME. Options change its tags or settings, revoke it, or show its logs."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import RevokeDevice, get_device, revoke_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        if tags:
            set_tags(fleet, name, read_tags(tags), is_sure=is_sure)
        if revoke is not None:
            fleet.call(revoke_device, RevokeDevice(name=name, reason=revoke))
        if settings:
            from edgekit_fleet.api.endpoints.devices import ChangeSettings, change_settings

            changes = read_tags(settings, option="--config")
            fleet.call(change_settings, ChangeSettings(name=name, settings=changes))
        if lines is not None:
            _show_logs(fleet, name, lines, as_json=as_json)
            return
        device = fleet.call(get_device, Named(name=name))
    if as_json:
        print_json(device)
    else:
        _show(device)


def _show(device: DeviceDetail) -> None:
    from edgekit_host.terminal import open_console, print_line, print_section

    console = open_console()
    print_line(console, (device.why, "bold"))
    summary = device.summary
    rows = [
        ("class", summary.target),
        ("status", f"{summary.status}{', online' if summary.is_online else ''}"),
        ("last seen", format_time(summary.last_seen_at)),
        ("document", f"{device.desired_sent} sent, {device.desired_held} held"),
        ("certificate", f"{device.certificate_serial}, until {format_time(device.certificate_expires_at)}"),
    ]
    print_section(console, "Device", rows)
    print_section(console, "Tags", sorted(summary.tags.items()))
    names = sorted({*summary.models, *device.desired})
    models = [
        (
            name,
            f"runs {summary.models.get(name) or 'nothing'}",
            f"should run {device.desired.get(name, 'the same')}",
        )
        for name in names
    ]
    print_section(console, "Models", models)
    from edgekit_cli.fleet.stream import describe_streams

    print_section(console, "Streams", describe_streams(device))
    stated = (device.reported or {}).get("settings", {})
    effects = [
        (key, value, stated.get(key, "not reported") or "in effect")
        for key, value in sorted(device.settings.items())
    ]
    print_section(console, "Settings", effects)
    steps = [
        (execution["model"], execution["version"], execution["state"], execution["reason"])
        for execution in device.executions
    ]
    print_section(console, "Attempts, newest first", steps)
    print_section(console, "Facts", sorted(device.facts.items()))


def _show_logs(fleet: FleetCaller, name: str, lines: int, *, as_json: bool) -> None:
    """Request log lines from the device, wait for them, and show them."""
    from edgekit_fleet.api.endpoints.devices import AskForLogs, GetLog, ask_for_logs, get_log

    log = fleet.call(ask_for_logs, AskForLogs(name=name, lines=lines))
    end = time.monotonic() + _LOGS_S
    while log.answered_at is None and (rest_s := end - time.monotonic()) > 0:
        log = fleet.call(get_log, GetLog(name=name, wait=rest_s))
        time.sleep(_PAUSE_S if log.answered_at is None else 0.0)  # a fleet in a folder answers at once
    if log.answered_at is None:
        raise FleetError(
            f"{name} has not answered within {_LOGS_S:.0f} s; `edgekit fleet why {name}` says whether it is"
            " connected. Its answer will be in the console"
        )
    if log.refusal:
        raise FleetError(f"{name}: {log.refusal}")
    show(log, [log.text or "the logs are empty"], as_json=as_json)


@click.command("tag")
@click.argument("device")
@click.argument("tags", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--yes", "is_sure", is_flag=True, help="Set tags even if the device then gets another version.")
@folder_and_json_options
def tag(device: str, tags: tuple[str, ...], *, is_sure: bool, path: Path | None, as_json: bool) -> None:
    """Set tags of DEVICE, such as site=lyon. An empty value removes a tag."""
    read = read_tags(tags)
    with connect(path) as fleet:
        summary = set_tags(fleet, device, read, is_sure=is_sure)
    tag_text = ", ".join(f"{name}={value}" for name, value in sorted(summary.tags.items()))
    show(summary, [f"{device}: {tag_text or 'no tags'}"], as_json=as_json)


def set_tags(fleet: FleetCaller, device: str, tags: Mapping[str, str], *, is_sure: bool) -> DeviceSummary:
    """Set tags of a device, and return the device with its new tags.

    An empty value removes a tag. If the change affects an open rollout, the user is asked on the terminal
    unless `is_sure`.

    Raises:
        FleetError: There is no such device, or there is no terminal for the question.
        RequestError: The server of the fleet refuses the change.
        click.Abort: The user answers no.
    """
    from edgekit_fleet.api.endpoints.devices import TagDevice, tag_device

    try:
        return fleet.call(tag_device, TagDevice(name=device, tags=tags, is_sure=is_sure))
    except (FleetError, RequestError) as error:
        if _ASK not in str(error) or not sys.stdin.isatty():
            raise
        click.confirm(f"{str(error).partition(_ASK)[0]}. Go on?", abort=True)
    return fleet.call(tag_device, TagDevice(name=device, tags=tags, is_sure=True))


@click.command("why")
@click.argument("name")
@folder_and_json_options
def why(name: str, *, path: Path | None, as_json: bool) -> None:
    """Explain what the device NAME runs, what it should run, and why they differ."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import get_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        device = fleet.call(get_device, Named(name=name))
    if as_json:
        print_json({"device": name, "why": device.why})
    else:
        from edgekit_host.terminal import open_console, print_line

        print_line(open_console(), device.why)


@click.command("devices")
@click.argument("selector", default="all")
@folder_and_json_options
def devices(selector: str, *, path: Path | None, as_json: bool) -> None:
    """List the devices that match SELECTOR, such as "class=jetson and site=lyon". The default is all."""
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.devices import ListDevices, list_devices

        summaries = list(list_all(fleet, list_devices, ListDevices, selector=selector))
    if as_json:
        print_json(summaries)
        return
    from edgekit_host.terminal import open_console, print_line, print_section

    console = open_console()
    if not summaries:
        hint = f"; if that is a name: edgekit fleet device {selector}" if selector.isidentifier() else ""
        print_line(console, f"No device matches '{selector}'{hint}. `edgekit fleet enroll` lets devices in.")
        return
    titles = "Devices: class, status, connection, models, tags, last seen"
    print_section(console, titles, [_list_facts(device) for device in summaries])


def _list_facts(device: DeviceSummary) -> tuple[str, ...]:
    return (
        device.name,
        device.target,
        device.status,
        "online" if device.is_online else "offline",
        ", ".join(f"{name} {version}" for name, version in device.models.items()) or "no model",
        ", ".join(f"{name}={value}" for name, value in device.tags.items()) or "no tag",
        format_time(device.last_seen_at),
    )
