"""Hostile requests to every endpoint: no input may lead to an answer 500, or to none.

`python -m tests.fleet.api.hostile COUNT` sends COUNT requests to each endpoint and prints the answers.
"""

import asyncio
import collections
import contextlib
import hashlib
import json
import random
import string
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp
from tests.fleet.api.conftest import Api

from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint, Fleet
from edgekit_fleet.api.endpoints.table import ENDPOINTS
from edgekit_fleet.api.openapi import make_document
from edgekit_fleet.api.routes import make_api
from edgekit_fleet.store.tables import DeviceRow, ReleaseRow, RolloutRow

TEXTS = (
    "",
    "\0",
    "a\0b",
    "\ud800",
    "\u202e\ufeff",
    "é" * 300,
    "x" * 5000,
    "' OR 1=1; --",
    "%s%n{0}",
    "../../x",
    "..",
    "/",
    "all",
    "not " * 200 + "all",
    "(" * 500,
    "a=" + "[" * 200,
    "site in (a,b",
    "1%,10%,100%",
    "9" * 400 + "%",
    "-1",
    "1e999",
    "null",
    "ekt_",
    "FILE:///x",
    "http://127.0.0.1:1/x",
    "http://[::1",
    "https://h:99999/",
    "25:00-99:99",
    "01:00-04:00",
    "\n\r\t",
)
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, -0.0, 1e-320)
WHOLES = (None, True, False, [], {}, [[]], {"": None}, *NUMBERS, *TEXTS)
BODIES = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"NaN",
    b'{"note": NaN}',
    b'{"note": "\\ud800"}',
    b'{"note": "\\u0000"}',
    b'{"name": 1e999}',
    b"1" * 10_000,
    b'"text"',
    b"null",
    b"{} {}",
)
KINDS = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "",
    "multipart/form-data",
    "\xff",
)
KEYS = ("k", "", "x" * 129, "\xe9", "a\tb")


class Hostile:
    """Makes requests from a seed."""

    def __init__(self, seed: int, known: dict[str, list[str]]) -> None:
        self._draw = random.Random(seed)
        self._known = known
        document = make_document()
        self._schemas, self._paths = document["components"]["schemas"], document["paths"]

    def text(self, name: str = "") -> str:
        draw = self._draw
        if draw.random() < 0.7 and self._known.get(name):
            return draw.choice(self._known[name])
        if draw.random() < 0.2:
            return "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.randrange(1, 40)))
        return draw.choice(TEXTS)

    def value(self, depth: int = 0) -> Any:
        draw = self._draw
        if depth < 3 and draw.random() < 0.2:
            return [self.value(depth + 1) for _ in range(draw.randrange(4))]
        if depth < 3 and draw.random() < 0.2:
            return {self.text(): self.value(depth + 1) for _ in range(draw.randrange(4))}
        return draw.choice(WHOLES)

    def fitting(self, schema: dict[str, Any], name: str) -> Any:
        """Return a value that fits a schema, of hostile parts."""
        draw = self._draw
        if "$ref" in schema:
            return self.fitting(self._schemas[schema["$ref"].rpartition("/")[2]], name)
        if "anyOf" in schema:
            return self.fitting(draw.choice(schema["anyOf"]), name)
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            needed = schema["required"]
            chosen = [each for each in schema["properties"] if each in needed or draw.random() < 0.5]
            return {each: self.fitting(schema["properties"][each], each) for each in chosen}
        if kind == "object":
            return {self.text("tag"): self.text("tag") for _ in range(draw.randrange(4))}
        if kind == "array":
            return [self.fitting(schema["items"], name) for _ in range(draw.randrange(4))]
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 1000), 10**6)
        return {
            "integer": lambda: draw.randint(int(low), int(high)),
            "number": lambda: draw.uniform(low, high),
            "boolean": lambda: draw.random() < 0.5,
            "null": lambda: None,
            "string": lambda: self.text(name),
        }[kind or "null"]()

    def body(self, endpoint: AnyEndpoint) -> bytes:
        draw = self._draw
        if endpoint.method == "PUT" or draw.random() < 0.15:
            return draw.choice(BODIES)
        schema = self._schemas.get(endpoint.request.__name__)
        plain = {} if schema is None else self.fitting(schema, "")
        if draw.random() < 0.5:
            plain[draw.choice([*plain, "extra"])] = self.value()
        return json.dumps(plain).encode()

    def request(
        self, endpoint: AnyEndpoint, token: str
    ) -> tuple[str, bytes, list[tuple[bytes, bytes]], bytes]:
        """Return path, query, headers and body."""
        draw = self._draw
        path = endpoint.path
        for name in [part[1:-1] for part in path.split("/") if part.startswith("{")]:
            text = self.text(name).replace("/", "\\").encode("utf-8", "replace").decode() or "x"
            path = path.replace(f"{{{name}}}", text)
        pairs = []
        fields = self._list_query_names(endpoint) if endpoint.method != "POST" else ["x"]
        for _ in range(draw.choice((0, 0, 1, 1, 2, 5))):
            name = draw.choice(fields) if fields and draw.random() < 0.8 else self.text()
            value = draw.choice(
                (self.text(name), str(draw.choice(NUMBERS)), "".join(draw.choices(string.printable, k=8)))
            )
            pairs.append(
                f"{quote(name.encode('utf-8', 'replace'))}={quote(value.encode('utf-8', 'replace'))}"
            )
        query = "&".join(each for each in pairs if "wait=" not in each).encode()
        sent = (
            f"Bearer {token}"
            if draw.random() < 0.95
            else draw.choice(("", "Bearer", "Bearer ekt_\xff", "Basic x"))
        )
        headers = [(b"authorization", sent.encode("latin-1"))]
        kind = "application/json" if draw.random() < 0.8 else draw.choice(KINDS)
        headers.append((b"content-type", kind.encode("latin-1")))
        if draw.random() < 0.3:
            headers.append((b"idempotency-key", draw.choice(KEYS).encode("latin-1")))
        body = self.body(endpoint)
        if endpoint.method == "PUT" and draw.random() < 0.7:
            path = path.rpartition("/")[0] + "/" + hashlib.sha256(body).hexdigest()
        return path, query, headers, body

    def _list_query_names(self, endpoint: AnyEndpoint) -> list[str]:
        operation = self._paths[endpoint.path][endpoint.method.lower()]
        return [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]


async def send(
    app: ASGIApp, method: str, parts: tuple[str, bytes, list[tuple[bytes, bytes]], bytes]
) -> tuple[int, bytes]:
    """Return status and body of the answer of an application to one request."""
    path, query, headers, body = parts
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "root_path": "",
        "query_string": query,
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    answer: dict[str, Any] = {"status": 0, "body": b""}

    async def receive() -> dict[str, Any]:
        piece = pieces.pop(0) if pieces else b""
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def collect(message: Any) -> None:
        answer["status"] = message.get("status", answer["status"])
        answer["body"] += message.get("body", b"")

    await app(scope, receive, collect)
    return answer["status"], answer["body"]


async def attack(api: Api, seed: int, count: int) -> dict[str, collections.Counter[int]]:
    """Return method and path -> status -> how often, of `count` requests to each endpoint.

    Raises:
        AssertionError: an answer is 500 or no JSON, or an application raised; the message holds the request.
    """
    app = make_api(Fleet(api.folder, api.store))
    with api.store.transaction() as session:
        session.add(
            RolloutRow(
                name="r1",
                release="2026-11-16.1",
                selector="all",
                state="running",
                because="",
                settings={"waves": [1, 2]},
                wave=0,
                created_at=1e9,
                created_by="ann",
            )
        )
        names = [row.name for row in session.query(DeviceRow).limit(5)]
        releases = [row.name for row in session.query(ReleaseRow)]
    known = {
        "name": [*names, *releases, "r1"],
        "release": releases,
        "selector": ["all", "site=lyon"],
        "after": names,
    }
    hostile = Hostile(seed, known)
    found: dict[str, collections.Counter[int]] = {}
    for endpoint in ENDPOINTS:
        counts = found.setdefault(f"{endpoint.method} {endpoint.path}", collections.Counter())
        for _ in range(count):
            parts = hostile.request(endpoint, api.token)
            status, body = await send(app, endpoint.method, parts)
            assert status not in (0, 500), (endpoint.name, parts, body)
            assert isinstance(json.loads(body), dict), (endpoint.name, parts, body)
            counts[status] += 1
    return found


@contextlib.contextmanager
def temporary_api() -> Iterator[Api]:
    with tempfile.TemporaryDirectory(prefix="edgekit-hostile-") as folder:
        api = Api(Path(folder))
        try:
            yield api
        finally:
            api.close()


if __name__ == "__main__":
    with temporary_api() as made:
        for place, counts in asyncio.run(attack(made, 1, int(sys.argv[1]))).items():
            print(f"{place:45} {sum(counts.values()):6} {dict(sorted(counts.items()))}")
