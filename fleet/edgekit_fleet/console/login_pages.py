"""Login, logout, and the page that adds the first administrator."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.access.guard import BROWSER, LOGIN, read_cookie, set_cookie
from edgekit_fleet.access.logins import KNOWN_S, browser_of, close_login, find_login, open_login
from edgekit_fleet.access.sign_on import open_signed_on
from edgekit_fleet.console.shell import Console, local_address, switch_theme
from edgekit_runtime.errors import EdgekitError, RequestError


def show_login(console: Console, request: Request) -> Response:
    target = local_address(request.query_params.get("next", "/"))
    if request.state.identity is not None:  # a proxy has logged the user in
        with console.store.transaction() as session:
            secret = open_signed_on(session, request.state.identity, time.time())
        return _enter(console, request, secret, target)
    return console.render(request, "login.html", target=target, name="", problem="", order="")


def log_in(console: Console, request: Request) -> Response:
    """Log in the user of the form, and redirect to the requested page. A failure is shown in the form.

    If the user had sent a form after the previous login expired, the response asks to confirm that form.
    """
    form = request.state.form
    name, target = form.get("name", ""), local_address(form.get("next", "/"))
    order = form.get("order_before", "")
    address = request.client.host if request.client else ""
    try:
        secret = console.desk.log_in(
            name, form.get("password", ""), address, read_cookie(request, BROWSER), code=form.get("code", "")
        )
    except RequestError as error:
        status = error.status
        return console.render(
            request, "login.html", status=status, target=target, name=name, problem=str(error), order=order
        )
    if not order:
        return _enter(console, request, secret, target)
    login = find_login(console.store, secret, time.time())
    if login is not None:
        request.state.principal, request.state.csrf = login.principal, login.csrf_token
    return _set_cookies(request, console.ask_to_confirm(request, order), secret)


def log_out(console: Console, request: Request) -> Response:
    """End the login, remove its cookie, and redirect to the login form."""
    if request.state.principal is not None:  # a stranger must not delay writers
        with console.store.transaction() as session:
            close_login(session, read_cookie(request, LOGIN))
    response = console.redirect(request, "/login", "You are logged out.")
    set_cookie(request, response, LOGIN, "")
    return response


def show_first(console: Console, request: Request) -> Response:
    """Return the form that adds the first administrator, with the code from the link."""
    code = request.query_params.get("code", "")
    return console.render(request, "first.html", code=code, name="", problem="")


def make_first(console: Console, request: Request) -> Response:
    """Add the first administrator, log them in, and redirect. An error is shown in the form."""
    form = request.state.form
    code, name = form.get("code", ""), form.get("name", "")
    try:
        with console.store.snapshot() as session:
            console.first_admin.check(session, code)
        with console.store.transaction() as session:
            console.first_admin.claim(session, code, name, form.get("password", ""))
            secret = open_login(session, name, time.time())
    except EdgekitError as error:
        return console.render(request, "first.html", status=422, code=code, name=name, problem=str(error))
    return _enter(console, request, secret, "/")


def _enter(console: Console, request: Request, secret: str, target: str) -> Response:
    return _set_cookies(request, console.redirect(request, target), secret)


def _set_cookies(request: Request, response: Response, secret: str) -> Response:
    set_cookie(request, response, LOGIN, secret)
    set_cookie(request, response, BROWSER, browser_of(secret), KNOWN_S)
    return response


def list_routes(console: Console) -> list[Route]:
    return [
        console.get("/login", show_login, None),
        console.post("/login", log_in, None),
        console.post("/logout", log_out, None),
        console.get("/first", show_first, None),
        console.post("/first", make_first, None),
        console.post("/theme", switch_theme, None),
    ]
