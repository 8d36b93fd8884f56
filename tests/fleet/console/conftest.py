"""A console over a filled store, on a loopback port; and a client that keeps cookies, as a browser does."""

import asyncio
import gzip
import http.client
import http.cookies
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
import uvicorn

from edgekit_fleet.access import users
from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.access.logins import open_login
from edgekit_fleet.console.app import make_app
from edgekit_fleet.console.shell import Console
from edgekit_fleet.simulation.filled_store import fill_store
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import UserRow

DEVICES = 400
PASSWORD = "correct horse battery"  # noqa: S105


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Client:
    """Sends requests to one server."""

    port: int
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Answer:
        return self._send("GET", path, None, headers)

    def post(self, path: str, **form: str) -> Answer:
        """Post a form, with the token of this login if the form names none."""
        if "csrf" not in form:
            page = self.get("/").text
            form["csrf"] = page.partition('name="csrf" value="')[2].partition('"')[0]
        return self._send(
            "POST", path, urlencode(form), {"content-type": "application/x-www-form-urlencoded"}
        )

    def follow(self, answer: Answer) -> Answer:
        """Go where the answer sends a browser."""
        assert answer.status == 303, answer.text
        return self.get(answer.headers["location"])

    def _send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own = {"accept-encoding": "gzip", "cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        try:
            connection.request(method, path, body, {**own, **headers})
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            for value in response.headers.get_all("set-cookie") or ():
                for name, morsel in http.cookies.SimpleCookie(value).items():
                    if morsel["max-age"] == "0" or not morsel.value.strip('"'):
                        self.cookies.pop(name, None)
                    else:
                        self.cookies[name] = morsel.value
        finally:
            connection.close()
        text = (gzip.decompress(data) if found.get("content-encoding") == "gzip" else data).decode()
        return Answer(response.status, found, text)


class Served:
    """The console on a thread of its own."""

    def __init__(self, folder: FleetFolder) -> None:
        self.folder = folder
        self.store: Store = folder.open_store()
        self.console = Console(self.store, folder, folder.read_settings())
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `web.server` does
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            make_app(self.console), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        self.store.close()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FleetFolder(tmp_path_factory.mktemp("filled"))
    folder.write_settings(FleetSettings())
    store = folder.open_store()
    fill_store(store, DEVICES)
    with store.transaction() as session:
        for name, role in (("maria", "admin"), ("olaf", "operator"), ("vera", "viewer")):
            users.add_user(session, name, PASSWORD, role, actor="ada")
    store.close()
    return folder.path


@pytest.fixture
def served(filled: Path, tmp_path: Path) -> Iterator[Served]:
    shutil.copytree(filled, tmp_path / "fleet")
    running = Served(FleetFolder(tmp_path / "fleet"))
    yield running
    running.close()


@pytest.fixture
def client(served: Served) -> Client:
    """Return a client that has logged in as administrator."""
    return log_in(served, "maria")


def log_in(served: Served, name: str) -> Client:
    """Return a client whose user has logged in."""
    client = Client(served.port)
    with served.store.transaction() as session:
        if session.get(UserRow, name) is None:  # of a store that another fixture has made
            users.add_user(session, name, PASSWORD, "admin", actor="ada")
            session.flush()
        client.cookies[LOGIN] = open_login(session, name, time.time())
    return client


def path_of(address: str) -> str:
    return urlsplit(address).path
