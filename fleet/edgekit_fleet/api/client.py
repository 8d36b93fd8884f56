"""Calls the endpoints of a fleet: directly if the fleet is on this machine, otherwise over HTTP."""

import dataclasses
import http.client
import json
import re
import ssl
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode, urlsplit

from edgekit_fleet.access.principal import folder_owner
from edgekit_fleet.api.endpoints.endpoint import Answer, Endpoint, Fleet, Request
from edgekit_fleet.api.endpoints.releases import UploadPackage
from edgekit_fleet.api.endpoints.table import PREFIX
from edgekit_runtime.dataclass_json import from_plain, keep_known, to_plain
from edgekit_runtime.errors import ConfigError, RequestError, TransportError

_TIMEOUT_S: Final = 60.0
_ATTEMPTS: Final = 3
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")


class FleetCaller(Protocol):
    """A fleet whose endpoints can be called."""

    def call(self, endpoint: Endpoint[Request, Answer], request: Request) -> Answer:
        """Call an endpoint, and return its answer, an instance of `endpoint.answer`.

        Raises:
            EdgekitError: The fleet refuses the request or cannot be reached.
        """


class LocalFleet:
    """The fleet in a folder. Anybody who can read the folder has all permissions."""

    def __init__(self, fleet: Fleet, actor: str) -> None:
        self.fleet = fleet
        self._principal = folder_owner(actor)

    def call(self, endpoint: Endpoint[Request, Answer], request: Request) -> Answer:
        return endpoint.run(self.fleet, self._principal, request)


class RemoteFleet:
    """A fleet that is called over HTTP. Failed requests are sent again, but are carried out only once."""

    def __init__(self, url: str, token: str, authority: Path | None = None) -> None:
        """Prepare the client. No request is sent yet.

        Args:
            url: The URL of the console, such as `https://fleet.example:8444`.
            token: The token, `ekt_...`.
            authority: A PEM file of trusted certificates. The default is those of the system.

        Raises:
            ConfigError: The URL is malformed or would send the token unencrypted, or a file cannot be read.
        """
        parsed = urlsplit(url)
        try:
            self._host, self._port = parsed.hostname or "", parsed.port
        except ValueError as cause:
            raise ConfigError(f"server {url!r}: {cause}") from cause
        is_clear = parsed.scheme == "http"
        if not self._host or (parsed.scheme != "https" and not (is_clear and self._host in _LOCAL)):
            raise ConfigError(f"server {url!r}, expected https://HOST:PORT, or http on this machine")
        if not token.isascii() or not token.isprintable():
            raise ConfigError("the token is malformed; `edgekit fleet token add` makes one")
        self._token = token
        try:
            self._context = None if is_clear else ssl.create_default_context(cafile=authority)
        except OSError as cause:
            raise ConfigError(f"cannot read the certificates in {authority}: {cause}") from cause

    def call(self, endpoint: Endpoint[Request, Answer], request: Request) -> Answer:
        """Send the request over HTTP, and return the answer of the endpoint.

        Raises:
            RequestError: The server refuses the request.
            TransportError: The server cannot be reached, or is not a fleet.
        """
        fields: dict[str, Any] = {} if isinstance(request, UploadPackage) else to_plain(request)
        path = endpoint.path
        for name in re.findall(r"\{(\w+)\}", path):
            path = path.replace(f"{{{name}}}", quote(str(fields.pop(name, getattr(request, name))), safe=""))
        headers = {}
        body: bytes | Path | None = None
        if endpoint.method == "POST":
            body = json.dumps(drop_unset(request, fields)).encode()
            headers = {"content-type": "application/json", "idempotency-key": str(uuid.uuid4())}
        elif isinstance(request, UploadPackage):
            body, headers = request.file, {"content-type": "application/octet-stream"}
        elif fields:
            path += f"?{urlencode({name: value for name, value in fields.items() if value is not None})}"
        plain = self._send(endpoint.method, f"{PREFIX}{path}", body, headers)
        answer = keep_known(endpoint.answer, plain)  # a newer fleet may say more
        return from_plain(endpoint.answer, answer, "answer", TransportError)

    def _send(self, method: str, path: str, body: bytes | Path | None, headers: dict[str, str]) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._send_once(method, path, body, headers)
            except (TransportError, RequestError) as error:  # noqa: PERF203
                pause_s = error.retry_after_s if isinstance(error, RequestError) else _PAUSE_S * attempt
                if attempt == _ATTEMPTS or pause_s is None or pause_s > _LONGEST_PAUSE_S:
                    raise
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _send_once(self, method: str, path: str, body: bytes | Path | None, headers: dict[str, str]) -> Any:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S * 2)
            if self._context is None
            else http.client.HTTPSConnection(
                self._host, self._port, timeout=_TIMEOUT_S * 2, context=self._context
            )
        )
        own = {"authorization": f"Bearer {self._token}", "user-agent": "edgekit", **headers}
        try:
            if isinstance(body, Path):
                with body.open("rb") as file:
                    own["content-length"] = str(body.stat().st_size)
                    connection.request(method, path, file, own)
            else:
                connection.request(method, path, body, own)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as cause:
            raise TransportError(f"the fleet at {self._host} cannot be reached: {cause}") from cause
        finally:
            connection.close()
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as cause:
            raise TransportError(
                f"{self._host} answered {response.status} and no JSON; is it the console of a fleet?"
            ) from cause
        if response.status < 400:
            return plain
        detail = plain.get("detail", "") if isinstance(plain, dict) else ""
        after = response.headers.get("retry-after", "")
        raise RequestError(
            response.status, str(detail), retry_after_s=int(after) if after.isdecimal() else None
        )


def list_all(
    fleet: FleetCaller, endpoint: Endpoint[Any, Any], request: type[Any], **fields: Any
) -> Iterator[Any]:
    """Yield the items of all pages. A page is fetched when the items of the previous page are used up.

    Args:
        fleet: The fleet to call.
        endpoint: An endpoint whose answers have `items` and `next`.
        request: The request class of the endpoint, with the field `after`.
        fields: The fields of the request.
    """
    after = ""
    while True:
        page = fleet.call(endpoint, request(after=after, limit=1000, **fields))
        yield from page.items
        if page.next is None:
            return
        after = page.next


def drop_unset(record: Any, plain: dict[str, Any]) -> dict[str, Any]:
    """Return `plain`, the JSON of `record`, without fields that have the default value null.

    An older fleet may not know these fields.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    return {
        name: drop_unset(getattr(record, name), value)
        if dataclasses.is_dataclass(getattr(record, name))
        else value
        for name, value in plain.items()
        if value is not None or defaults[name] is not None
    }
