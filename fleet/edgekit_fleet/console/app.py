"""The application of the console: the routes of all its modules, and the headers of every response."""

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

from edgekit_fleet import console as folder
from edgekit_fleet.console import rollouts
from edgekit_fleet.console.live import EventPosition
from edgekit_fleet.console.shell import STATIC, Console, Section
from edgekit_runtime.errors import OutputError, RequestError
from edgekit_runtime.system.folder_modules import import_modules

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self';"
        " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_BY_TLS_ALONE: Final = ("strict-transport-security", "max-age=31536000")
_COMPRESSION: Final = 5  # of 1..9. A page of 200 kB takes 4 ms


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
    """Redirect a browser that opens the address of an action, as from its history, to the page above."""
    return RedirectResponse(request.url.path.rpartition("/")[0] or "/", 303)


def make_routes(console: Console) -> list[BaseRoute]:
    async def stream_changes(request: Request) -> Response:
        try:
            principal = await run_in_threadpool(console.find_principal, request)
        except OutputError:
            return Response(status_code=503)
        except RequestError as error:
            return Response(status_code=error.status)
        if principal is None or not principal.scopes:
            return Response(status_code=401)
        if not console.watcher.admits(principal.name):
            return Response(status_code=503)
        last_event = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        events = console.watcher.listen(EventPosition.parse(last_event), principal.name)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    modules = [*import_modules(folder), *import_modules(rollouts)]
    sections: list[Section] = [module.SECTION for module in modules if hasattr(module, "SECTION")]
    console.sections = tuple(sorted(sections, key=lambda section: section.position))
    pages: list[Route] = [
        route for module in modules if hasattr(module, "list_routes") for route in module.list_routes(console)
    ]
    return [
        # Starlette takes the first path that fits: `/rollouts/new` stands before `/rollouts/{name}`.
        *sorted(pages, key=lambda route: route.path.replace("{", "\x7f")),
        Route("/live", stream_changes),
        Mount("/static", _StaticFiles(directory=STATIC)),
    ]
