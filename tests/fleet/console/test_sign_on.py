"""Users whom a proxy has logged in, second factors at the console, and who pretends to be a proxy."""

import re
import socket
import time
from dataclasses import replace

import pytest
from sqlalchemy import delete, func, select
from tests.fleet.console.conftest import PASSWORD, Client, log_in

from edgekit_fleet.access import users
from edgekit_fleet.access.failure_limit import MAX_FAILURES
from edgekit_fleet.access.logins import KNOWN_S
from edgekit_fleet.access.second_factor import MAX_FAILURES as SECOND_FACTOR_FAILURES
from edgekit_fleet.access.second_factor import STEP_S, make_code
from edgekit_fleet.access.sign_on import Identity, SignOn, open_signed_on
from edgekit_fleet.store.fleet_folder import FleetSettings
from edgekit_fleet.store.tables import AuditRow, KnownAddressRow, LoginRow, UserRow
from edgekit_runtime.errors import ConfigError, RequestError

ANN = {"X-Auth-Request-Preferred-Username": "ann@lyon", "X-Auth-Request-Groups": "staff,edge-operators"}
ROLES = ("edge-operators=operator", "edge-admins=admin")
SECRET = "0123456789abcdef0123456789"  # noqa: S105


def set_up(served, **changes):
    settings = replace(
        FleetSettings(), **{"sign_on_proxies": ("127.0.0.1",), "sign_on_roles": ROLES, **changes}
    )
    served.console.settings, served.console.sign_on = settings, SignOn(settings)
    return Client(served.port)


def enter(client, **headers):
    """Open the first page by the proxy, as a browser does; returns the page, or what refuses it."""
    answer = client.send("GET", "/", None, headers)
    while answer.status == 303:
        answer = client.send("GET", answer.headers["location"], None, headers)
    return answer


def list_alarms(served, action="alarm.sign-on"):
    with served.store.snapshot() as session:
        return session.scalars(select(AuditRow.detail).where(AuditRow.action == action)).all()


def read_user(served, name):
    with served.store.snapshot() as session:
        return session.get(UserRow, name)


# Single sign-on


def test_user_of_the_proxy_is_logged_in_with_the_role_of_the_groups(served):
    client = set_up(served)
    page = enter(client, **ANN)
    assert (page.status, "ann@lyon" in page.text) == (200, True)
    row = read_user(served, "ann@lyon")
    assert (row.role, row.password_digest) == ("operator", "")
    assert client.send("GET", "/settings/tokens", None, ANN).status == 403
    enter(Client(served.port), **{**ANN, "X-Auth-Request-Groups": "edge-admins,staff"})
    assert read_user(served, "ann@lyon").role == "admin"
    enter(Client(served.port), **ANN)
    assert read_user(served, "ann@lyon").role == "operator"


def test_headers_count_for_nothing_where_no_proxy_is_set_up(served):
    client = set_up(served, sign_on_proxies=())
    assert 'name="password"' in enter(client, **ANN).text
    assert read_user(served, "ann@lyon") is None


@pytest.mark.parametrize("path", ["/", "/login", "/devices", "/settings", "/static/console.css", "/live"])
def test_headers_from_elsewhere_are_refused_on_every_page_and_an_alarm(served, path):
    client = set_up(served, sign_on_proxies=("10.0.0.0/24",))
    answer = client.send("GET", path, None, ANN)
    if not path.startswith("/static"):
        assert answer.status == 403
        assert "is no proxy of --sign-on-proxy" in list_alarms(served)[0]["text"]
    assert read_user(served, "ann@lyon") is None


def test_client_that_claims_the_address_of_the_proxy_is_refused(served):
    client = set_up(served, sign_on_proxies=("10.0.0.1",))
    spoofed = {**ANN, "X-Forwarded-For": "10.0.0.1", "X-Real-IP": "10.0.0.1", "Forwarded": "for=10.0.0.1"}
    assert enter(client, **spoofed).status == 403


def test_headers_from_elsewhere_are_refused_in_an_open_login_too(served):
    set_up(served, sign_on_proxies=("10.0.0.1",))
    client = log_in(served, "vera")
    assert client.send("GET", "/", None, {**ANN, "X-Auth-Request-Groups": "edge-admins"}).status == 403
    assert client.send("GET", "/", None, {}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Edgekit-Proxy-Secret": "guess"},
        {"X-Edgekit-Proxy-Secret": SECRET[:-1]},
        {"X-Edgekit-Proxy-Secret": ""},
    ],
)
def test_headers_without_the_secret_are_refused(served, tmp_path, headers):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    client = set_up(served, sign_on_secret=str(tmp_path / "secret"))
    assert enter(client, **ANN, **headers).status == 403
    assert list_alarms(served)
    assert enter(client, **ANN, **{"X-Edgekit-Proxy-Secret": SECRET}).status == 200


def test_header_that_is_there_twice_is_refused(served):
    """A client's own, and the one that the proxy adds: which one counts is anybody's guess."""
    client = set_up(served)
    lines = "".join(f"{name}: {value}\r\n" for name, value in ANN.items())
    for more in ("X-Auth-Request-Preferred-Username: maria", "x-auth-request-groups: edge-admins"):
        assert " 400 " in send_raw(client, f"{lines}{more}\r\n").split("\r\n")[0]
    assert " 303 " in send_raw(client, lines).split("\r\n")[0]
    # Another name, which some servers take for the same one.
    assert " 200 " in send_raw(client, "X_Auth_Request_Preferred_Username: maria\r\n").split("\r\n")[0]


def send_raw(client, lines):
    with socket.create_connection(("127.0.0.1", client.port), 10) as connection:
        connection.sendall(f"GET /login HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}\r\n".encode())
        data = b""
        while piece := connection.recv(65536):
            data += piece
    return data.decode(errors="replace")


def test_user_of_the_proxy_becomes_nobody_who_has_a_password(served):
    client = set_up(served)
    chosen = {"X-Auth-Request-Preferred-Username": "maria", "X-Auth-Request-Groups": "edge-admins"}
    answer = enter(client, **chosen)
    assert (answer.status, "is a user with a password" in answer.text) == (403, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-Auth-Request-Preferred-Username": "ann"}, 403),
        ({**ANN, "X-Auth-Request-Groups": "staff"}, 403),
        ({**ANN, "X-Auth-Request-Groups": "edge-operators-not"}, 403),
        ({**ANN, "X-Auth-Request-Preferred-Username": "Ann <b>"}, 400),
        ({**ANN, "X-Auth-Request-Preferred-Username": "a" * 65}, 400),
        ({"X-Auth-Request-Groups": "edge-admins"}, 400),
        ({"X-Auth-Request-User": "opaque", "X-Auth-Request-Groups": "edge-admins"}, 400),
    ],
)
def test_user_without_a_group_or_a_name_gets_nothing(served, headers, status):
    assert enter(set_up(served), **headers).status == status


def test_next_user_of_a_browser_does_not_inherit_the_login_of_the_last_one(served):
    client = set_up(served)
    enter(client, **ANN)
    page = enter(client, **{**ANN, "X-Auth-Request-Preferred-Username": "ben"})
    assert (">ben</a>" in page.text, ">ann@lyon</a>" in page.text) == (True, False)


def test_login_of_the_proxy_ends_with_its_headers_and_with_another_role(served):
    client = set_up(served)
    admin = {**ANN, "X-Auth-Request-Groups": "edge-admins"}
    enter(client, **admin)
    assert client.send("GET", "/settings", None, admin).status == 200
    past_the_proxy = client.send("GET", "/settings", None, {})
    assert (past_the_proxy.status, past_the_proxy.headers["location"]) == (303, "/login?next=/settings")
    assert client.send("GET", "/live", None, {}).status == 401
    assert client.send("GET", "/settings/tokens", None, ANN).status == 303  # an operator now
    assert client.send("GET", "/settings", None, admin).status == 200
    enter(client, **ANN)
    assert client.send("GET", "/settings/tokens", None, ANN).status == 403


def test_form_after_the_login_of_the_proxy_leads_past_the_form_of_passwords(served):
    client = set_up(served)
    csrf = read_csrf(enter(client, **ANN))
    with served.store.transaction() as session:
        session.execute(delete(LoginRow))
    answer = client.post_from(ANN, "/queries", csrf=csrf, name="mine", selector="site=lyon")
    assert (answer.status, answer.headers["location"]) == (303, "/login?next=/")
    assert enter(client, **ANN).status == 200


def test_logins_of_the_proxy_without_end_are_refused(served):
    identity = Identity("ann", "viewer")
    with served.store.transaction() as session:
        for _ in range(MAX_FAILURES):
            open_signed_on(session, identity, 1e9)
        with pytest.raises(RequestError, match="too many logins"):
            open_signed_on(session, identity, 1e9)
        open_signed_on(session, Identity("ben", "viewer"), 1e9)
        assert session.scalar(select(func.count()).where(KnownAddressRow.user == "ann")) == MAX_FAILURES
        open_signed_on(session, identity, 1e9 + KNOWN_S + 1)  # forgets the browsers of back then
        assert session.scalar(select(func.count()).where(KnownAddressRow.user == "ann")) == 1


def test_user_of_the_proxy_has_no_password_to_guess(served):
    client = set_up(served)
    enter(client, **ANN)
    for password in ("", "x" * 12):
        assert log_in_by(served, name="ann@lyon", password=password) == 401


@pytest.mark.parametrize(
    "changes",
    [{"sign_on_proxies": ("proxy",)}, {"sign_on_roles": ("staff=root",)}, {"sign_on_roles": ("=admin",)}],
)
def test_malformed_settings_are_refused(changes):
    with pytest.raises(ConfigError, match="expected"):
        FleetSettings(**changes)


def test_short_or_missing_secret_is_refused(tmp_path):
    (tmp_path / "short").write_text("0123")
    for name in ("short", "none"):
        with pytest.raises(ConfigError, match="--sign-on-secret"):
            SignOn(FleetSettings(sign_on_secret=str(tmp_path / name)))


# Second factors


def read_csrf(page):
    return re.search(r'name="csrf" value="([^"]+)"', page.text)[1]


def log_in_by(served, **fields):
    """Return the status of the login form, in a browser of nobody."""
    client = Client(served.port)
    return client.post_from({}, "/login", csrf=read_csrf(client.get("/login")), **fields).status


def read_code(page):
    return make_code(re.search(r"secret=([A-Z2-7]+)&", page.text)[1], int(time.time() // STEP_S))


def test_user_sets_a_second_factor_up_and_removes_it(served):
    client = log_in(served, "vera")
    page = client.post("/second-factor", action="add")
    code = read_code(page)
    recovery = re.findall(r"<li><code>([a-z2-7-]{19})</code>", page.text)
    assert client.post("/second-factor", action="confirm", code="000000").status == 422
    page = client.post("/second-factor", action="add")
    code = read_code(page)
    recovery = re.findall(r"<li><code>([a-z2-7-]{19})</code>", page.text)
    assert client.post("/second-factor", action="confirm", code=code).status == 303
    vera = {"name": "vera", "password": PASSWORD}
    assert log_in_by(served, **vera) == 401
    assert log_in_by(served, **vera, code=code) == 401  # it is used up
    assert log_in_by(served, **vera, code=recovery[0]) == 303
    assert client.post("/second-factor", action="remove", code="000000").status == 422
    assert client.post("/second-factor", action="remove", code=recovery[1]).status == 303
    assert log_in_by(served, **vera) == 303


def test_wrong_code_that_should_remove_a_second_factor_is_an_alarm(served):
    client = log_in(served, "vera")
    code = read_code(client.post("/second-factor", action="add"))
    client.post("/second-factor", action="confirm", code=code)
    assert client.post("/second-factor", action="other", code="000000").status == 422
    assert not list_alarms(served, "alarm.login")
    for _ in range(SECOND_FACTOR_FAILURES + 1):
        assert client.post("/second-factor", action="remove", code="000000").status == 422
    assert "'vera' was to lose the second factor" in list_alarms(served, "alarm.login")[0]["text"]
    assert log_in_by(served, name="vera", password=PASSWORD, code=code) == 429  # one count for all pages


def test_required_second_factor_comes_before_all_else(served):
    set_up(served, sign_on_proxies=(), requires_second_factor=True)
    client = log_in(served, "maria")
    assert client.send("GET", "/devices", None, {}).headers["location"] == "/second-factor"
    page = client.get("/second-factor")
    csrf = read_csrf(page)
    fields = {"csrf": csrf, "action": "add", "name": "eve", "password": PASSWORD}
    assert client.post_from({}, "/settings/users", **fields).status == 403
    assert client.send("GET", "/live", None, {}).status == 401
    code = read_code(client.post_from({}, "/second-factor", csrf=csrf, action="add"))
    client.post_from({}, "/second-factor", csrf=csrf, action="confirm", code=code)
    assert client.send("GET", "/devices", None, {}).status == 200


def test_administrator_resets_a_second_factor_and_nobody_else_does(served):
    client = log_in(served, "vera")
    code = read_code(client.post("/second-factor", action="add"))
    client.post("/second-factor", action="confirm", code=code)
    fields = {"action": "second-factor", "name": "vera"}
    assert log_in(served, "olaf").post("/settings/users", **fields).status == 403
    admin = log_in(served, "maria")
    assert "password and code" in admin.get("/settings").text
    assert admin.post("/settings/users", **fields).status == 303
    with served.store.snapshot() as session:
        assert not next(user for user in users.list_users(session) if user.name == "vera").has_second_factor


def test_page_of_the_second_factor_is_for_users(served):
    client = Client(served.port)
    assert client.send("GET", "/second-factor", None, {}).headers["location"].startswith("/login")
    csrf = read_csrf(client.get("/login"))
    assert client.post_from({}, "/second-factor", csrf=csrf, action="add").status == 401
    page = log_in(served, "vera").post("/second-factor", action="add")
    pytest.importorskip("segno")
    assert "<svg" in page.text
