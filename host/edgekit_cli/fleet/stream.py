"""`edgekit fleet stream`: which cameras of a device run which models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_cli.fleet.fleet_options import folder_and_json_options, print_json
from edgekit_cli.fleet.fleet_server import connect
from edgekit_cli.number_range import NumberRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgekit_fleet.operations.devices import DeviceDetail


@click.group("stream")
def command() -> None:
    """Say which streams a device runs: a camera, the model that answers, where answers go."""


@command.command("set")
@click.argument("device")
@click.argument("name")
@click.option("--model", required=True, help="The model that answers.")
@click.option(
    "--source", required=True, help="Camera, address, video or folder, as of edgekit-device stream."
)
@click.option("--sink", "sinks", multiple=True, help="Where answers go, such as mqtt://broker; repeatable.")
@click.option(
    "--every", type=click.IntRange(1, 2**31 - 1), default=1, metavar="N", help="Only each N-th frame."
)
@click.option(
    "--min-score", type=NumberRange(0, 1), metavar="SCORE", help="Leave weaker results out of answers."
)
@click.option("--max-fps", type=NumberRange(0, 1000), metavar="N", help="Most frames in a second.")
@folder_and_json_options
def set_command(
    device: str,
    name: str,
    *,
    sinks: tuple[str, ...],
    path: Path | None,
    as_json: bool,
    **settings: object,
) -> None:
    """Let DEVICE run the stream NAME, in place of an earlier one of this name."""
    from edgekit_runtime.dataclass_json import from_plain
    from edgekit_runtime.protocol.streams import StreamSettings

    stream = from_plain(StreamSettings, {**settings, "sinks": list(sinks)}, "stream")
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import SetStream, set_stream

        detail = fleet.call(set_stream, SetStream(name=device, stream=name, settings=stream))
    _show(detail, as_json=as_json)


@command.command("remove")
@click.argument("device")
@click.argument("name")
@folder_and_json_options
def remove(device: str, name: str, path: Path | None, as_json: bool) -> None:
    """Let DEVICE end the stream NAME."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import NamedStream, remove_stream

        detail = fleet.call(remove_stream, NamedStream(name=device, stream=name))
    _show(detail, as_json=as_json)


@command.command("list")
@click.argument("device")
@folder_and_json_options
def list_command(device: str, path: Path | None, as_json: bool) -> None:
    """List the streams of DEVICE, and how they do."""
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.devices import get_device
        from edgekit_fleet.api.endpoints.endpoint import Named

        detail = fleet.call(get_device, Named(name=device))
    _show(detail, as_json=as_json)


def describe_streams(detail: DeviceDetail) -> list[tuple[str, str, str]]:
    """Return name, what is wanted and what is reported of each stream of a device."""
    reported: Mapping[str, Mapping[str, object]] = (detail.reported or {}).get("streams", {})
    rows = []
    for name, settings in detail.streams.items():
        stated = reported.get(name, {})
        rate = f", {stated['fps']} a second" if stated.get("fps") else ""
        error = f": {stated['error']}" if stated.get("error") else ""
        wish = f"{settings.model} on {settings.source}"
        rows.append((name, wish, f"{stated.get('state', 'not reported')}{rate}{error}"))
    return rows


def _show(detail: DeviceDetail, *, as_json: bool) -> None:
    from edgekit_runtime.system.shown_text import clean

    if as_json:
        print_json({"desired": detail.streams, "reported": (detail.reported or {}).get("streams", {})})
        return
    rows = describe_streams(detail)
    for row in rows:
        click.echo(clean("  ".join(row)))
    if not rows:
        click.echo(f"the fleet wants no stream of {detail.summary.name}")
