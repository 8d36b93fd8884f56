"""Serves the page of a running demo on the loopback interface."""

import http.server
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from edgekit_offload.demo.demo_page import render_live_page, render_state
from edgekit_offload.demo.recording import Recording

if TYPE_CHECKING:
    from typing_extensions import Self

_HOST: Final = "127.0.0.1"


class LiveServer:
    """An HTTP server for the page of a demo, as a context manager."""

    def __init__(self, newest: Callable[[], Recording]) -> None:
        """Listen on a free port.

        Args:
            newest: returns the state to show; called on threads of this server.
        """

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the base class's name
                answers = {"/": render_live_page, "/state": render_state}
                render = answers.get(self.path)
                # Another site whose name points to this address and port must not read the state.
                if render is None or self.headers.get("Host") != f"{_HOST}:{self.server.server_port}":  # type: ignore[attr-defined]
                    self.send_error(404)
                    return
                recording = newest()
                body = render(recording).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Demo", "over" if recording.is_over else "running")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = http.server.ThreadingHTTPServer((_HOST, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{_HOST}:{self._server.server_port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )

    def __enter__(self) -> "Self":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
