"""The HTTP interface of a filled fleet, on a loopback port."""

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.fleet.filled_store import fill_store
from tests.fleet.new_fleet import copy_new_fleet

from edgekit_fleet.access import tokens
from edgekit_fleet.api.endpoints.endpoint import Fleet
from edgekit_fleet.api.endpoints.table import PREFIX
from edgekit_fleet.api.routes import join_apps, make_api
from edgekit_fleet.store.attributes import replace_attributes
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import DeviceRow
from edgekit_fleet.web.server import WebServer


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Api:
    """A fleet with 60 devices, its server, and a token with all scopes."""

    def __init__(self, path: Path) -> None:
        self.folder = copy_new_fleet(path / "fleet")
        self.folder.write_settings(FleetSettings())
        self.store = self.folder.open_store()
        fill_store(self.store, 59)
        with self.store.transaction() as session:
            session.add(
                DeviceRow(
                    name="d1",
                    target="rpi5",
                    tags={"site": "lyon"},
                    public_key=b"",
                    certificate_serial="1",
                    certificate_expires_at=4e9,
                    enrolled_at=0.0,
                )
            )
            session.flush()
            replace_attributes(session, {"d1": {}})
        self.token = self.make_token(
            "tests", "read", "release", "rollout", "evidence", "device", "sample", "admin"
        )
        app = join_apps(make_api(Fleet(self.folder, self.store)), Starlette())
        self.server = WebServer(app, "127.0.0.1", 0, None, option="--console-port")
        self.url = f"http://127.0.0.1:{self.server.port}"

    def make_token(self, name: str, *scopes: str, life_s: float | None = None) -> str:
        with self.store.transaction() as session:
            return tokens.add_token(session, name, scopes, actor="test", life_s=life_s)

    def close(self) -> None:
        self.server.close()
        self.store.close()

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        try:
            connection.request(
                method,
                PREFIX + path,
                body,
                {name.replace("_", "-"): value for name, value in headers.items()},
            )
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, token: str | None = None) -> Answer:
        return self.send("GET", path, authorization=f"Bearer {token or self.token}")

    def post(self, path: str, plain: Any, token: str | None = None, **headers: str) -> Answer:
        headers = {
            "authorization": f"Bearer {token or self.token}",
            "content-type": "application/json",
            **headers,
        }
        return self.send("POST", path, json.dumps(plain).encode(), **headers)

    def delete(self, path: str) -> Answer:
        return self.send("DELETE", path, authorization=f"Bearer {self.token}")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.close()
