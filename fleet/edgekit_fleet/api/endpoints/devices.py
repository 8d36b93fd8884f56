"""Endpoints of devices and of the audit log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import (
    DEFAULT_LIMIT,
    Fleet,
    Named,
    Nothing,
    PageLimit,
    WaitSeconds,
    endpoint,
)
from edgekit_fleet.operations import device_orders, devices, records, rollouts, streams
from edgekit_fleet.operations.device_orders import DeviceLog
from edgekit_fleet.operations.devices import DeviceDetail, DeviceSummary, Invitation
from edgekit_fleet.operations.records import AuditRecord
from edgekit_runtime.dataclass_json import Range
from edgekit_runtime.errors import FleetError
from edgekit_runtime.protocol.streams import StreamOptions

_MOST_CODES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ListDevices:
    """Which devices to list.

    Attributes:
        selector: A selector of devices, such as `class=jetson and site=lyon`.
        limit: The maximum number of devices on the page.
        after: The name after which the page begins.
    """

    selector: str = "all"
    limit: PageLimit = DEFAULT_LIMIT
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """A page of devices, sorted by name.

    Attributes:
        items: The devices.
        next: The value of `after` for the next page, or null on the last page.
    """

    items: tuple[DeviceSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDevice:
    """Tags to set on a device.

    Attributes:
        name: The name of the device.
        tags: An object from tag to value. An empty value removes the tag.
        is_sure: Whether to set the tags even if this changes the version of the device. If false, such a
            change is refused with error 409.
    """

    name: str
    tags: Mapping[str, str]
    is_sure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeDevice:
    """A device to revoke.

    Attributes:
        name: The name of the device.
        reason: The reason for the audit log.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStream:
    """A stream that a device should run.

    Attributes:
        name: The name of the device.
        stream: The name of the stream.
        settings: The source of the stream, its model, and the destination of the answers.
    """

    name: str
    stream: str
    settings: StreamOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedStream:
    """A stream of a device.

    Attributes:
        name: The name of the device.
        stream: The name of the stream.
    """

    name: str
    stream: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSettings:
    """Settings of a device (see the guide to fleets).

    Attributes:
        name: The name of the device.
        settings: An object from key to value. With an empty value, the device uses its own setting again.
    """

    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForLogs:
    """A request for the last log lines of the service and the agent on a device.

    Attributes:
        name: The name of the device.
        lines: The number of lines. Fewer are sent if they do not all fit into a message.
    """

    name: str
    lines: Annotated[int, Range(1, 1000)] = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class GetLog:
    """The device whose log to return, and how long to wait for it.

    Attributes:
        name: The name of the device.
        wait: The maximum time to wait for the log lines, in seconds. After that, the answer has no lines.
    """

    name: str
    wait: WaitSeconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteDevices:
    """Devices that may enrol.

    Attributes:
        names: The names of the devices.
        target: The target of the devices' packages. If empty, each device states its own target.
        tags: The tags of the devices.
        hours: The lifetime of the codes in hours.
    """

    names: tuple[str, ...]
    target: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    hours: Annotated[float, Range(0.01, 8760)] = 24.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationList:
    """One-time codes, one for each device.

    Attributes:
        items: The codes.
    """

    items: tuple[Invitation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAudit:
    """Which entries of the audit log to return.

    Attributes:
        subject: The name of a device, release or rollout. An empty name matches all.
        action: A prefix of the actions, such as `rollout`.
        limit: The maximum number of entries on the page.
        before: Only entries with a lower number are returned. With 0, the newest entries are returned.
    """

    subject: str = ""
    action: str = ""
    limit: PageLimit = DEFAULT_LIMIT
    before: Annotated[int, Range(0, 1 << 50)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditList:
    """A page of the audit log, oldest entry first.

    Attributes:
        items: The entries.
        next: The value of `before` for the page with older entries, or null on the last page.
    """

    items: tuple[AuditRecord, ...]
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCheck:
    """Whether the audit log is unchanged.

    Attributes:
        broken: The number of the first changed entry, or null.
    """

    broken: Annotated[int | None, Range(0, 1 << 50)]


@endpoint("GET", "/devices", scope="read", summary="List the devices that a selector means.")
def list_devices(fleet: Fleet, _principal: Principal, request: ListDevices) -> DeviceList:
    items, following = devices.page_devices(
        fleet.store, request.selector, after=request.after, limit=request.limit
    )
    return DeviceList(items=tuple(items), next=following)


@endpoint(
    "GET",
    "/devices/{name}",
    scope="read",
    summary="Return all that is known of a device, and why it runs what it runs.",
)
def get_device(fleet: Fleet, _principal: Principal, request: Named) -> DeviceDetail:
    return devices.describe(fleet.store, request.name)


@endpoint("POST", "/devices/{name}/tags", scope="device", summary="Set or remove tags of a device.")
def tag_device(fleet: Fleet, principal: Principal, request: TagDevice) -> DeviceSummary:
    effects = [] if request.is_sure else rollouts.find_tag_effects(fleet.store, request.name, request.tags)
    if effects:
        raise FleetError(f"{'; '.join(effects)}; repeat it with `is_sure` (--yes) if that is meant")
    devices.tag(fleet.store, request.name, request.tags, principal.name)
    return devices.describe(fleet.store, request.name).summary


@endpoint("POST", "/devices/{name}/revoke", scope="device", summary="Shut a device out.")
def revoke_device(fleet: Fleet, principal: Principal, request: RevokeDevice) -> DeviceDetail:
    devices.revoke(fleet.store, request.name, principal.name, request.reason)
    return devices.describe(fleet.store, request.name)


@endpoint(
    "POST",
    "/devices/{name}/streams/{stream}",
    scope="device",
    summary="Let a device run a stream, in place of one of this name.",
)
def set_stream(fleet: Fleet, principal: Principal, request: SetStream) -> DeviceDetail:
    streams.set_stream(fleet.store, request.name, request.stream, request.settings, actor=principal.name)
    return devices.describe(fleet.store, request.name)


@endpoint("DELETE", "/devices/{name}/streams/{stream}", scope="device", summary="Let a device end a stream.")
def remove_stream(fleet: Fleet, principal: Principal, request: NamedStream) -> DeviceDetail:
    streams.remove_stream(fleet.store, request.name, request.stream, actor=principal.name)
    return devices.describe(fleet.store, request.name)


@endpoint(
    "POST",
    "/devices/{name}/settings",
    scope="device",
    summary="Change settings of a device, which its owner may have fixed.",
)
def change_settings(fleet: Fleet, principal: Principal, request: ChangeSettings) -> DeviceDetail:
    device_orders.change_settings(fleet.store, request.name, request.settings, actor=principal.name)
    return devices.describe(fleet.store, request.name)


@endpoint(
    "POST",
    "/devices/{name}/logs",
    scope="device",
    summary="Ask a device for the last lines of its logs.",
    status=201,
)
def ask_for_logs(fleet: Fleet, principal: Principal, request: AskForLogs) -> DeviceLog:
    return device_orders.ask_for_logs(fleet.store, request.name, request.lines, actor=principal.name)


@endpoint(
    "GET",
    "/devices/{name}/logs",
    scope="device",
    summary="Return the lines for which a device was asked last, at once or when they have come.",
    is_done=lambda _request, answer: answer.answered_at is not None,
)
def get_log(fleet: Fleet, _principal: Principal, request: GetLog) -> DeviceLog:
    return device_orders.find_log(fleet.store, request.name)


@endpoint(
    "POST",
    "/invitations",
    scope="device",
    summary="Make one-time codes that let devices in.",
    status=201,
    is_secret=True,
)
def invite_devices(fleet: Fleet, principal: Principal, request: InviteDevices) -> InvitationList:
    if not 0 < len(request.names) <= _MOST_CODES:
        raise FleetError(f"names: {len(request.names)} of them, expected 1 to {_MOST_CODES}")
    invitations = devices.invite(
        fleet.store,
        fleet.settings,
        fleet.authority,
        request.names,
        actor=principal.name,
        target=request.target,
        tags=request.tags,
        life_s=request.hours * 3600,
    )
    return InvitationList(items=tuple(invitations))


@endpoint("GET", "/audit", scope="read", summary="Return entries of the audit log, the newest page first.")
def read_audit(fleet: Fleet, _principal: Principal, request: ReadAudit) -> AuditList:
    records_of_page = records.read_audit(
        fleet.store,
        subject=request.subject or None,
        action=request.action or None,
        limit=request.limit + 1,
        before=request.before or None,
    )
    items = records_of_page[-request.limit :]
    return AuditList(
        items=tuple(items), next=items[0].number if len(records_of_page) > request.limit else None
    )


@endpoint("GET", "/audit/check", scope="read", summary="Check the whole audit log.")
def check_audit(fleet: Fleet, _principal: Principal, _request: Nothing) -> AuditCheck:
    return AuditCheck(broken=records.find_audit_break(fleet.store))
