"""`edgekit fleet stream`: sets which models a device runs on which cameras."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, show
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange
from edgekit_runtime.dataclass_json import from_plain, list_settings
from edgekit_runtime.protocol.streams import StreamOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edgekit_fleet.operations.devices import DeviceDetail


Command = TypeVar("Command", bound="Callable[..., Any]")


def _setting_options(function: Command) -> Command:
    for setting in reversed(list_settings(StreamOptions)):
        function = click.option(
            setting.flag,
            setting.name,
            type=NumberRange() if setting.kind is float else setting.kind,
            multiple=setting.is_list,
            required=setting.is_needed,
            is_flag=setting.kind is bool,
            default=None,
            help=setting.help,
        )(function)
    return function


@click.group("stream")
def command() -> None:
    """Manage the streams of a device. A stream has a camera, a model, and a destination for the answers."""


@command.command("set")
@click.argument("device")
@click.argument("name")
@_setting_options
@folder_and_json_options
def set_command(device: str, name: str, *, path: Path | None, as_json: bool, **settings: object) -> None:
    """Make DEVICE run the stream NAME, which replaces any earlier stream with this name."""
    stated = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if value is not None
    }
    stream = from_plain(StreamOptions, stated, "stream")
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import SetStream, set_stream

        detail = fleet.call(set_stream, SetStream(name=device, stream=name, settings=stream))
    _show_streams(detail, as_json=as_json)


@command.command("remove")
@click.argument("device")
@click.argument("name")
@folder_and_json_options
def remove(device: str, name: str, path: Path | None, as_json: bool) -> None:
    """Remove the stream NAME from DEVICE, and show the remaining streams of the device."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import NamedStream, remove_stream

        detail = fleet.call(remove_stream, NamedStream(name=device, stream=name))
    _show_streams(detail, as_json=as_json)


@command.command("list")
@click.argument("device")
@folder_and_json_options
def list_command(device: str, path: Path | None, as_json: bool) -> None:
    """List the streams of DEVICE and their states."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import get_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        detail = fleet.call(get_device, Named(name=device))
    _show_streams(detail, as_json=as_json)


def describe_streams(detail: DeviceDetail) -> list[tuple[str, str, str]]:
    """Return the name, `MODEL on SOURCE` and the reported state of each stream that a device should run."""
    reported: Mapping[str, Mapping[str, object]] = (detail.reported or {}).get("streams", {})
    rows = []
    for name, settings in detail.streams.items():
        stated = reported.get(name, {})
        rate = f", {stated['fps']} a second" if stated.get("fps") else ""
        error = f": {stated['error']}" if stated.get("error") else ""
        wish = f"{settings.model} on {settings.source}"
        rows.append((name, wish, f"{stated.get('state', 'not reported')}{rate}{error}"))
    return rows


def _show_streams(detail: DeviceDetail, *, as_json: bool) -> None:
    lines = ["  ".join(row) for row in describe_streams(detail)]
    none = f"the fleet wants no stream of {detail.summary.name}"
    streams = {"desired": detail.streams, "reported": (detail.reported or {}).get("streams", {})}
    show(streams, lines or [none], as_json=as_json)
