"""What all pages share: headers, assets, forms, themes, live events."""

import asyncio
import hashlib
import http.client
import re
import shutil
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import select, update
from starlette.routing import Route
from tests.fleet.console.conftest import PASSWORD, Client, Served, log_in

import edgekit_fleet.console
from edgekit_fleet.console.app import make_app, make_routes
from edgekit_fleet.console.live import EventPosition, Watcher
from edgekit_fleet.operations import records
from edgekit_fleet.store import audit
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.tables import LoginRow
from edgekit_fleet.web.server import WebServer
from edgekit_runtime.errors import OutputError

VENDORED = {
    "htmx-4.0.1.min.js": "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
    "htmx-sse-4.0.1.min.js": "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
    "htmx-LICENSE.txt": "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
}
STATIC = Path(edgekit_fleet.console.__file__).with_name("static")


def test_every_module_of_pages_has_routes_of_its_own(served):
    folder = Path(edgekit_fleet.console.__file__).parent
    pages = {path.stem for path in folder.rglob("*.py") if path.stem.endswith(("page", "pages"))}
    routes = [route for route in make_routes(served.console) if isinstance(route, Route)]
    owners = {route.endpoint.__module__.rpartition(".")[2] for route in routes}
    assert pages <= owners
    stated = [(route.path, method) for route in routes for method in route.methods or ()]
    assert len(stated) == len(set(stated))


def test_vendored_files_are_those_of_the_release():
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()
    }
    assert found == VENDORED


def test_page_allows_no_inline_code_and_no_foreign_host(client):
    answer = client.get("/")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "<style" not in answer.text
    assert " style=" not in answer.text
    assert " onclick=" not in answer.text
    assert all("src=" in part for part in answer.text.split("<script")[1:])


def test_htmx_begins_after_the_scripts_that_it_needs(client):
    # Deferred, it began before them where one came late, and the page stayed at "Connecting".
    scripts = client.get("/").text.partition("</main>")[2].split("<script")[1:]
    assert [
        name in script for name, script in zip(("htmx-4", "htmx-sse", "console"), scripts, strict=True)
    ] == [True] * 3
    assert not any("defer" in script or "async" in script for script in scripts)


def test_assets_of_a_page_are_there_and_kept_for_ever(client):
    page = client.get("/").text
    addresses = [part.partition('"')[0] for part in page.split('"/static/')[1:]]
    assert len(addresses) >= 5
    for address in addresses:
        answer = client.get(f"/static/{address}")
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]


def test_redirect_to_the_host_that_a_request_names_is_never_sent(client):
    for path in ("/devices/", "/settings/users/", "/static"):
        assert client.get(path, Host="elsewhere.test").status == 404


def test_cookies_of_tls_are_bound_to_this_host(served):
    async def ask(path, scheme):
        sent = []
        scope = {"type": "http", "method": "GET", "scheme": scheme, "path": path, "query_string": b""}
        scope |= {"server": ("10.0.0.1", 9000), "root_path": "", "client": ("::1", 1)}
        scope["headers"] = [(b"host", b"fleet.example:8444")]  # behind a balancer, not the port here

        async def receive():
            return {"type": "http.request"}

        async def send(message):
            sent.append(message)

        await make_app(served.console)(scope, receive, send)
        return {name: value.decode() for name, value in sent[0]["headers"]}

    secure = asyncio.run(ask("/login", "https"))
    cookie = secure[b"set-cookie"]
    assert cookie.startswith("__Host-visitor_8444=")
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Secure"} == set(cookie.split("; ")[1:])
    assert secure[b"strict-transport-security"] == "max-age=31536000"
    plain = asyncio.run(ask("/login", "http"))
    assert plain[b"set-cookie"].startswith("visitor_8444=")
    assert b"strict-transport-security" not in plain


@pytest.mark.parametrize("token", ["", "wrong"])
def test_form_without_the_token_of_its_login_changes_nothing(client, token):
    answer = client.post("/theme", theme="dark", csrf=token)
    assert answer.status == 403
    assert 'data-theme="auto"' in client.get("/").text


def test_theme_is_kept_and_the_way_back_stays_on_this_site(client):
    answer = client.post("/theme", theme="dark", next="//elsewhere.test/")
    assert answer.headers["location"] == "/"
    assert 'data-theme="dark"' in client.get("/").text


def test_large_form_is_refused(client):
    assert client.post("/theme", theme="x" * 100_000).status == 400


@pytest.fixture
def cookie(client):
    return {"cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}


def read_event(response: http.client.HTTPResponse) -> dict[str, str]:
    event: dict[str, str] = {}
    while line := response.readline().decode().rstrip("\n"):
        name, _, value = line.partition(":")
        event[name] = value.strip()
    return event


def test_change_in_the_store_reaches_an_open_page(served, cookie):
    seen = served.console.watcher.read_position()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", f"/live?seen={seen}", headers=cookie)
    response = connection.getresponse()
    assert read_event(response) == {"": "open"}
    with served.store.transaction() as session:
        audit.record(session, "somebody", "rollout.log", "r1")
    events = [read_event(response) for _ in range(2)]
    connection.close()
    assert [event["event"] for event in events] == ["audit", "rollouts"]
    assert events[0]["id"] == f"{seen.audit + 1}-{seen.devices_ms}"


def test_page_that_comes_back_learns_what_it_missed(served, cookie):
    seen = served.console.watcher.read_position()
    with served.store.transaction() as session:
        audit.record(session, "somebody", "release.make", "r1")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", "/live?seen=0-0", headers={"last-event-id": str(seen), **cookie})
    response = connection.getresponse()
    read_event(response)
    begin_s = time.monotonic()
    assert read_event(response)["event"] in ("audit", "releases")
    assert time.monotonic() - begin_s < 10
    connection.close()


def test_store_that_is_away_is_said_on_every_page(client, served, monkeypatch):
    @contextmanager
    def fail():
        raise OutputError("the store is away")
        yield

    monkeypatch.setattr(served.store, "snapshot", fail)
    for path in ("/", "/devices", "/login"):
        answer = client.get(path)
        assert answer.status == 503
        assert "the store is away" in answer.text
    assert client.get("/live").status == 503


def test_pages_that_open_at_once_share_one_watcher(served):
    async def run():
        watcher = Watcher(served.store)
        pages = [watcher.listen(EventPosition(0, 0), "vic") for _ in range(5)]
        await asyncio.gather(*(anext(page) for page in pages))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for page in pages:
            await page.aclose()
        await asyncio.sleep(0)
        return len(others), asyncio.all_tasks() - {asyncio.current_task()}

    watching, left = asyncio.run(run())
    assert watching == 1
    assert not left


def test_pages_over_the_limit_do_without_events(client, served):
    served.console.watcher.max_listeners = 0
    assert client.get("/live").status == 503
    assert client.get("/").status == 200


def test_one_user_does_not_take_the_events_of_others(served):
    async def run():
        watcher = Watcher(served.store, max_of_user=3)
        pages = [watcher.listen(EventPosition(0, 0), "vic") for _ in range(5)]
        opened = [await anext(page, None) is not None for page in pages]
        admitted = watcher.admits("vic"), watcher.admits("ann")
        await pages[0].aclose()
        freed = watcher.admits("vic")
        for page in pages:
            await page.aclose()
        return opened, admitted, freed

    assert asyncio.run(run()) == ([True] * 3 + [False] * 2, (False, True), True)


def test_logins_of_two_consoles_on_one_host_are_kept_apart(client, served):
    with WebServer(make_app(served.console), "127.0.0.1", 0, None, option="--port") as second:
        other = Client(second.port, dict(client.cookies))  # a browser sends cookies to every port of a host
        assert other.get("/").status == 303
        login = other.get("/login").text.partition('name="csrf" value="')[2].partition('"')[0]
        assert other.post("/login", name="maria", password=PASSWORD, csrf=login).status == 303
        client.cookies = other.cookies
        assert (other.get("/").status, client.get("/").status) == (200, 200)


def test_audit_log_is_checked_once_at_a_time(client, monkeypatch):
    monkeypatch.setattr(records, "one_check", threading.Lock())
    with records.one_check:
        answer = client.post("/audit/verify")
    assert answer.status == 429
    assert client.post("/audit/verify").status == 303


def test_saved_filter_leads_back_to_this_site(client):
    answer = client.post("/queries", name="mine", selector="all", next="https://elsewhere.test/")
    assert answer.headers["location"] == "/"


def test_open_page_alone_does_not_keep_its_login_open(client, served, cookie):
    def read_seen_at(session):
        return session.scalars(select(LoginRow.seen_at)).one()

    with served.store.transaction() as session:
        session.execute(update(LoginRow).values(seen_at=LoginRow.seen_at - 3000))
        before = read_seen_at(session)
    assert client.get("/", **{"hx-request": "true"}).status == 200
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", "/live", headers={"hx-request": "true", **cookie})
    assert connection.getresponse().status == 200
    connection.close()
    with served.store.snapshot() as session:
        assert read_seen_at(session) == before
    client.get("/")
    with served.store.snapshot() as session:
        assert read_seen_at(session) > before


FURTHER_PAGE = """
from edgekit_fleet.console.shell import Section

SECTION = Section("Names", "/names", 45)


def show_names(console, request):
    return console.render(request, "error.html", message="Ada")


def list_routes(console):
    return [console.get("/names", show_names)]
"""


def test_further_page_is_a_file_and_has_a_link(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "further_page.py").write_text(FURTHER_PAGE)
    monkeypatch.setattr(edgekit_fleet.console, "__path__", [*edgekit_fleet.console.__path__, str(tmp_path)])
    shutil.copytree(filled, tmp_path / "fleet")
    with closing(Served(FleetFolder(tmp_path / "fleet"))) as served:
        page = log_in(served, "vera").get("/names")
        assert page.status == 200 and "Ada" in page.text
        links = re.findall(r'<li><a href="([^"]*)"', page.text)
        assert links[3:6] == ["/rollouts", "/names", "/health"]
