"""Operations on devices: invite, list, describe, explain, tag, revoke."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.identity import enrolment
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations.device_search import Search, find_devices
from edgekit_fleet.operations.streams import hide_passwords, read_streams
from edgekit_fleet.rollouts.preview import NO_DECRYPTION_KEY
from edgekit_fleet.store import audit
from edgekit_fleet.store.attributes import list_models, list_stable, replace_attributes
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import (
    AuditRow,
    CodeRow,
    DesiredRow,
    DeviceRow,
    ExecutionRow,
    ReleasePackageRow,
    WantedModelRow,
    read_record,
)
from edgekit_runtime.agent.documents import ENDED, Reported
from edgekit_runtime.agent.trusted_time import RELEASED_S, format_utc
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import NotFoundError
from edgekit_runtime.protocol.streams import StreamOptions

_NO_REASON: Final = "it states no reason"
_DAY_S: Final = 86_400.0
_CLOCK_DIGITS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """A one-time code for a device.

    Attributes:
        device: The name of the device.
        code: The code for `edgekit-device enroll --code`.
        expires_at: The time of expiry, in seconds since 1970.
    """

    device: str
    code: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """A device in a list.

    Attributes:
        name, target, tags, status, because, is_online, last_seen_at: See `DeviceRow`. A revoked device has
            the status `revoked`.
        models: A dict from model to the version that the device reports.
    """

    name: str
    target: str
    tags: Mapping[str, str]
    status: str
    because: str
    is_online: bool
    last_seen_at: float | None
    models: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDetail:
    """All information about a device.

    Attributes:
        summary: The entry of the device in a list.
        why: A text about the version that the device runs, the desired version, and any obstacle.
        facts, pinned, certificate_serial, certificate_expires_at, enrolled_at: See `DeviceRow`.
        desired_sent, desired_held: The `$version` of the desired document that was last sent, and the
            `$version` of the desired document that the device has.
        desired: A dict from model to desired version.
        executions: The newest attempts to run a version (`ExecutionRow`), as plain values.
        reported: The last report of the device as plain values, or None.
        streams: The desired streams, without passwords.
        settings: The desired settings.
    """

    summary: DeviceSummary
    why: str
    facts: Mapping[str, str]
    pinned: Mapping[str, str]
    certificate_serial: str
    certificate_expires_at: float
    enrolled_at: float
    desired_sent: int
    desired_held: int
    desired: Mapping[str, str]
    executions: tuple[Mapping[str, Any], ...]
    reported: Mapping[str, Any] | None
    streams: Mapping[str, StreamOptions]
    settings: Mapping[str, str]


def invite(
    store: Store,
    settings: FleetSettings,
    authority: Authority,
    names: tuple[str, ...],
    *,
    actor: str,
    target: str = "",
    tags: Mapping[str, str] | None = None,
    life_s: float = 86_400.0,
) -> list[Invitation]:
    """Make a one-time code for each of these devices. If an error is raised, no code is made.

    Args:
        store: The store of the fleet.
        settings: The settings of the fleet.
        authority: The authority of the fleet.
        names: The names of the devices.
        actor: The actor who invites the devices.
        target: The target of their packages, or empty if the devices state it.
        tags: The tags of the devices.
        life_s: The lifetime of the codes in seconds.

    Raises:
        ConfigError: A name is malformed or taken, or a tag is malformed.
    """
    invitations = []
    with store.transaction() as session:
        for name in names:
            secret = enrolment.make_code(session, name, actor=actor, target=target, tags=tags, life_s=life_s)
            code = enrolment.format_code(settings.web_address, authority, secret)
            invitations.append(Invitation(device=name, code=code, expires_at=time.time() + life_s))
    return invitations


def page_devices(
    store: Store, selector: str, *, after: str = "", limit: int = 100
) -> tuple[list[DeviceSummary], str | None]:
    """Return a page of devices, sorted by name.

    Also return the value of `after` for the next page, or None on the last page.

    Raises:
        FleetError: The selector is malformed.
    """
    with store.snapshot() as session:
        page = find_devices(session, Search(selector=selector), by_name=True, after=after, limit=limit)
        return [_summarize(row) for row in page.rows], page.after or None


def describe(store: Store, name: str) -> DeviceDetail:
    """Return all information about a device.

    Raises:
        FleetError: There is no such device.
    """
    with store.snapshot() as session:
        row = session.get(DeviceRow, name)
        if row is None:
            raise NotFoundError(_explain_absence(session, name))
        desired_rows = session.scalars(select(WantedModelRow).where(WantedModelRow.device == name)).all()
        sent = session.scalar(select(DesiredRow.version).where(DesiredRow.device == name)) or 0
        newest = session.scalars(
            select(ExecutionRow)
            .where(ExecutionRow.device == name)
            .order_by(ExecutionRow.created_at.desc())
            .limit(10)
        ).all()
        desired = {
            desired_row.model: desired_row.document.get("version", "")
            for desired_row in desired_rows
            if not desired_row.is_removed
        }
        return read_record(
            DeviceDetail,
            row,
            summary=_summarize(row),
            why=" ".join((_explain(row, sent, desired_rows, newest), *_find_faults(session, row))),
            desired_sent=sent,
            desired=desired,
            executions=tuple(
                {
                    name: getattr(execution, name)
                    for name in ("execution", "rollout", "model", "version", "state", "reason", "code")
                }
                for execution in newest
            ),
            streams={name: hide_passwords(stream) for name, stream in read_streams(row.streams).items()},
        )


def tag(store: Store, name: str, tags: Mapping[str, str], actor: str) -> None:
    """Set some tags of a device. Its other tags are kept, and an empty value removes a tag.

    Raises:
        FleetError: There is no such device.
        ConfigError: A tag is malformed.
    """
    enrolment.check_tags({key: value for key, value in tags.items() if value})
    with store.transaction() as session:
        row = enrolment.find_device(session, name)
        row.tags = {key: value for key, value in {**row.tags, **tags}.items() if value}
        session.flush()
        replace_attributes(session, {name: list_stable(row.facts, list_models(row.reported))})
        audit.record(session, actor, "device.tag", name, tags=dict(tags))


def revoke(store: Store, name: str, actor: str, why: str) -> None:
    """Revoke a device. The manager closes its connection within seconds.

    Raises:
        FleetError: There is no such device, or it is already revoked.
    """
    with store.transaction() as session:
        enrolment.revoke(session, name, actor, why)


def _explain_absence(session: Session, name: str) -> str:
    """Return why there is no such device."""
    code = session.scalars(
        select(CodeRow).where(CodeRow.device == name).order_by(CodeRow.expires_at.desc()).limit(1)
    ).first()
    if code is None:
        return f"no device '{name}' is enrolled; `edgekit fleet devices` lists them"
    if code.expires_at < time.time():
        return f"'{name}' never used its code, which has expired; make a new one: edgekit fleet enroll"
    return f"'{name}' has a code and has not used it yet: run `edgekit-device enroll --code CODE` on it"


def _summarize(row: DeviceRow) -> DeviceSummary:
    return read_record(DeviceSummary, row, models=list_models(row.reported))


def _explain(row: DeviceRow, sent: int, desired_rows: Any, executions: Any) -> str:
    """Return a sentence about the version that the device runs, the desired version, and any obstacle."""
    if row.revoked_at is not None:
        why = f" ({row.because})" if row.because else ""
        return (
            f"{row.name} was revoked at {format_utc(row.revoked_at)}{why}, so it gets nothing;"
            f" `edgekit fleet enroll --name {row.name}` makes a code that lets it in again."
        )
    if row.last_seen_at is None:
        return f"{row.name} is enrolled and has never connected: run `edgekit-device agent` on it."
    report = None if row.reported is None else from_plain(Reported, row.reported, row.name)
    runs = {model.model: model for model in report.models} if report is not None else {}
    parts = []
    for desired_row in desired_rows:
        there = runs.get(desired_row.model)
        has = there.version if there is not None and there.version else "nothing"
        want = "no version of it" if desired_row.is_removed else desired_row.document["version"]
        if (
            not desired_row.is_removed
            and there
            and there.manifest_sha256 == desired_row.document["manifest_sha256"]
        ):
            continue
        if desired_row.is_removed and has == "nothing":
            continue
        step = next(
            (
                execution
                for execution in executions
                if execution.execution == desired_row.document.get("execution")
            ),
            None,
        )
        obstacle = _obstacle(row, sent, there, step)
        parts.append(f"{desired_row.model}: it runs {has} and should run {want}, but {obstacle}")
    if parts:
        return f"{row.name}: {'; '.join(parts)}."
    running = (
        ", ".join(f"{model.model} {model.version or 'nothing'}" for model in runs.values()) or "no model"
    )
    state = "as it should" if desired_rows else "and nothing else is wanted of it"
    contact = "" if row.is_online else f" (offline; last seen {_ago(row.last_seen_at)})"
    because = (
        f", but is {row.status}: {row.because or _NO_REASON}" if row.status in ("diverged", "stale") else ""
    )
    faults = "".join(
        f", but {model.because or f'{model.model} is faulty, and {_NO_REASON}'}"
        for model in runs.values()
        if model.health == "faulty"
    )
    return f"{row.name} runs {running}, {state}{contact}{because}{faults}."


def _find_faults(session: Session, row: DeviceRow) -> Iterator[str]:
    """Yield a sentence for a wrong clock, a decryption key that is missing, and a copied identity."""
    clock = str(row.facts.get("clock", ""))
    if clock.isdecimal() and len(clock) < _CLOCK_DIGITS and row.revoked_at is None:
        is_ahead = int(clock) > (row.last_seen_at or math.inf) + _DAY_S
        if (
            is_ahead or int(clock) < RELEASED_S or "clock_fault" in row.facts
        ):  # not behind the manager's: reports may be late
            yield f"Its clock says {format_utc(int(clock))}: set it on the device."
    if not row.decryption_key and row.revoked_at is None:
        is_encrypted = (ReleasePackageRow.target == row.target) & (ReleasePackageRow.key_id != "")
        if session.scalars(select(ReleasePackageRow.release).where(is_encrypted).limit(1)).first():
            yield f"{NO_DECRYPTION_KEY[0].upper()}{NO_DECRYPTION_KEY[1:]}."
    for key, problem in sorted(((row.reported or {}).get("settings") or {}).items()):
        if problem and key in row.settings:
            yield f"Its setting {key}={row.settings[key]} has no effect: {problem}."
    alarm = select(AuditRow).where(
        AuditRow.subject == row.name, AuditRow.action == audit.COPY_ALARM, AuditRow.at > time.time() - _DAY_S
    )
    if (newest := session.scalars(alarm.order_by(AuditRow.number.desc()).limit(1)).first()) is not None:
        yield f"At {format_utc(newest.at)}: {newest.detail['text']}."


def _obstacle(row: DeviceRow, sent: int, there: Any, step: Any) -> str:
    if not row.is_online:
        return f"it is offline, and was last seen {_ago(row.last_seen_at or 0.0)}"
    if row.desired_held < sent:
        return f"it holds document {row.desired_held} and has not taken document {sent} yet"
    if there is not None and there.because:
        return str(there.because)
    if step is not None and step.state in ENDED and step.state != "succeeded":
        return f"the attempt {step.state.replace('_', ' ')}: {step.reason or 'no reason was stated'}"
    if step is not None:
        progress = f", {step.done_bytes} bytes so far" if step.state == "downloading" else ""
        return f"it is {step.state}{progress}{': ' if step.reason else ''}{step.reason}"
    return row.because or "it has not answered yet"


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
