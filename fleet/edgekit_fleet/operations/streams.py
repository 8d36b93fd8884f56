"""Operations on the desired streams of single devices: set, remove, list."""

from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy.orm import Session

from edgekit_fleet.identity.enrolment import find_device
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.tables import DeviceRow
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import FleetError, NotFoundError
from edgekit_runtime.protocol.streams import StreamOptions, check_fleet_streams, hide_password


def set_stream(store: Store, device: str, name: str, settings: StreamOptions, *, actor: str) -> None:
    """Set a desired stream of a device. An earlier stream of that name is replaced.

    Raises:
        FleetError: There is no such device, or its streams exceed a limit.
    """
    with store.transaction() as session:
        row = find_device(session, device)
        streams = {**row.streams, name: settings.to_json()}
        try:
            check_fleet_streams(read_streams(streams))
        except ValueError as cause:
            raise FleetError(str(cause)) from cause
        audit.record(
            session, actor, "device.stream", device, stream=name, **hide_passwords(settings).to_json()
        )
        _write(session, row, streams)


def remove_stream(store: Store, device: str, name: str, *, actor: str) -> None:
    """Remove a desired stream from a device, which then stops the stream.

    Raises:
        FleetError: There is no such device, or it has no such desired stream.
    """
    with store.transaction() as session:
        row = find_device(session, device)
        if name not in row.streams:
            names = ", ".join(sorted(row.streams)) or "none"
            raise NotFoundError(f"the fleet wants no stream '{name[:64]}' of '{device}', it wants: {names}")
        audit.record(session, actor, "device.stream-removed", device, stream=name)
        _write(session, row, {key: value for key, value in row.streams.items() if key != name})


def read_streams(plain: Mapping[str, object]) -> dict[str, StreamOptions]:
    """Return a dict from name to stream, with passwords. `plain` is the value of `DeviceRow.streams`."""
    return {name: from_plain(StreamOptions, settings, name) for name, settings in sorted(plain.items())}


def hide_passwords(settings: StreamOptions) -> StreamOptions:
    """Return the stream without the passwords in the addresses of its source and sinks."""
    sinks = tuple(map(hide_password, settings.sinks))
    return replace(settings, source=hide_password(settings.source), sinks=sinks)


def _write(session: Session, row: DeviceRow, streams: Mapping[str, object]) -> None:
    row.streams = dict(streams)
    mark_due(session, [row.name])
