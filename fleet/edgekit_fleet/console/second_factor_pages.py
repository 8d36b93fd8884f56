"""The page on which users add or remove their second factor."""

import time

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from edgekit_fleet.access.client_network import find_network
from edgekit_fleet.access.second_factor import (
    NewSecondFactor,
    add_factor,
    check_factor,
    confirm_factor,
    has_factor,
    remove_factor,
)
from edgekit_fleet.console.formats import draw_qr_code
from edgekit_fleet.console.shell import Console
from edgekit_runtime.errors import RequestError


def show_factor(console: Console, request: Request) -> Response:
    """Return the page of the user's second factor. Without a login, redirect to the login page."""
    if request.state.principal is None:
        return RedirectResponse("/login?next=/second-factor", 303)
    return _show(console, request)


def _show(
    console: Console, request: Request, new: NewSecondFactor | None = None, problem: str = ""
) -> Response:
    with console.store.snapshot() as session:
        is_there = has_factor(session, request.state.principal.name)
    return console.render(
        request,
        "second_factor.html",
        status=422 if problem else 200,
        is_there=is_there,
        is_required=console.settings.requires_second_factor,
        new=new,
        qr_code=draw_qr_code(new.uri) if new else "",
        problem=problem,
    )


def change_factor(console: Console, request: Request) -> Response:
    """Add a second factor for the user, confirm it with its first code, or remove it with a code.

    The page reports a wrong code. A wrong code for a removal also raises an alarm.

    Raises:
        RequestError: 401, there is no login. 422, the action is unknown.
    """
    if request.state.principal is None:
        raise RequestError(401, "log in first")
    name, form, now = request.state.principal.name, request.state.form, time.time()
    action, code = form.get("action", ""), form.get("code", "")
    if action not in ("add", "confirm", "remove"):
        raise RequestError(422, f"action {action[:80]!r}, expected add, confirm or remove")
    with console.store.transaction() as session:
        if action == "add":
            return _show(console, request, add_factor(session, name, actor=name, is_confirmed=False))
        is_right = (
            confirm_factor(session, name, code, now)
            if action == "confirm"
            else check_factor(session, name, code, now) == "right"
        )
        if is_right and action == "remove":
            remove_factor(session, name, actor=name)
    if not is_right:
        if action == "remove":  # by somebody at an open login, perhaps
            address = find_network(request.client.host if request.client else "")
            text = f"'{name}' was to lose the second factor by a wrong one-time code"
            console.desk.alarm("alarm.login", address, text, now)
        return _show(
            console, request, problem="The code is wrong, or was used, or too many were. Begin again."
        )
    notice = "Each login needs a code now." if action == "confirm" else "The second factor is removed."
    return console.redirect(request, "/second-factor", notice)


def list_routes(console: Console) -> list[Route]:
    return [
        console.get("/second-factor", show_factor, None),
        console.post("/second-factor", change_factor, None),
    ]
