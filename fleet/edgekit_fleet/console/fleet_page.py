"""The start page: problems, versions in use, and open rollouts."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.formats import format_age, format_count, format_share
from edgekit_fleet.console.rollouts.queries import count_members
from edgekit_fleet.console.shell import Console, Section
from edgekit_fleet.manager.expiry import EXPIRY_ALARM
from edgekit_fleet.operations.device_search import EXPIRING_S, SILENT_S, Search, count_devices
from edgekit_fleet.rollouts.runner import OPEN_STATES
from edgekit_fleet.store.attributes import MODEL
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import (
    AttributeRow,
    AuditRow,
    DeviceRow,
    ManagerRow,
    RolloutRow,
)

SECTION: Final = Section("Fleet", "/", 10)
_DAY_S: Final = 86_400.0
_LATE_ALARM_S: Final = 1200.0
_NO_MANAGER_S: Final = 30.0
_REASONS: Final = 2
_STOPPED: Final = "Devices keep what they run; nobody decides or takes reports in. Start `edgekit fleet up`."
_NEWEST: Final = 8
_ROUTINE: Final = ("rollout.log", "user.login", "device.renew")


@dataclass(frozen=True, slots=True)
class Concern:
    """A problem that needs attention.

    Attributes:
        kind: The kind of the icon: `bad`, `warn` or `idle`.
        text: A sentence without its full stop.
        detail: The reason or further text, or empty.
        link: The address of the page that shows the problem.
    """

    kind: str
    text: str
    detail: str
    link: str
    link_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionBar:
    """The number of devices that run a version.

    Attributes:
        share: The share of the devices with this model, as text.
        width: The width of the bar, from 0 to 1000.
        is_most: Whether this is the most used version of the model.
    """

    version: str
    devices: int
    share: str
    width: int
    is_most: bool
    link: str


def show_fleet(console: Console, request: Request) -> Response:
    with console.store.snapshot() as session:
        values = _read_values(session)
    return console.render(request, "fleet.html", **values)


def warm_up(store: Store) -> None:
    """Read the data of the start page, so that its first visitor does not wait.

    Each database connection compiles SQL statements at first use and caches them. The page uses two
    connections, so this function uses two as well.
    """
    with store.snapshot() as first, store.snapshot() as other:
        _read_values(first)
        _read_values(other)


def _read_values(session: Session) -> dict[str, Any]:
    counts = count_devices(session, Search())
    members = {key: count for key, count in counts.items() if key[0] != "revoked"}
    return {
        "devices": sum(members.values()),
        "online": sum(count for (_, is_online), count in members.items() if is_online),
        "as_wanted": sum(count for (status, _), count in members.items() if status == "converged"),
        "concerns": list(_find_concerns(session, counts)),
        "models": _read_versions(session),
        "rollouts": _read_rollouts(session),
        "newest": _read_newest(session),
    }


def _find_concerns(session: Session, counts: Mapping[tuple[str, bool], int]) -> Iterator[Concern]:
    """Yield what needs attention, the worst first."""
    yield from _find_stopped_manager(session)
    by_status: dict[str, int] = {}
    for (status, _), count in counts.items():
        by_status[status] = by_status.get(status, 0) + count
    yield from _find_rollout_concerns(session)
    for kind, status, sentence in (
        ("bad", "faulty", "{} a model whose answers are NaN or infinite"),
        ("warn", "diverged", "{} something else than wanted, and will not change it without help"),
        ("warn", "stale", "{} no valid document: newer ones do not reach them"),
    ):
        count = by_status.get(status, 0)
        if count:
            verb = {"faulty": "runs", "diverged": "runs", "stale": "holds"}[status]
            text = sentence.format(f"{_devices(count)} {verb if count == 1 else verb.removesuffix('s')}")
            yield Concern(kind, text, _read_reasons(session, status), f"/devices?status={status}", status)
    yield from _find_device_concerns(session, by_status)
    since = time.time() - _DAY_S
    expiring = (  # said once a day, by a manager that looks every ten minutes
        select(AuditRow)
        .where(AuditRow.action == EXPIRY_ALARM, AuditRow.at > since - _LATE_ALARM_S)
        .order_by(AuditRow.detail["ends_at"].as_float())
    )
    for row in {row.subject: row for row in session.scalars(expiring)}.values():
        kind = "bad" if row.detail["is_urgent"] else "warn"
        sentence, advice = (_begin(row.detail[name]) for name in ("text", "advice"))
        yield Concern(kind, sentence, advice, f"/audit?action={EXPIRY_ALARM}", "audit")
    is_alarm = (
        (AuditRow.action >= "alarm.")
        & (AuditRow.action < "alarm/")
        & (AuditRow.action != EXPIRY_ALARM)
        & (AuditRow.at > since)
    )
    alarms, number = session.execute(select(func.count(), func.max(AuditRow.number)).where(is_alarm)).one()
    if alarms:
        newest = session.get_one(AuditRow, number)
        text = f"{format_count(alarms)} alarm{'s' * (alarms != 1)} in the last 24 hours"
        last = f"The last, of {newest.subject}: {newest.detail.get('text', newest.action)}"
        yield Concern("warn", text, last, "/audit?action=alarm.", "audit")


def _find_stopped_manager(session: Session) -> Iterator[Concern]:
    at = session.scalar(select(func.max(ManagerRow.heartbeat_at)))
    if at is None:
        yield Concern("bad", "No manager is running", _STOPPED, "/audit?action=manager.", "audit")
    elif time.time() - at > _NO_MANAGER_S:
        text = f"No manager has run for {format_age(time.time() - at)}"
        yield Concern("bad", text, _STOPPED, "/audit?action=manager.", "audit")


def _find_rollout_concerns(session: Session) -> Iterator[Concern]:
    rows = session.scalars(
        select(RolloutRow)
        .where(RolloutRow.state.in_(("paused", "returning", "aborted")))
        .order_by(RolloutRow.created_at.desc())
    )
    for row in rows:
        if row.state == "aborted" and (row.ended_at or 0.0) < time.time() - 7 * _DAY_S:
            continue
        kind = "bad" if row.state == "aborted" else "warn"
        words = {"paused": "is paused", "returning": "is going back", "aborted": "was aborted"}
        yield Concern(
            kind, f"Rollout {row.name} {words[row.state]}", row.because, f"/rollouts/{row.name}", "rollout"
        )


def _find_device_concerns(session: Session, by_status: Mapping[str, int]) -> Iterator[Concern]:
    now = time.time()
    silent = session.scalar(
        select(func.count()).where(
            DeviceRow.is_online.is_(False),
            DeviceRow.last_seen_at < now - SILENT_S,
            DeviceRow.status != "revoked",
        )
    )
    if silent:
        verb = "has" if silent == 1 else "have"
        yield Concern(
            "warn",
            f"{_devices(silent)} {verb} been silent for over a week",
            "",
            "/devices?special=silent",
            "silent",
        )
    ends = select(func.count()).where(DeviceRow.certificate_expires_at < now + EXPIRING_S)
    # Both from an index: a fleet that was enrolled in one week has many, and few are revoked.
    revoked = session.scalar(ends.where(DeviceRow.status == "revoked")) or 0
    if expiring := (session.scalar(ends) or 0) - revoked:
        verb = "has" if expiring == 1 else "have"
        text = f"{_devices(expiring)} {verb} a certificate that ends within 30 days"
        detail = "A device that is connected renews its own."
        yield Concern("idle", text, detail, "/devices?special=expiring", "expiring")
    if new := by_status.get("new", 0):
        text = f"{_devices(new)} {'has' if new == 1 else 'have'} enrolled and never reported"
        yield Concern("idle", text, "", "/devices?status=new", "new")


def _begin(text: str) -> str:
    """Return a text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def _devices(count: int) -> str:
    return f"{format_count(count)} device{'s' * (count != 1)}"


def _read_reasons(session: Session, status: str) -> str:
    """Return the most frequent reasons of a status, with their counts."""
    statement = (
        select(DeviceRow.because, func.count())
        .where(DeviceRow.status == status, DeviceRow.because != "")
        .group_by(DeviceRow.because)
        .order_by(func.count().desc(), DeviceRow.because)
        .limit(_REASONS + 1)
    )
    reasons = [f"{because} ({format_count(count)})" for because, count in session.execute(statement)]
    return "; ".join(reasons[:_REASONS]) + ("; and others" if len(reasons) > _REASONS else "")


def _read_versions(session: Session) -> dict[str, list[VersionBar]]:
    """Return the versions of each model, most used first."""
    statement = (
        select(AttributeRow.name, AttributeRow.value, func.count())
        .where(AttributeRow.name >= MODEL, AttributeRow.name < f"{MODEL[:-1]};")
        .group_by(AttributeRow.name, AttributeRow.value)
    )
    counts: dict[str, dict[str, int]] = {}
    for name, version, count in session.execute(statement):
        counts.setdefault(name.removeprefix(MODEL), {})[version] = count
    models = {}
    for model, versions in sorted(counts.items()):
        total = sum(versions.values())
        most = max(versions.values())
        models[model] = [
            VersionBar(
                version=version or "none",
                devices=count,
                share=format_share(count, total),
                width=max(4, round(1000 * count / total)),
                is_most=count == most,
                link="/devices?" + urlencode({"selector": f'{MODEL}{model}="{version}"'}),
            )
            for version, count in sorted(versions.items(), key=lambda item: -item[1])[:6]
        ]
    return models


def _read_rollouts(session: Session) -> list[dict[str, object]]:
    """Return open rollouts, and how many of their devices have answered."""
    groups = []
    rows = session.scalars(
        select(RolloutRow).where(RolloutRow.state.in_(OPEN_STATES)).order_by(RolloutRow.created_at.desc())
    ).all()
    counts = count_members(session, [row.name for row in rows])
    for row in rows:
        total, done = counts[row.name].devices, counts[row.name].states.get("succeeded", 0)
        groups.append({"row": row, "total": total, "done": done, "width": round(1000 * done / max(total, 1))})
    return groups


def _read_newest(session: Session) -> list[AuditRow]:
    """Return the last actions of people and of the manager, without the statements of devices."""
    last = session.scalar(select(func.max(AuditRow.number))) or 0
    # Not in Python: an entry that is left out may have a megabyte of detail.
    statement = select(AuditRow).where(
        AuditRow.number > last - 200, AuditRow.actor != "devices", AuditRow.action.not_in(_ROUTINE)
    )
    return list(session.scalars(statement.order_by(AuditRow.number.desc()).limit(_NEWEST)))


def list_routes(console: Console) -> list[Route]:
    return [console.get("/", show_fleet)]
