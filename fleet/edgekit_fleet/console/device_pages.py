"""The pages of devices: the filtered list, a device with its twin and history, tags, and revocation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.shell import Console, Section, local_address, with_query
from edgekit_fleet.operations import device_orders, devices, saved
from edgekit_fleet.operations.device_search import ATTENTION, Search, Special, count_devices, find_devices
from edgekit_fleet.operations.rollouts import find_tag_effects
from edgekit_fleet.store.attributes import list_models
from edgekit_fleet.store.tables import (
    AttributeRow,
    AuditRow,
    DeviceLogRow,
    DeviceRow,
    ExecutionRow,
    WantedModelRow,
)
from edgekit_runtime.errors import FleetError
from edgekit_runtime.protocol.device_settings import SETTINGS

SECTION: Final = Section("Devices", "/devices", 20)
_PAGE: Final = 50
_HISTORY: Final = 40
_LOG_LINES: Final = 200
_SPECIAL_WORDS: Final = {
    "silent": "silent for over a week",
    "expiring": "whose certificate ends within 30 days",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinRow:
    """A model on a device, with its desired and its reported version.

    Attributes:
        desired: The version that the manager wants. It is empty if the model is to be removed, and None if
            the manager wants no particular version.
        reported: The version that the device reports, or empty.
        health, because: The health that the device reports, and its reason.
        differs: Whether the desired and the reported package differ.
        rollout, release: The rollout and release of the desired version, or empty.
        is_pinned: Whether the version of the device is pinned.
    """

    model: str
    desired: str | None
    reported: str
    health: str
    because: str
    differs: bool
    rollout: str
    release: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Happening:
    """An event in a device's history.

    Attributes:
        at: The time of the event, in seconds since 1970.
        state: The state or kind of the event. The template `macros.html` shows it with an icon.
        detail: Further text, or empty.
        rollout: The rollout that the event belongs to, or empty.
    """

    at: float
    state: str
    text: str
    detail: str = ""
    rollout: str = ""


def show_devices(console: Console, request: Request) -> Response:
    """Return a page of the devices that match the query. An error in the selector is shown on the page."""
    query = request.query_params
    text = query.get("selector", "").strip()
    problem = ""
    with console.store.snapshot() as session:
        search = _read_search(query, _complete(session, text))
        by_name = query.get("sort") == "name"
        try:
            counts = count_devices(session, search)
        except FleetError as error:
            problem, search, counts = str(error), Search(selector="name=none"), {}
        page = find_devices(
            session, search, by_name=by_name, after=query.get("after", ""), limit=_PAGE, counts=counts
        )
        filters = saved.list_queries(session)
    by_status = {
        status: counts.get((status, True), 0) + counts.get((status, False), 0) for status in ATTENTION
    }
    total = by_status.get(search.status, 0) if search.status else sum(by_status.values())
    return console.render(
        request,
        "devices.html",
        rows=page.rows,
        next_page=with_query(request, after=page.after) if page.after else "",
        first_page=with_query(request, after="") if query.get("after") else "",
        text=text,
        search=search,
        special_words=_SPECIAL_WORDS.get(search.special, ""),
        problem=problem,
        by_status=by_status,
        total=total,
        all_devices=sum(by_status.values()),
        by_name=by_name,
        saved=filters,
        link=lambda **changes: with_query(request, **{"after": "", **changes}),
        list_models=list_models,
    )


def _read_search(query: Mapping[str, str], selector: str) -> Search:
    special = query.get("special", "")
    status = query.get("status", "")
    return Search(
        selector=selector,
        status=status if status in ATTENTION else "",
        special=special if special in get_args(Special) else "",  # type: ignore[arg-type]
    )


def _complete(session: Any, text: str) -> str:
    """Return the selector for typed text. A single word that is not a tag matches parts of device names."""
    is_word = text.replace("-", "").replace("_", "").replace(".", "").isalnum() and text != "all"
    if (
        is_word
        and session.scalar(select(AttributeRow.device).where(AttributeRow.name == text).limit(1)) is None
    ):
        return f"name=*{text}*"
    return text


def save_query(console: Console, request: Request) -> Response:
    """Save the filter in the form under the given name, and redirect. All users see saved filters."""
    form = request.state.form
    name, selector = form.get("name", "").strip(), form.get("selector", "").strip()
    saved.save_query(console.store, name, selector, request.state.principal.name)
    return console.redirect(request, local_address(form.get("next", "/devices")), f"Saved as '{name}'.")


def show_device(console: Console, request: Request) -> Response:
    name = request.path_params["name"]
    detail = devices.describe(console.store, name)
    with console.store.snapshot() as session:
        row = session.get_one(DeviceRow, name)
        desired_rows = session.scalars(select(WantedModelRow).where(WantedModelRow.device == name)).all()
        history = _read_history(session, name)
        log = session.get(DeviceLogRow, name)
    live_url = str(detail.facts.get("live", ""))
    return console.render(
        request,
        "device.html",
        device=detail,
        row=row,
        twin=_make_twin(detail, desired_rows),
        history=history,
        streams=(detail.reported or {}).get("streams", {}),
        live_url=live_url if live_url.startswith(("http://", "https://")) else "",
        tags=_write_tags(detail.summary.tags),
        settings=(detail.reported or {}).get("settings", {}),
        known_settings=SETTINGS,
        log=log if "device" in request.state.principal.scopes else None,
    )


def _make_twin(detail: devices.DeviceDetail, desired_rows: Any) -> list[TwinRow]:
    reported = {model["model"]: model for model in (detail.reported or {}).get("models", ())}
    orders = {row.model: row for row in desired_rows}
    twin = []
    for model in sorted({*reported, *orders}):
        there, order = reported.get(model, {}), orders.get(model)
        document = order.document if order is not None and not order.is_removed else {}
        is_wanted = order is not None
        differs = is_wanted and document.get("manifest_sha256", "") != there.get("manifest_sha256", "")
        twin.append(
            TwinRow(
                model=model,
                desired=document.get("version", "") if is_wanted else None,
                reported=there.get("version", ""),
                health=there.get("health", "missing"),
                because=there.get("because", ""),
                differs=differs,
                rollout=(order.rollout or "") if order is not None else "",
                release=document.get("release", ""),
                is_pinned=model in detail.pinned,
            )
        )
    return twin


def _read_history(session: Any, name: str) -> list[Happening]:
    """Return the history of a device, newest first: executions, events, and actions of users."""
    executions = select(ExecutionRow).where(ExecutionRow.device == name)
    events = [
        Happening(
            at=row.ended_at or row.changed_at,
            state=row.state,
            text=f"{row.model} {row.version}",
            detail=row.reason,
            rollout=row.rollout or "",
        )
        for row in session.scalars(executions.order_by(ExecutionRow.created_at.desc()).limit(_HISTORY))
    ]
    entries = (
        select(AuditRow).where(AuditRow.subject == name).order_by(AuditRow.number.desc()).limit(_HISTORY)
    )
    events += [_describe_entry(row) for row in session.scalars(entries)]
    return sorted(events, key=lambda event: -event.at)[:_HISTORY]


def _describe_entry(row: AuditRow) -> Happening:
    detail = row.detail
    kind = row.action.partition(".")[2]
    if row.action == "device.event":
        return Happening(row.at, "event", str(detail.get("kind", "event")), str(detail.get("text", "")))
    if row.action.startswith("alarm."):
        return Happening(row.at, "alarm", f"alarm: {kind}", str(detail.get("text", "")))
    sentences = {
        "invite": "got a code",
        "enrol": "enrolled",
        "renew": "renewed its certificate",
        "revoke": "was revoked",
        "tag": "got tags",
        "stream": f"should run the stream {detail.get('stream')}",
        "settings": f"got settings: {', '.join(map('='.join, detail.get('settings', {}).items()))}",
        "logs": f"was asked for {detail.get('lines')} lines of its logs",
        "stream-removed": f"should end the stream {detail.get('stream')}",
    }.get(kind, row.action)
    parts = [f"{key}={value}" for key, value in detail.get("tags", {}).items()] if kind == "tag" else []
    more = ", ".join(parts) or str(detail.get("why", ""))
    by = "" if row.actor in ("web", "manager") else f"by {row.actor}"
    return Happening(
        row.at, "revoked" if kind == "revoke" else "event", sentences, ": ".join(filter(None, (by, more)))
    )


def edit_tags(console: Console, request: Request) -> Response:
    """Set a device's tags to those in the form, after confirmation if this affects an open rollout."""
    name, form = request.path_params["name"], request.state.form
    detail = devices.describe(console.store, name)
    after = _read_tags(form.get("tags", ""))
    changes = {key: after.get(key, "") for key in {*detail.summary.tags, *after}}
    changes = {key: value for key, value in changes.items() if value != detail.summary.tags.get(key, "")}
    address = f"/devices/{name}"
    if not changes:
        return console.redirect(request, address, "Nothing was changed.")
    effects = find_tag_effects(console.store, name, changes)
    if effects and form.get("confirmed") != "yes":
        return console.render(request, "device_tags.html", name=name, tags=form["tags"], effects=effects)
    devices.tag(console.store, name, changes, request.state.principal.name)
    return console.redirect(request, address, f"The tags of {name} are changed.")


def _write_tags(tags: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(tags.items()))


def _read_tags(text: str) -> dict[str, str]:
    """Return the tags in a text such as `site=lyon beta=yes`.

    Raises:
        FleetError: A tag has no value.
    """
    tags = {}
    for word in text.split():
        key, sign, value = word.partition("=")
        if not (key and sign and value):
            raise FleetError(f"tags: '{word[:80]}' is no tag, expected NAME=VALUE with spaces in between")
        tags[key] = value
    return tags


def edit_settings(console: Console, request: Request) -> Response:
    """Set the settings of a device to those in the form, and redirect to the device."""
    name, form = request.path_params["name"], request.state.form
    before = devices.describe(console.store, name).settings
    after = {key: form.get(key, "").strip() for key in SETTINGS if key in form}
    changes = {key: value for key, value in after.items() if value != before.get(key, "")}
    if not changes:
        return console.redirect(request, f"/devices/{name}", "Nothing was changed.")
    device_orders.change_settings(console.store, name, changes, actor=request.state.principal.name)
    return console.redirect(request, f"/devices/{name}", f"{name} will get its settings.")


def ask_for_logs(console: Console, request: Request) -> Response:
    """Request the last log lines of a device, and redirect to its page, which shows them once they arrive."""
    name = request.path_params["name"]
    device_orders.ask_for_logs(console.store, name, _LOG_LINES, actor=request.state.principal.name)
    return console.redirect(request, f"/devices/{name}", f"{name} is asked for its logs.")


def confirm_revocation(console: Console, request: Request) -> Response:
    """Return the page that asks for a reason and a confirmation before a device is revoked."""
    detail = devices.describe(console.store, request.path_params["name"])
    return console.render(request, "device_revoke.html", device=detail)


def revoke(console: Console, request: Request) -> Response:
    """Revoke a device for the reason in the form, and redirect to the device."""
    name, why = request.path_params["name"], request.state.form.get("why", "").strip()
    if not why:
        raise FleetError("state why the device is shut out: the audit log keeps it")
    devices.revoke(console.store, name, request.state.principal.name, why[:500])
    return console.redirect(request, f"/devices/{name}", f"{name} is revoked.")


def list_routes(console: Console) -> list[Route]:
    return [
        console.get("/devices", show_devices),
        console.get("/devices/{name}", show_device),
        console.post("/devices/{name}/tags", edit_tags, "device"),
        console.post("/devices/{name}/settings", edit_settings, "device"),
        console.post("/devices/{name}/logs", ask_for_logs, "device"),
        console.get("/devices/{name}/revoke", confirm_revocation, "device"),
        console.post("/devices/{name}/revoke", revoke, "device"),
        console.post("/queries", save_query, "device"),
    ]
