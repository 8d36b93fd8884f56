"""The HTTP interface of a fleet at `/api/v1`, built from the table of endpoints."""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgekit_fleet.access.guard import bearer_of
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api import problems, repeats
from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint, Fleet
from edgekit_fleet.api.endpoints.table import ENDPOINTS, PREFIX
from edgekit_fleet.api.openapi import make_document
from edgekit_fleet.api.request_reader import parse_request, receive_file
from edgekit_fleet.web.request_body import read_body
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import RequestError

_MAX_BODY_BYTES: Final = 1 << 20
_BODY_S: Final = 20.0
_POLL_S: Final = 0.5
_MOST_WAITING: Final = 200
_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

Handler = Callable[[Request], Awaitable[Response]]


def make_api(fleet: Fleet) -> Starlette:
    """Return the application of the HTTP interface. It serves the paths below `/api/v1` (see `join_apps`)."""
    document = encode_json(make_document())
    waiting = asyncio.Semaphore(_MOST_WAITING)
    by_path: dict[str, dict[str, Handler]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = _Operation(fleet, endpoint, waiting).answer

    async def show_document(_request: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [Route("/openapi.json", show_document, methods=["GET"])]
    # Starlette takes the first path that fits: `/rollouts/plan` stands before `/rollouts/{name}`.
    for path, handlers in sorted(by_path.items(), key=lambda item: item[0].replace("{", "\x7f")):
        routes.append(Route(path, _choose(handlers), methods=list(handlers)))
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _show_http_error, Exception: _show_error}
    )
    app.router.redirect_slashes = False  # it would send clients to whatever host the request names
    return app


def join_apps(api: ASGIApp, fallback: ASGIApp) -> ASGIApp:
    """Return an application that uses `api` for paths below `/api/v1`, and `fallback` for all others.

    Both get the full path.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Not by `Mount`, whose pattern no path with a line feed fits.
        if scope["type"] == "http" and scope["path"].startswith(f"{PREFIX}/"):
            await api({**scope, "root_path": PREFIX}, receive, send)
        else:
            await fallback(scope, receive, send)

    return answer


def _choose(handlers: dict[str, Handler]) -> Handler:
    async def answer(request: Request) -> Response:
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise HTTPException(405)
        return await handler(request)

    return answer


class _Operation:
    """Answers requests to one endpoint."""

    def __init__(self, fleet: Fleet, endpoint: AnyEndpoint, waiting: asyncio.Semaphore) -> None:
        self._fleet = fleet
        self._endpoint = endpoint
        self._waiting = waiting

    async def answer(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except problems.REFUSALS as error:
            return problems.problem_response(error)

    async def _answer(self, request: Request) -> Response:
        endpoint, store = self._endpoint, self._fleet.store
        principal = await run_in_threadpool(bearer_of, request, store)
        if principal is None:
            raise RequestError(401, "send a token: Authorization: Bearer ekt_...")
        principal.require(endpoint.scope)
        if endpoint.method == "PUT":
            sha256 = request.path_params["sha256"]
            async with receive_file(request, self._fleet.folder.uploads, sha256) as path:
                parsed = parse_request(endpoint, request, b"", file=path)
                return await run_in_threadpool(self._run, principal, parsed)
        body = await read_body(request, _MAX_BODY_BYTES, _BODY_S) if endpoint.method == "POST" else b""
        parsed = parse_request(endpoint, request, body)
        key = request.headers.get("idempotency-key")
        if key is not None and endpoint.method == "POST" and endpoint.scope != "read":
            # Not without the token: the body may hold a password, which nobody shall guess by its digest.
            secret = request.headers["authorization"]
            fingerprint_input = b"\n".join(
                (secret.encode(), request.method.encode(), request.url.path.encode(), body)
            )
            keyed = repeats.KeyedRequest(
                principal.name, repeats.check_key(key), hashlib.sha256(fingerprint_input).hexdigest()
            )
            return await run_in_threadpool(self._run_once, keyed, principal, parsed)
        if endpoint.is_done is not None and parsed.wait:
            await self._wait(principal, parsed)
        return await run_in_threadpool(self._run, principal, parsed)

    async def _wait(self, principal: Principal, parsed: Any) -> None:
        if self._endpoint.is_done is None or self._waiting.locked():
            return
        end = time.monotonic() + parsed.wait
        async with self._waiting:
            while time.monotonic() < end:
                answer = await run_in_threadpool(self._endpoint.run, self._fleet, principal, parsed)
                if self._endpoint.is_done(parsed, answer):
                    return
                await asyncio.sleep(_POLL_S)

    def _run(self, principal: Principal, parsed: Any) -> Response:
        answer = self._endpoint.run(self._fleet, principal, parsed)
        return _json_response(self._endpoint.status, json.dumps(to_plain(answer)).encode())

    def _run_once(self, keyed: repeats.KeyedRequest, principal: Principal, parsed: Any) -> Response:
        before = repeats.begin_request(self._fleet.store, keyed, time.time())
        if before is not None:
            return _json_response(*before)
        status = 500
        stored = b""
        try:
            try:
                response = self._run(principal, parsed)
            except problems.REFUSALS as error:
                response = problems.problem_response(error)
            status = response.status_code
            is_secret = self._endpoint.is_secret and status < 400
            stored = b"" if is_secret else bytes(response.body)
        finally:
            repeats.end_request(self._fleet.store, keyed, status, stored)
        return response


def _json_response(status: int, body: bytes) -> Response:
    kind = "application/json" if status < 400 else problems.MEDIA_TYPE
    return Response(body, status, _HEADERS, kind)


async def _show_http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  # registered for it
    detail = {404: "there is no such path", 405: "the path knows other methods"}.get(error.status_code, "")
    response = problems.problem_response(RequestError(error.status_code, detail or error.detail))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _show_error(_request: Request, error: Exception) -> Response:
    return problems.problem_response(error)
