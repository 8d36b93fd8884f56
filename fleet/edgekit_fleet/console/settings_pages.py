"""The settings pages: users, tokens, enrolment codes, saved filters, and keys."""

import time
from collections.abc import Sequence
from typing import Final

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.access import second_factor, tokens, users
from edgekit_fleet.access.principal import SCOPES, SCOPES_OF_ROLE
from edgekit_fleet.console.shell import Console, Section, local_address
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations import devices, saved
from edgekit_fleet.store.tables import CodeRow, DeviceRow
from edgekit_runtime.errors import FleetError
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX, list_keys

SECTION: Final = Section("Settings", "/settings", 70)
_DAY_S: Final = 86_400.0
_LIVES: Final = {"30": 30, "90": 90, "365": 365, "": None}
_MOST_CODES: Final = 100


def show_users(console: Console, request: Request) -> Response:
    """Return the page of users and their roles for an administrator. Other users are redirected."""
    if not request.state.principal.may("admin"):
        return console.redirect(request, "/settings/fleet")
    with console.store.snapshot() as session:
        user_list = users.list_users(session)
    return console.render(request, "settings_users.html", users=user_list, roles=SCOPES_OF_ROLE)


def change_user(console: Console, request: Request) -> Response:
    """Add or remove a user, or change their role, password or second factor, and redirect."""
    form, actor = request.state.form, request.state.principal.name
    name, action = form.get("name", ""), form.get("action", "")
    with console.store.transaction() as session:
        if action == "add":
            users.add_user(session, name, form.get("password", ""), form.get("role", ""), actor=actor)
            notice = f"{name} may log in now."
        elif action == "role":
            users.set_role(session, name, form.get("role", ""), actor=actor)
            notice = f"{name} is {form.get('role')} now."
        elif action == "password":
            users.set_password(session, name, form.get("password", ""), actor=actor)
            notice = f"{name} has a new password, and has to log in again."
        elif action == "second-factor":
            second_factor.remove_factor(session, name, actor=actor)
            notice = f"{name} has no second factor any more."
        elif action == "remove":
            users.remove_user(session, name, actor=actor)
            notice = f"{name} is removed."
        else:
            raise FleetError(f"action {action[:80]!r}, expected add, role, password, second-factor or remove")
    return console.redirect(request, "/settings", notice)


def show_tokens(console: Console, request: Request, secret: str = "", name: str = "") -> Response:
    with console.store.snapshot() as session:
        token_list = tokens.list_tokens(session)
    return console.render(
        request, "settings_tokens.html", tokens=token_list, scopes=SCOPES, secret=secret, name=name
    )


def change_token(console: Console, request: Request) -> Response:
    """Add a token and return the page that shows its secret once, or revoke a token and redirect."""
    form, actor = request.state.form, request.state.principal.name
    name = form.get("name", "")
    if form.get("action") == "revoke":
        with console.store.transaction() as session:
            tokens.revoke_token(session, name, actor=actor)
        return console.redirect(request, "/settings/tokens", f"Token {name} has ended.")
    chosen = [scope for scope in SCOPES if form.get(f"scope-{scope}")]
    days = _LIVES.get(form.get("days", ""), 90)
    with console.store.transaction() as session:
        life_s = None if days is None else days * _DAY_S
        secret = tokens.add_token(session, name, chosen, actor=actor, life_s=life_s)
    return show_tokens(console, request, secret, name)


def show_codes(
    console: Console, request: Request, invitations: Sequence[devices.Invitation] = ()
) -> Response:
    """Return the page of unused enrolment codes. It also shows the secret codes in `invitations`."""
    statement = (
        select(CodeRow)
        .where(CodeRow.used_at.is_(None), CodeRow.expires_at > time.time())
        .order_by(CodeRow.created_at.desc())
        .limit(_MOST_CODES)
    )
    with console.store.snapshot() as session:
        codes = session.scalars(statement).all()
        targets = session.scalars(select(DeviceRow.target).distinct().order_by(DeviceRow.target)).all()
    return console.render(request, "settings_codes.html", codes=codes, made=invitations, targets=targets)


def make_codes(console: Console, request: Request) -> Response:
    """Make enrolment codes for the devices in the form, and return the page that shows them once.

    Raises:
        FleetError: The form names no devices, or too many.
        ConfigError: A name is malformed or taken, or a tag is malformed.
    """
    form = request.state.form
    names = tuple(form.get("names", "").split())
    if not 1 <= len(names) <= _MOST_CODES:
        raise FleetError(f"names of {len(names)} devices, expected 1 to {_MOST_CODES}")
    tags = dict(word.split("=", 1) for word in form.get("tags", "").split() if "=" in word)
    invitations = devices.invite(
        console.store,
        console.settings,
        Authority(console.folder.identity),
        names,
        actor=request.state.principal.name,
        target=form.get("target", "").strip(),
        tags=tags,
    )
    return show_codes(console, request, invitations)


def show_fleet_settings(console: Console, request: Request) -> Response:
    """Return the page of addresses, keys and saved filters."""
    with console.store.snapshot() as session:
        filters, windows = saved.list_queries(session), saved.list_windows(session)
    keys = [path.name.removesuffix(PUBLIC_KEY_SUFFIX) for path in list_keys(find_keys_folder())]
    return console.render(
        request,
        "settings_fleet.html",
        settings=console.settings,
        store=console.store.name,
        keys=keys,
        saved=filters,
        windows=windows,
    )


def remove_query(console: Console, request: Request) -> Response:
    """Delete a saved filter."""
    form = request.state.form
    saved.remove_query(console.store, form.get("name", ""), request.state.principal.name)
    return console.redirect(
        request, local_address(form.get("next", "/settings/fleet")), "The filter is forgotten."
    )


def change_window(console: Console, request: Request) -> Response:
    """Save or remove a named window of hours in which devices may switch versions, and redirect."""
    form, actor = request.state.form, request.state.principal.name
    name = form.get("name", "").strip()
    if form.get("action") == "remove":
        saved.remove_window(console.store, name, actor)
        return console.redirect(request, "/settings/fleet", "The window is forgotten.")
    saved.save_window(console.store, name, form.get("window", "").strip(), actor)
    return console.redirect(request, "/settings/fleet", f"Plans offer the window '{name}' now.")


def list_routes(console: Console) -> list[Route]:
    return [
        console.post("/queries/remove", remove_query, "device"),
        console.get("/settings", show_users),
        console.post("/settings/users", change_user, "admin"),
        console.get("/settings/tokens", show_tokens, "admin"),
        console.post("/settings/tokens", change_token, "admin"),
        console.get("/settings/codes", show_codes),
        console.post("/settings/codes", make_codes, "device"),
        console.get("/settings/fleet", show_fleet_settings),
        console.post("/settings/windows", change_window, "rollout"),
    ]
