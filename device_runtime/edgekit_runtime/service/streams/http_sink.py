"""A sink that sends each answer to an HTTP server as the body of a POST request."""

import base64
import functools
import http.client
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote, urlsplit

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.streams.sink import Sink, UndeliverableError

_TIMEOUT_S: Final = 5.0
_MAX_RESPONSE_BYTES: Final = 64 << 10
_LATER: Final = (408, 425, 429)  # the client may send the same again


class HttpSink(Sink):
    """Sends each answer in a separate POST request, over one connection."""

    max_batch = 1

    def __init__(self, text: str) -> None:
        """Parse the URL. Its user and password are used for basic authentication. `write` connects.

        Raises:
            ConfigError, ValueError: The URL has no host or is malformed.
        """
        parts = urlsplit(text)
        if not parts.hostname:
            raise ConfigError("the sink http://… names no host")
        self._target = parts.path + (f"?{parts.query}" if parts.query else "") or "/"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._open = functools.partial(kind, parts.hostname, parts.port, timeout=_TIMEOUT_S)
        self._fields = {"Content-Type": "application/json"}
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._fields["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        self._connection: http.client.HTTPConnection | None = None

    def write(self, lines: Sequence[bytes]) -> None:
        try:
            for line in lines:
                self._post(line)
        except (OSError, http.client.HTTPException) as cause:
            self.close()
            raise OSError(str(cause) or type(cause).__name__) from cause

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, line: bytes) -> None:
        if self._connection is None:
            self._connection = self._open()
        self._connection.request("POST", self._target, line, self._fields)
        response = self._connection.getresponse()
        response.read(_MAX_RESPONSE_BYTES)
        if response.length:  # what is left of a long response
            self.close()
        if response.status in _LATER or response.status >= 500:
            raise OSError(f"the server answers {response.status} {response.reason}")
        if response.status >= 300:
            raise UndeliverableError(f"the server answers {response.status} {response.reason}")
