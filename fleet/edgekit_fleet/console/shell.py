"""The parts that all pages share: the user, rendering, forms, and notices.

A page is a function `(console, request) -> Response`. It runs in a thread, so it may read the store. `app`
finds the modules with pages, and their function `list_routes` returns the routes. Every action is an HTML
form that works without JavaScript. After it is posted, the browser is redirected to a page that shows the
result.
"""

import functools
import hashlib
import hmac
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from edgekit_fleet.access.client_network import PEER, find_network
from edgekit_fleet.access.first_admin import FirstAdminCode
from edgekit_fleet.access.guard import LOGIN, login_of, read_cookie, set_cookie
from edgekit_fleet.access.logins import LoginDesk, csrf_of
from edgekit_fleet.access.principal import Principal, Scope
from edgekit_fleet.access.second_factor import has_factor
from edgekit_fleet.access.sign_on import Identity, SignOn, SpoofedHeadersError, fits_login
from edgekit_fleet.console.formats import FILTERS, format_share
from edgekit_fleet.console.live import Watcher
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import UserRow
from edgekit_fleet.web.request_body import discard_body, read_body
from edgekit_fleet.web.uploads import receive_form
from edgekit_runtime.errors import EdgekitError, OutputError, RequestError
from edgekit_runtime.system.shown_text import clean_line

THEMES: Final = ("auto", "light", "dark")
STATIC: Final = Path(__file__).with_name("static")
_TEMPLATES: Final = Path(__file__).with_name("templates")
_MAX_FORM_BYTES: Final = 64 << 10
_FORM_S: Final = 10.0
_NOTICE: Final = "notice"
_THEME: Final = "theme"
_VISITOR: Final = "visitor"
_VISITOR_CHARS: Final = 32
_NOTICE_S: Final = 30
_YEAR_S: Final = 365 * 86_400
_MAX_FIELDS: Final = 200
_PASSWORD: Final = "password"  # noqa: S105  # a field's name
_OTHER_LOGIN: Final = RequestError(
    403, "the form is of another login; open the page again and repeat what you did"
)


@dataclass(frozen=True, slots=True)
class Section:
    """A link in the navigation bar. Each module with pages defines its link as `SECTION`.

    Attributes:
        position: The order of the links, from left to right.
    """

    name: str
    path: str
    position: int


Page: TypeAlias = Callable[["Console", Request], Response]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Answer = TypeVar("Answer", bound=Response | None)


class Console:
    """The pages of one fleet.

    Attributes:
        desk: Logs users in.
        first_admin: The code in the link that adds the first administrator.
        watcher: Watches the store for changes.
        closing: The resources of the console. Close it after the web server has stopped.
        sections: The links in the navigation bar.
    """

    def __init__(
        self,
        store: Store,
        folder: FleetFolder,
        settings: FleetSettings,
        first_admin: FirstAdminCode | None = None,
    ) -> None:
        self.store = store
        self.folder = folder
        self.settings = settings
        self.desk = LoginDesk(store, time.time)
        self.sign_on = SignOn(settings)
        self.first_admin = first_admin or FirstAdminCode()
        self.watcher = Watcher(store)
        self.closing = ExitStack()
        self.sections: tuple[Section, ...] = ()
        self._templates = _read_templates()

    def get(self, path: str, function: Page, scope: Scope | None = "read") -> Route:
        return Route(path, self.page(function, scope))

    def post(self, path: str, function: Page, scope: Scope | None) -> Route:
        return Route(path, self.page(function, scope), methods=["POST"])

    def page(self, function: Page, scope: Scope | None) -> Endpoint:
        """Return the endpoint of a page or an action.

        Args:
            function: The function that returns the response.
            scope: The scope that the user needs, or None if no login is needed.
        """

        async def answer(request: Request) -> Response:
            if request.method == "POST":
                try:
                    request.state.form = await _read_form(request)
                except (RequestError, ValueError) as error:
                    return HTMLResponse(f"the form cannot be read: {error}", 400)
            return await run_in_threadpool(self._answer, request, function, scope)

        return functools.wraps(function)(answer)

    def upload(self, function: Page, scope: Scope) -> Endpoint:
        """Return the endpoint of an action with uploaded files. `request.state.form` is an `UploadedForm`.

        Nothing is written to disk before the user's scope and the form's CSRF token are checked.
        """

        async def answer(request: Request) -> Response:
            refusal = await run_in_threadpool(self._guard, request, scope, self.folder.check_repository)
            if refusal is not None:
                await discard_body(request)
                return refusal
            try:
                folder = self.folder.uploads
                async with receive_form(request, folder, lambda fields: _check_csrf(request, fields)) as form:
                    request.state.form = form
                    return await run_in_threadpool(
                        self._guard, request, scope, lambda: function(self, request)
                    )
            except EdgekitError as error:
                return await run_in_threadpool(self._show_error, request, error)

        return functools.wraps(function)(answer)

    def find_principal(self, request: Request) -> Principal | None:
        """Return the user of a request, or None without a login.

        This sets three fields of `request.state`. `principal` is the user, `csrf` is the token that forms
        must contain, and `identity` is the user whom a proxy has logged in. If a second factor is required, a
        user without one gets no scopes.

        Raises:
            RequestError: The headers of a proxy are refused.
        """
        visitor = read_cookie(request, _VISITOR)
        is_known = len(visitor) >= _VISITOR_CHARS
        request.state.principal = None
        request.state.csrf = visitor if is_known else secrets.token_urlsafe(_VISITOR_CHARS)
        identity = request.state.identity = self._read_identity(request)
        login = login_of(request, self.store)
        if login is not None and fits_login(identity, login):
            request.state.principal, request.state.csrf = login.principal, login.csrf_token
            if self.settings.requires_second_factor and self._lacks_factor(login.principal.name):
                request.state.principal = Principal(login.principal.name, frozenset())
        return request.state.principal  # type: ignore[no-any-return]

    def _read_identity(self, request: Request) -> Identity | None:
        try:
            return self.sign_on.read(request)
        except SpoofedHeadersError as error:
            address = find_network(request.scope.get(PEER, ""))
            self.desk.alarm("alarm.sign-on", address, clean_line(str(error), 200), time.time())
            raise

    def _lacks_factor(self, name: str) -> bool:
        with self.store.snapshot() as session:
            return session.get_one(UserRow, name).password_digest != "" and not has_factor(session, name)

    def render(self, request: Request, template: str, /, *, status: int = 200, **values: Any) -> HTMLResponse:
        """Render a template as a page. The page shows the notice of the last `redirect`.

        Args:
            request: The request that the page answers.
            template: The name of a file in `templates/`.
            status: The HTTP status.
            values: Values for the template, in addition to those of `base.html`.
        """
        path = request.url.path
        text = self._templates.get_template(template).render(
            address=with_query(request),
            section=_find_section(path),
            sections=self.sections,
            principal=request.state.principal,
            csrf=request.state.csrf,
            theme=read_theme(request),
            notice=_read_notice(request),
            event_position=request.state.event_position,
            now=time.time(),
            **values,
        )
        response = HTMLResponse(text, status, headers={"cache-control": "no-store"})
        if request.state.principal is None:
            set_cookie(request, response, _VISITOR, request.state.csrf)
        if read_cookie(request, _NOTICE):
            set_cookie(request, response, _NOTICE, "")
        return response

    def redirect(self, request: Request, address: str, notice: str = "") -> Response:
        """Return a redirect (303) to a page of the console, which shows `notice` once."""
        response = RedirectResponse(address, 303)
        if notice:
            text = urlsafe_b64encode(notice[:1000].encode()).decode()
            set_cookie(request, response, _NOTICE, text, _NOTICE_S)
        return response

    def _answer(self, request: Request, function: Page, scope: Scope | None) -> Response:
        def act() -> Response:
            if request.method == "POST" and not _fits_csrf(request, request.state.form):
                if request.state.principal is None or not _is_own_page(request):
                    raise _OTHER_LOGIN
                return self._confirm(request)
            return function(self, request)

        return self._guard(request, scope, act)

    def _confirm(self, request: Request) -> Response:
        """Ask for confirmation of a form from another login, or of the form before a login."""
        form = request.state.form
        if request.url.path != "/login":
            return self.ask_to_confirm(request, _write_order(request), 403)
        if order := form.get("order_before"):
            return self.ask_to_confirm(request, order, 403)
        return self.redirect(request, local_address(form.get("next", "/")))

    def ask_to_confirm(self, request: Request, order: str, status: int = 200) -> Response:
        """Return a page that asks the user to confirm a form that was not sent in the current login.

        Args:
            request: The request of a user who is logged in.
            order: The path and fields of the form, `PATH?NAME=VALUE`. The text is untrusted.
            status: The HTTP status.
        """
        parts = urlsplit(local_address(order))
        fields = parse_qsl(parts.query, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        return self.render(request, "confirm.html", status=status, action=parts.path, fields=fields)

    def _guard(self, request: Request, scope: Scope | None, act: Callable[[], Answer]) -> Answer | Response:
        """Act if the user holds the scope. Else, or if the action fails, return a page that says why."""
        request.state.event_position = ""
        request.state.principal, request.state.csrf = None, ""  # for a page that says what is wrong
        try:
            principal = self.find_principal(request)
            if principal is None and scope is not None:
                return self._ask_for_login(request)
            request.state.event_position = self.watcher.read_position()
            if principal is not None and scope is not None:
                if not principal.scopes and request.method == "GET":
                    return RedirectResponse("/second-factor", 303)
                principal.require(scope)
            return act()
        except EdgekitError as error:
            return self._show_error(request, error)

    def _show_error(self, request: Request, error: EdgekitError) -> Response:
        status = _find_status(error, request.method)
        return self.render(request, "error.html", status=status, message=str(error))

    def _ask_for_login(self, request: Request) -> Response:
        """Return the way to the login, which takes a form along that was sent under the last login."""
        if "hx-request" in request.headers:  # of an open page, whose forms may be filled in
            return Response(status_code=401)
        if request.method != "POST":
            return RedirectResponse(f"/login?next={quote(with_query(request))}", 303)
        page = local_address(urlsplit(request.headers.get("referer", "")).path or "/")
        secret = read_cookie(request, LOGIN)
        fields = getattr(request.state, "form", {})
        is_by_password = request.state.identity is None
        if (
            is_by_password
            and secret
            and hmac.compare_digest(fields.get("csrf", "").encode(), csrf_of(secret).encode())
        ):
            problem = "Your login has ended, so nothing was done yet. Log in, and confirm it."
            order = _write_order(request)
            return self.render(
                request, "login.html", status=401, target=page, name="", problem=problem, order=order
            )
        return self.redirect(
            request, f"/login?next={quote(page)}", "Your login has ended, so nothing was done. Do it again."
        )


@functools.cache
def _read_templates() -> Environment:
    """Return the templates, already compiled, since this takes up to 0.1 s each on first use."""
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(FILTERS)
    templates.globals.update(themes=THEMES, assets=_list_assets(), share=format_share)
    for name in templates.list_templates():
        templates.get_template(name)
    return templates


def with_query(request: Request, **changes: str) -> str:
    """Return the path and query of a request with changed parameters. Empty parameters are omitted."""
    query = {**request.query_params, **changes}
    text = urlencode({name: value for name, value in query.items() if value})
    return f"{request.url.path}?{text}" if text else request.url.path


def local_address(text: str) -> str:
    """Return `text` if it is the address of a page of the console, else `/`."""
    is_ours = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if is_ours else "/"


def switch_theme(console: Console, request: Request) -> Response:
    """Store the theme in the form in a cookie for a year, and redirect to the previous page."""
    form: Mapping[str, str] = request.state.form
    response = console.redirect(request, local_address(form.get("next", "/")))
    theme = form.get("theme", "")
    if theme in THEMES:
        set_cookie(request, response, _THEME, theme, _YEAR_S)
    return response


def read_theme(request: Request) -> str:
    """Return the theme in the browser's cookie, or `auto` if there is none."""
    theme = read_cookie(request, _THEME)
    return theme if theme in THEMES else "auto"


def _write_order(request: Request) -> str:
    """Return the path and fields of a form as one string, without passwords."""
    fields = {
        name: "" if name == _PASSWORD else value
        for name, value in request.state.form.items()
        if name not in ("csrf", "order_before")
    }
    return f"{request.url.path}?{urlencode(fields)}"


async def _read_form(request: Request) -> dict[str, str]:
    body = await read_body(request, _MAX_FORM_BYTES, _FORM_S)
    fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    return {name: value.replace("\r\n", "\n") for name, value in fields}


def _fits_csrf(request: Request, fields: Mapping[str, str]) -> bool:
    return hmac.compare_digest(fields.get("csrf", "").encode(), request.state.csrf.encode())


def _is_own_page(request: Request) -> bool:
    """Return whether our own page sent the form. `SameSite` does not exclude other ports of the host."""
    headers = request.headers
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    return headers.get("origin", "").partition("://")[2] == headers.get("host", "unknown")


def _check_csrf(request: Request, fields: Mapping[str, str]) -> None:
    if not _fits_csrf(request, fields):
        raise _OTHER_LOGIN


def _find_status(error: EdgekitError, method: str) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, OutputError):
        return 503
    return 404 if method == "GET" else 422


def _find_section(path: str) -> str:
    return "/" if path == "/" else "/" + path.split("/")[1]


def _read_notice(request: Request) -> str:
    try:
        return urlsafe_b64decode(read_cookie(request, _NOTICE)).decode()
    except ValueError:
        return ""


def _list_assets() -> dict[str, str]:
    """Return the address of each file in `static/` by name, with a digest, so that browsers can cache it."""
    fields = {}
    for path in sorted(STATIC.rglob("*.*")):
        name = path.relative_to(STATIC).as_posix()
        fields[name] = f"/static/{name}?v={hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    return fields
