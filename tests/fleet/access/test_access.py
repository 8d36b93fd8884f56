"""Users, logins and tokens: who gets in, who does not, and what the store keeps of secrets."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from argon2 import PasswordHasher
from sqlalchemy import select
from tests.toolkit.cases import cases

from edgekit_fleet.access import guard, logins, tokens, users
from edgekit_fleet.access.client_network import find_network
from edgekit_fleet.access.first_admin import FirstAdminCode
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.identity.enrolment import make_code
from edgekit_fleet.operations import webhooks
from edgekit_fleet.store.tables import AuditRow, CodeRow, Table
from edgekit_runtime.errors import FleetError, RequestError

PASSWORD = "correct horse battery"  # noqa: S105


@pytest.fixture(autouse=True)
def few_attempts(monkeypatch):
    monkeypatch.setattr(logins, "MAX_SPREAD", 25)
    monkeypatch.setattr(logins, "MAX_TOTAL", 30)


@pytest.fixture
def clock():
    return SimpleNamespace(now=1_000_000.0)


@pytest.fixture
def desk(store, clock):
    with store.transaction() as session:
        users.add_user(session, "ann", PASSWORD, "admin", actor="root")
        users.add_user(session, "vic", PASSWORD, "viewer", actor="ann")
    return logins.LoginDesk(store, lambda: clock.now)


def test_right_password_opens_a_login_with_the_scopes_of_the_role(store, desk, clock):
    login = logins.find_login(store, desk.log_in("vic", PASSWORD, "10.0.0.1"), clock.now)
    assert login.principal == Principal("vic", frozenset({"read"}))
    with pytest.raises(RequestError, match="lacks the scope 'rollout'"):
        login.principal.require("rollout")


@pytest.mark.parametrize(
    ("name", "password"),
    [("ann", "wrong password"), ("nobody", PASSWORD), ("ann", ""), ("ann\0", "\ud800"), ("", "\0")],
)
def test_wrong_password_or_name_is_one_answer(desk, name, password):
    with pytest.raises(RequestError, match="name or password is wrong") as found:
        desk.log_in(name, password, "10.0.0.1")
    assert found.value.status == 401


def fail(desk, count, *, name="ann", address="10.0.0.1"):
    """Fail to log in; `name` and `address` are the same each time, or functions of its number."""
    for number in range(count):
        with pytest.raises(RequestError, match="is wrong"):
            desk.log_in(
                name(number) if callable(name) else name,
                "guess",
                address(number) if callable(address) else address,
            )


@pytest.mark.parametrize(
    ("count", "spread", "attempt"),
    [
        (20, {}, ("ann", "10.0.0.1")),
        (25, {"name": lambda number: f"u{number}"}, ("ann", "10.0.0.1")),
        (25, {"address": lambda number: f"10.0.0.{number}"}, ("ann", "10.0.1.1")),
        (25, {"name": lambda n: f"u{n}", "address": lambda n: f"2001:db8::{n:x}:1"}, ("u0", "2001:db8::a")),
        (30, {"name": lambda n: f"u{n}", "address": lambda n: f"10.0.{n}.1"}, ("ann", "10.0.0.99")),
    ],
    ids=["name at an address", "names at an address", "name at addresses", "addresses of a network", "all"],
)
def test_right_password_is_admitted_3_s_after_too_many_failures(desk, clock, count, spread, attempt):
    fail(desk, count, **spread)
    name, address = attempt
    with pytest.raises(RequestError) as refusal:
        desk.log_in(name, PASSWORD, address)
    assert (refusal.value.status, refusal.value.retry_after_s) == (429, 3)
    clock.now += 3
    if name == "ann":
        assert desk.log_in(name, PASSWORD, address)
    else:
        fail(desk, 1, name=name, address=address)


def test_right_password_is_admitted_in_a_browser_of_its_user_whatever_others_try(desk):
    browser = logins.browser_of(desk.log_in("ann", PASSWORD, "10.0.0.1"))
    fail(desk, 20)
    with pytest.raises(RequestError, match="too many"):
        desk.log_in("ann", PASSWORD, "10.0.0.1")
    assert desk.log_in("ann", PASSWORD, "10.0.0.1", browser)


@pytest.mark.parametrize("case", ["of another user", "used", "90 days old", "of a removed user", "none"])
def test_browser_that_is_not_of_the_user_is_like_any_other(store, desk, clock, case):
    if case == "of a removed user":
        with store.transaction() as session:
            users.add_user(session, "eve", PASSWORD, "admin", actor="ann")
    secret = desk.log_in(
        {"of another user": "vic", "of a removed user": "eve"}.get(case, "ann"), PASSWORD, "::"
    )
    browser = "" if case == "none" else logins.browser_of(secret)
    if case == "used":  # each login gives the browser a new secret
        desk.log_in("ann", PASSWORD, "::", browser)
    elif case == "90 days old":
        clock.now += logins.KNOWN_S + 1
        desk.log_in("vic", PASSWORD, "::")
    elif case == "of a removed user":
        with store.transaction() as session:
            users.remove_user(session, "eve", actor="ann")
        with store.transaction() as session:
            users.add_user(session, "eve", PASSWORD, "admin", actor="ann")
    name = "eve" if case == "of a removed user" else "ann"
    fail(desk, 20, name=name)
    with pytest.raises(RequestError, match="too many"):
        desk.log_in(name, PASSWORD, "10.0.0.1", browser)


@pytest.mark.parametrize(
    ("address", "has_browser", "limit"),
    [("10.0.0.2", False, 20), ("10.0.0.{}", False, 25), ("10.0.0.2", True, 20)],
    ids=["address", "name", "browser"],
)
def test_checked_guesses_a_minute_are_bounded(desk, clock, address, has_browser, limit):
    browser = logins.browser_of(desk.log_in("ann", PASSWORD, "10.0.1.1")) if has_browser else ""
    minutes, checked = 2, 0
    for number in range(100 * minutes):
        clock.now += 60 / 100
        with pytest.raises(RequestError) as refusal:
            desk.log_in("ann", "guess", address.format(number % 256), browser)
        checked += refusal.value.status == 401
    assert checked <= limit * (minutes + 1)


@pytest.mark.parametrize(
    ("name", "address"), [("vic", "10.0.0.1"), ("nobody", "10.0.0.1"), ("ann", "10.0.0.2")]
)
def test_right_password_is_admitted_while_others_at_its_address_or_elsewhere_fail(desk, name, address):
    fail(desk, 20, name=name, address=address)
    assert desk.log_in("ann", PASSWORD, "10.0.0.1")


def test_user_of_a_shared_address_is_admitted_again_whatever_others_there_try(desk):
    desk.log_in("ann", PASSWORD, "10.0.0.1")
    fail(desk, 25, name=lambda number: f"u{number}")
    assert desk.log_in("ann", PASSWORD, "10.0.0.1")


def test_failed_logins_are_an_alarm_for_each_address_and_minute(store, desk, clock):
    fail(desk, 5, name="\x1b[2Jann\n", address="10.0.0.1")
    fail(desk, 1, address="10.0.0.2")
    clock.now += 60
    fail(desk, 1, address="10.0.0.1")
    with store.snapshot() as session:
        alarms = session.scalars(select(AuditRow).where(AuditRow.action == "alarm.login")).all()
    assert [alarm.subject for alarm in alarms] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    assert alarms[0].detail["text"].startswith("login as '\ufffd[2Jann\ufffd' failed")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_limits_count_ipv4_addresses_and_ipv6_networks(address, network):
    assert find_network(address) == network


def test_guesses_at_the_same_time_are_limited_as_those_one_after_another(desk, monkeypatch):
    looked_at = []

    def check_slowly(_digest, _password):
        looked_at.append(1)
        if len(looked_at) < 100:  # the next guess comes before this one is answered
            with contextlib.suppress(RequestError):
                desk.log_in("ann", "guess", "10.0.0.1")
        return False, ""

    monkeypatch.setattr(users, "check_password", check_slowly)
    with pytest.raises(RequestError):
        desk.log_in("ann", "guess", "10.0.0.1")
    assert len(looked_at) == 20


def test_who_guesses_a_name_elsewhere_does_not_shut_its_user_out(desk):
    desk.log_in("ann", PASSWORD, "10.0.0.1")
    fail(desk, 25, address=lambda number: f"10.0.1.{number}")
    assert desk.log_in("ann", PASSWORD, "10.0.0.1")
    with pytest.raises(RequestError, match="too many"):
        desk.log_in("ann", PASSWORD, "10.0.1.99")


def test_failures_at_one_manager_count_at_the_others(store, desk, clock):
    other = logins.LoginDesk(store, lambda: clock.now)
    for each in (desk, other):
        fail(each, 10)
    for each in (desk, other):
        with pytest.raises(RequestError, match="too many"):
            each.log_in("ann", PASSWORD, "10.0.0.1")
    clock.now += 3
    assert desk.log_in("ann", PASSWORD, "10.0.0.1")


def test_login_ends_when_idle_at_its_end_and_by_another_password(store, desk, clock):
    secret = desk.log_in("ann", PASSWORD, "")
    start = clock.now
    assert logins.find_login(store, secret, start + logins.IDLE_S) is None
    for step in range(1, 24):  # used each half hour
        assert logins.find_login(store, secret, start + step * 1800) is not None
    assert logins.find_login(store, secret, start + logins.LIFE_S) is None
    secret = desk.log_in("ann", PASSWORD, "")
    with store.transaction() as session:
        users.set_password(session, "ann", "another password", actor="ann")
    assert logins.find_login(store, secret, clock.now) is None


def test_csrf_token_belongs_to_one_login(store, desk, clock):
    first, second = (logins.find_login(store, desk.log_in("ann", PASSWORD, ""), clock.now) for _ in "ab")
    assert first.accepts(first.csrf_token)
    assert not first.accepts(second.csrf_token)
    assert not first.accepts("\ud800")


def test_closed_login_is_gone(store, desk, clock):
    secret = desk.log_in("ann", PASSWORD, "")
    with store.transaction() as session:
        logins.close_login(session, secret)
    assert logins.find_login(store, secret, clock.now) is None


def test_store_holds_no_secret(store, desk):
    secret = desk.log_in("ann", PASSWORD, "")
    with store.transaction() as session:
        token = tokens.add_token(session, "ci", ["read"], actor="ann")
    content = b""
    with store.engine.connect() as connection:
        for table in ("users", "logins", "api_tokens", "audit"):
            content += repr(connection.execute(select(Table.metadata.tables[table])).all()).encode()
    for each in (secret, token, PASSWORD):
        assert each.encode() not in content


def test_digest_of_an_older_form_is_replaced_at_login(store, desk, monkeypatch):
    monkeypatch.setattr(users, "hasher", PasswordHasher())
    desk.log_in("ann", PASSWORD, "")
    with store.transaction() as session:
        assert "m=65536,t=3," in session.get(users.UserRow, "ann").password_digest


def test_last_administrator_stays(store, desk):
    with store.transaction() as session, pytest.raises(FleetError, match="last administrator"):
        users.remove_user(session, "ann", actor="ann")
    with store.transaction() as session, pytest.raises(FleetError, match="last administrator"):
        users.set_role(session, "ann", "viewer", actor="ann")
    with store.transaction() as session:
        users.set_role(session, "vic", "admin", actor="ann")
        users.remove_user(session, "ann", actor="vic")
        assert [user.name for user in users.list_users(session)] == ["vic"]


@cases(
    ("name", "password", "role"),
    [
        ("Ann", PASSWORD, "admin"),
        ("", PASSWORD, "admin"),
        ("a" * 65, PASSWORD, "admin"),
        ("bob", "short", "admin"),
        ("bob", "x" * 2000, "admin"),
        ("bob", PASSWORD, "root"),
        ("ann", PASSWORD, "admin"),
    ],
)
def test_malformed_user_is_refused(store, desk, name, password, role):
    with store.transaction() as session, pytest.raises(FleetError):
        users.add_user(session, name, password, role, actor="ann")


def _request(**headers):
    return SimpleNamespace(url=SimpleNamespace(scheme="http"), headers=headers, cookies={}, scope={})


def test_token_opens_its_scopes_until_it_ends_or_is_revoked(store):
    with store.transaction() as session:
        secret = tokens.add_token(session, "ci", ["rollout", "read", "read"], actor="ann", life_s=3600)
    assert guard.bearer_of(_request(authorization=f"Bearer {secret}"), store) == Principal(
        "token:ci", frozenset({"read", "rollout"})
    )
    for wrong in ("", "Bearer", f"Basic {secret}", f"Bearer {secret}x", "Bearer ekt_", "Bearer \ud800"):
        assert guard.bearer_of(_request(authorization=wrong), store) is None
    with store.transaction() as session:
        found = tokens.list_tokens(session)[0]
    assert found.used_at is not None
    assert tokens.principal_of_token(store, secret, found.expires_at) is None
    with store.transaction() as session:
        tokens.revoke_token(session, "ci", actor="ann")
    assert guard.bearer_of(_request(authorization=f"Bearer {secret}"), store) is None


@pytest.mark.parametrize("how", ["removed", "demoted", "token revoked"])
def test_what_somebody_made_ends_with_him(store, desk, how):
    with store.transaction() as session:
        users.add_user(session, "eve", PASSWORD, "admin", actor="ann")
        for name, maker in (("ci", "eve"), ("child", "token:ci"), ("other", "ann")):
            tokens.add_token(session, name, ["read"], actor=maker)
            make_code(session, name, actor=f"token:{name}")
            session.flush()
    for name in ("ci", "child", "other"):
        webhooks.add_webhook(store, name, "https://a.test", (), actor=f"token:{name}")
    with store.transaction() as session:
        if how == "removed":
            users.remove_user(session, "eve", actor="ann")
        elif how == "demoted":
            users.set_role(session, "eve", "operator", actor="ann")
        else:
            tokens.revoke_token(session, "ci", actor="ann")
    with store.snapshot() as session:
        assert [each.name for each in tokens.list_tokens(session)] == ["other"]
        valid = select(CodeRow.device).where(CodeRow.expires_at > time.time())
        assert session.scalars(valid).all() == ["other"]
    assert [webhook.name for webhook in webhooks.list_webhooks(store)] == ["other"]


@pytest.mark.parametrize(
    ("name", "scopes"), [("", ["read"]), ("ci", []), ("ci", ["root"]), ("a b", ["read"])]
)
def test_malformed_token_is_refused(store, name, scopes):
    with store.transaction() as session, pytest.raises(FleetError):
        tokens.add_token(session, name, scopes, actor="ann")


def test_first_administrator_is_made_once(store):
    code = FirstAdminCode()
    with store.transaction() as session, pytest.raises(RequestError):
        code.claim(session, "guess", "eve", PASSWORD)
    with store.transaction() as session:
        code.claim(session, code.secret, "ann", PASSWORD)
    with store.transaction() as session, pytest.raises(RequestError):
        code.claim(session, code.secret, "eve", PASSWORD)
