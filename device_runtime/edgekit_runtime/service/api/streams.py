"""The endpoints that list streams, send their answers, open streams for clients, and show the live page."""

import base64
import functools
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError, RequestError
from edgekit_runtime.protocol.json_fields import load_small
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.answers.answer_path import AnswerPath
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.response import make_head, make_json
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.options.config import ServiceConfig
from edgekit_runtime.service.streams.fleet_streams import FleetStreams
from edgekit_runtime.service.streams.model_calls import ModelCalls
from edgekit_runtime.service.streams.stream import View
from edgekit_runtime.service.streams.streams import Streams
from edgekit_runtime.service.streams.viewers import PICTURES_TYPE

Action = Callable[[Connection, RequestHead, memoryview], None]
_LINES_TYPE: Final = "application/x-ndjson"
_READ: Final = ("GET", "HEAD")
_PARTS: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class StreamsHandler:
    def __init__(self, streams: Streams, fleet: FleetStreams | None, *, is_live: bool) -> None:
        """Handle requests about `streams`. `fleet` is None if the fleet may not start streams."""
        self.streams, self._fleet, self._is_live = streams, fleet, is_live
        self._numbers = iter(range(1, 1 << 62))

    def follow_fleet(self) -> None:
        """Start and stop streams to match the fleet's orders."""
        if self._fleet is not None:
            self._fleet.look()

    def find(self, parts: list[str]) -> tuple[tuple[str, ...], Action] | None:
        """Return the allowed methods and the action for the segments of a path, or None for other paths."""
        match parts:
            case ["v2", "streams"]:
                return ("GET", "HEAD", "POST"), self._respond_streams
            case ["v2", "streams", name, "answers"]:
                return ("GET",), functools.partial(self._view, name, "lines")
            case ["live"] if self._is_live:
                return _READ, self._respond_page
            case ["live", file] if self._is_live and file.endswith(".mjpeg"):
                return ("GET",), functools.partial(self._view, file.removesuffix(".mjpeg"), "pictures")
        return None

    def _respond_streams(self, connection: Connection, head: RequestHead, body: memoryview) -> None:
        if head.method == "POST":
            self._run(connection, body)
        else:
            of_fleet = None if self._fleet is None else self._fleet.to_json()
            document = {"streams": self.streams.to_json(), **({"fleet": of_fleet} if of_fleet else {})}
            connection.respond(*make_json(document))

    def _run(self, connection: Connection, body: memoryview) -> None:
        """Run a stream for as long as the client reads its answers."""
        if not connection.is_own_user:
            # It opens files, devices and addresses, and writes files, with the rights of the service.
            raise RequestError(
                403,
                "streams are started by the user of the service or by root over the Unix socket;"
                " or state them in the service's configuration",
            )
        stated: dict[str, Any] = load_small(body)
        name = stated.pop("name", None) or f"client-{next(self._numbers)}"
        if not isinstance(name, str):
            raise RequestError(400, "the stream's name is no text")
        try:
            options = from_plain(StreamOptions, stated, "stream")
            self.streams.check_model(options)
            self.streams.add(name, options)
        except ConfigError as error:
            raise RequestError(400, str(error)) from error
        self._attach(connection, name, "lines", on_close=lambda: self.streams.remove(name))

    def _view(
        self, name: str, view: View, connection: Connection, head: RequestHead, _body: memoryview
    ) -> None:
        self.streams.find(name)
        self.streams.check_room()
        is_trial = view == "pictures" and head.query == "trial"  # with boxes of the version on trial, too
        self._attach(connection, name, "trial" if is_trial else view)

    def _attach(
        self,
        connection: Connection,
        name: str,
        view: View,
        *,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Let a client read the stream; its response has no end."""
        stream = self.streams.find(name)
        content_type = _LINES_TYPE if view == "lines" else PICTURES_TYPE
        lines = (
            "HTTP/1.1 200 OK",
            f"Content-Type: {content_type}",
            "Cache-Control: no-store",
            # An <img> of another page sends no Origin.
            "Cross-Origin-Resource-Policy: same-origin",
        )
        head = "\r\n".join([*lines, "Connection: close", "", ""]).encode("ascii")
        connected, _ = connection.release()
        self.streams.view(stream, connected, head, view=view, on_close=on_close)

    def _respond_page(self, connection: Connection, _head: RequestHead, _body: memoryview) -> None:
        page, policy = _read_page()
        fields = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "X-Frame-Options": "DENY"}
        connection.respond(make_head(200, "text/html; charset=utf-8", len(page), fields), page)


def open_streams(
    config: ServiceConfig, answers: AnswerPath, registry: Registry, http: HttpServer
) -> StreamsHandler:
    """Return the handler for the streams of a service. No stream is opened yet."""
    live = config.live
    is_live = not config.listen.is_beyond_loopback if live.enabled is None else live.enabled
    calls = ModelCalls(answers, registry, http)
    streams, of_fleet = Streams(http.loop, calls, live, config.media), config.fleet_streams
    fleet = (
        FleetStreams(Path(of_fleet.file), streams, allows_files=of_fleet.allows_files)
        if of_fleet.file
        else None
    )
    return StreamsHandler(streams, fleet, is_live=is_live)


@functools.cache
def _read_page() -> tuple[bytes, str]:
    """Return the live page, and the policy that lets it run only its own script."""
    page = resources.files("edgekit_runtime.service.streams").joinpath("live.html").read_bytes()
    sources = {
        kind: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for kind, text in _PARTS.findall(page.decode())
    }
    allowed = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in sources.items())
    policy = f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:"
    return page, f"{policy}; base-uri 'none'; form-action 'none'"
