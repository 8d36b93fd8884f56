"""The routes of the console, and the headers of every answer."""

from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgekit_fleet.console import (
    device_pages,
    fleet_page,
    health_page,
    login_pages,
    release_pages,
    settings_pages,
)
from edgekit_fleet.console.audit_page import AuditPages
from edgekit_fleet.console.live import EventPosition
from edgekit_fleet.console.rollouts.pages import RolloutPages
from edgekit_fleet.console.rollouts.plan_pages import PlanPages
from edgekit_fleet.console.shell import STATIC, Console, switch_theme
from edgekit_runtime.errors import OutputError

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_BY_TLS_ALONE: Final = ("strict-transport-security", "max-age=31536000")
_COMPRESSION: Final = 5  # of 1..9; a page of 200 kB takes 4 ms


class _Headers:
    """Adds the headers that keep foreign content out of every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault(*_BY_TLS_ALONE)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class _StaticFiles(StaticFiles):
    """Files whose address holds their digest, so that a browser never asks for them again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        is_fixed = response.status_code == 200 and scope["query_string"].startswith(b"v=")
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if is_fixed else "no-cache"
        return response


def make_app(console: Console) -> Starlette:
    app = Starlette(
        routes=make_routes(console),
        middleware=[Middleware(_Headers), Middleware(GZipMiddleware, compresslevel=_COMPRESSION)],
        exception_handlers={405: _lead_to_page},
    )
    app.router.redirect_slashes = False  # it would send browsers to whatever host the request names
    return app


async def _lead_to_page(request: Request, _error: Exception) -> Response:
    """Lead a browser from the address of an action, which it may have in its history, to the page above."""
    return RedirectResponse(request.url.path.rpartition("/")[0] or "/", 303)


def make_routes(console: Console) -> list[BaseRoute]:
    async def stream_changes(request: Request) -> Response:
        try:
            principal = await run_in_threadpool(console.find_principal, request)
        except OutputError:
            return Response(status_code=503)
        if principal is None:
            return Response(status_code=401)
        if not console.watcher.admits(principal.name):
            return Response(status_code=503)
        last_event = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        events = console.watcher.listen(EventPosition.parse(last_event), principal.name)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    page, audit = console.page, AuditPages()
    rollouts, plans = RolloutPages(console.closing), PlanPages(console.closing)
    return [
        Route("/", page(fleet_page.show_fleet)),
        Route("/devices", page(device_pages.show_devices)),
        Route("/devices/{name}", page(device_pages.show_device)),
        Route("/devices/{name}/tags", page(device_pages.edit_tags, "device"), methods=["POST"]),
        Route("/devices/{name}/revoke", page(device_pages.confirm_revocation, "device")),
        Route("/devices/{name}/revoke", page(device_pages.revoke, "device"), methods=["POST"]),
        Route("/queries", page(device_pages.save_query, "device"), methods=["POST"]),
        Route("/queries/remove", page(settings_pages.remove_query, "device"), methods=["POST"]),
        Route("/releases", page(release_pages.show_releases)),
        Route("/releases", console.upload(release_pages.release, "release"), methods=["POST"]),
        Route("/releases/new", page(release_pages.show_form, "release")),
        Route("/releases/{name}", page(release_pages.show_release)),
        Route("/releases/{name}/withdraw", page(release_pages.confirm_withdrawal, "release")),
        Route("/releases/{name}/withdraw", page(release_pages.withdraw, "release"), methods=["POST"]),
        Route("/rollouts", page(rollouts.show_all)),
        Route("/rollouts", page(plans.start, "rollout"), methods=["POST"]),
        Route("/rollouts/new", page(plans.show, "rollout")),
        Route("/rollouts/{name}", page(rollouts.show_one)),
        Route("/rollouts/{name}/devices", page(rollouts.show_members)),
        Route("/rollouts/{name}/abort", page(rollouts.confirm_abort, "rollout")),
        Route("/rollouts/{name}/order", page(rollouts.order, "rollout"), methods=["POST"]),
        Route("/health", page(health_page.show_health)),
        Route("/audit", page(audit.show)),
        Route("/audit/verify", page(audit.verify), methods=["POST"]),
        Route("/settings", page(settings_pages.show_users)),
        Route("/settings/users", page(settings_pages.change_user, "admin"), methods=["POST"]),
        Route("/settings/tokens", page(settings_pages.show_tokens, "admin")),
        Route("/settings/tokens", page(settings_pages.change_token, "admin"), methods=["POST"]),
        Route("/settings/codes", page(settings_pages.show_codes)),
        Route("/settings/codes", page(settings_pages.make_codes, "device"), methods=["POST"]),
        Route("/settings/fleet", page(settings_pages.show_fleet_settings)),
        Route("/settings/windows", page(settings_pages.change_window, "rollout"), methods=["POST"]),
        Route("/login", page(login_pages.show_login, None)),
        Route("/login", page(login_pages.log_in, None), methods=["POST"]),
        Route("/logout", page(login_pages.log_out, None), methods=["POST"]),
        Route("/first", page(login_pages.show_first, None)),
        Route("/first", page(login_pages.make_first, None), methods=["POST"]),
        Route("/live", stream_changes),
        Route("/theme", page(switch_theme, None), methods=["POST"]),
        Mount("/static", _StaticFiles(directory=STATIC)),
    ]
