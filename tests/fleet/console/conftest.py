"""A console over a filled store, on a loopback port; and a client that keeps cookies, as a browser does."""

import gzip
import html
import http.client
import http.cookies
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from tests.fleet.filled_store import fill_store

from edgekit_fleet.access import users
from edgekit_fleet.access.guard import LOGIN
from edgekit_fleet.access.logins import open_login
from edgekit_fleet.console.app import make_app
from edgekit_fleet.console.shell import Console
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import UserRow
from edgekit_fleet.web.server import WebServer

DEVICES = 400
PASSWORD = "correct horse battery"  # noqa: S105


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Client:
    """Sends requests to one server; `host` is the address in the browser, if a balancer is between them."""

    port: int
    cookies: dict[str, str] = field(default_factory=dict)
    host: str = ""
    tokens: dict[str, str] = field(default_factory=dict)
    """Of the forms of each login."""

    def get(self, path: str, **headers: str) -> Answer:
        """Return a page; asks again for what the server still works on, as a browser does."""
        answer = self.send("GET", path, None, headers)
        while again := re.search(r'class="unfinished"[^>]* hx-get="([^"]+)"', answer.text):
            time.sleep(0.02)
            answer = self.send("GET", html.unescape(again[1]), None, headers)
        return answer

    def post(self, path: str, **form: str) -> Answer:
        """Post a form, with the token of this login if the form names none, from a page of this console."""
        if "csrf" not in form:
            login = self.cookies.get(f"{LOGIN}_{self.port}", "")
            form["csrf"] = self.tokens.get(login) or self._read_token()
            if login:
                self.tokens[login] = form["csrf"]
        return self.post_from({"sec-fetch-site": "same-origin"}, path, **form)

    def _read_token(self) -> str:
        return self.get("/").text.partition('name="csrf" value="')[2].partition('"')[0]

    def post_from(self, headers: dict[str, str], path: str, **form: str) -> Answer:
        """Post a form from a page for which the browser sends these headers."""
        kind = {"content-type": "application/x-www-form-urlencoded"}
        return self.send("POST", path, urlencode(form), {**kind, **headers})

    def follow(self, answer: Answer) -> Answer:
        """Go where the answer sends a browser."""
        assert answer.status == 303, answer.text
        return self.get(answer.headers["location"])

    def send(self, method: str, path: str, body: str | bytes | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own = {"accept-encoding": "gzip", "cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items())}
        if self.host:
            own["host"] = self.host
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
        text = (gzip.decompress(data) if found.get("content-encoding") == "gzip" else data).decode(
            errors="replace"
        )
        return Answer(response.status, found, text)


class Served:
    """The console on a thread of its own."""

    def __init__(self, folder: FleetFolder) -> None:
        self.folder = folder
        self.store: Store = folder.open_store()
        self.console = Console(self.store, folder, folder.read_settings())
        self._server = WebServer(make_app(self.console), "127.0.0.1", 0, None, option="--console-port")
        self.port = self._server.port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.close()
        self.console.closing.close()
        self.store.close()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FleetFolder(tmp_path_factory.mktemp("filled"))
    folder.write_settings(FleetSettings())
    store = folder.open_store()
    fill_store(store, DEVICES, hours=24)
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
        client.cookies[f"{LOGIN}_{served.port}"] = open_login(session, name, time.time())
    return client


def path_of(address: str) -> str:
    return urlsplit(address).path
