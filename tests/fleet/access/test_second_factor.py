"""One-time codes: what counts, once, and what a thief of the password gets."""

import base64
import re
from types import SimpleNamespace

import pytest
from sqlalchemy import select

from edgekit_fleet.access import logins, users
from edgekit_fleet.access.second_factor import (
    MAX_FAILURES,
    PAUSE_S,
    STEP_S,
    add_factor,
    confirm_factor,
    has_factor,
    make_code,
    remove_factor,
)
from edgekit_fleet.store.future import forget_future
from edgekit_fleet.store.tables import AuditRow, SecondFactorRow
from edgekit_runtime.errors import FleetError, RequestError

PASSWORD = "correct horse battery"  # noqa: S105


@pytest.fixture
def clock():
    return SimpleNamespace(now=1_000_000.0)


@pytest.fixture
def desk(store, clock):
    with store.transaction() as session:
        users.add_user(session, "ann", PASSWORD, "admin", actor="root")
        users.add_user(session, "vic", PASSWORD, "viewer", actor="ann")
    return logins.LoginDesk(store, lambda: clock.now)


@pytest.fixture
def factor(store, desk):  # makes the users
    with store.transaction() as session:
        return add_factor(session, "ann", actor="root", is_confirmed=True)


@pytest.fixture
def show_code(factor, clock):
    """What the app shows, by a clock that is `skew` steps ahead."""
    secret = re.search(r"secret=([A-Z2-7]+)&", factor.uri)[1]
    return lambda skew=0: make_code(secret, int(clock.now // STEP_S) + skew)


def log_in(desk, code, name="ann", **options):
    return desk.log_in(name, PASSWORD, "10.0.0.1", code=code, **options)


def refuse(desk, code, words="is wrong"):
    with pytest.raises(RequestError, match=words):
        log_in(desk, code)


@pytest.mark.parametrize(
    ("at_s", "code"),
    [
        (59, "287082"),
        (1111111109, "081804"),
        (1111111111, "050471"),
        (1234567890, "005924"),
        (2000000000, "279037"),
        (20000000000, "353130"),
    ],
)
def test_codes_are_those_of_rfc_6238(at_s, code):
    assert make_code(base64.b32encode(b"12345678901234567890").decode(), at_s // STEP_S) == code


def test_password_alone_lets_nobody_in_who_has_a_second_factor(desk, show_code):
    for code in ("", "000000", show_code()[:5], "\ud800٤"):
        refuse(desk, code)
    assert log_in(desk, f" {show_code()[:3]} {show_code()[3:]} ")
    assert log_in(desk, "", name="vic")


@pytest.mark.parametrize(("skew", "is_right"), [(-2, False), (-1, True), (0, True), (1, True), (2, False)])
def test_clock_of_the_phone_may_differ_by_a_step(desk, show_code, skew, is_right):
    if is_right:
        assert log_in(desk, show_code(skew))
    else:
        refuse(desk, show_code(skew))


def test_code_counts_once_and_none_before_it_afterwards(desk, show_code, clock):
    assert log_in(desk, show_code())
    refuse(desk, show_code())
    refuse(desk, show_code(-1))
    clock.now += STEP_S
    assert log_in(desk, show_code())


def test_thief_of_the_password_has_a_guess_each_five_minutes_and_is_an_alarm(desk, show_code, clock, store):
    for _ in range(MAX_FAILURES):
        refuse(desk, "000000")
    refuse(desk, show_code(), "too many wrong codes")  # the right one, too: each guess would be one
    clock.now += PAUSE_S
    refuse(desk, "000000")
    refuse(desk, show_code(), "too many wrong codes")
    clock.now += PAUSE_S
    assert log_in(desk, show_code())
    with store.snapshot() as session:
        alarms = session.scalars(select(AuditRow).where(AuditRow.action == "alarm.login")).all()
    assert "by its one-time code, with the right password" in alarms[0].detail["text"]


def test_recovery_code_counts_once_also_after_too_many_guesses(desk, factor):
    for _ in range(MAX_FAILURES):
        refuse(desk, "000000")
    assert log_in(desk, factor.recovery_codes[0].upper())
    refuse(desk, factor.recovery_codes[0], "too many")
    assert log_in(desk, factor.recovery_codes[7])


def test_store_holds_no_recovery_code(store, factor):
    with store.snapshot() as session:
        stored = session.scalars(select(SecondFactorRow.recovery_sha256)).one()
    assert len(stored) == len(factor.recovery_codes) == 8
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in stored)


def test_factor_counts_from_its_confirmation_on(desk, store, clock):
    with store.transaction() as session:
        uri = add_factor(session, "ann", actor="ann", is_confirmed=False).uri
    assert log_in(desk, "")
    code = make_code(re.search(r"secret=(\w+)", uri)[1], int(clock.now // STEP_S))
    with store.transaction() as session:
        assert not confirm_factor(session, "ann", "000000", clock.now)
        assert not has_factor(session, "ann")
        assert confirm_factor(session, "ann", code, clock.now)
        assert not confirm_factor(session, "ann", code, clock.now)
    refuse(desk, "")
    refuse(desk, code)


def test_codes_count_again_after_the_managers_clock_was_a_year_ahead(desk, show_code, clock, store):
    clock.now += 365 * 86_400
    assert log_in(desk, show_code())
    clock.now -= 365 * 86_400
    with store.transaction() as session:
        forget_future(session, clock.now)  # as the manager does
    assert log_in(desk, show_code())


def test_factor_is_not_replaced_and_ends_with_its_user(desk, store, factor):
    with store.transaction() as session, pytest.raises(FleetError, match="remove it first"):
        add_factor(session, "ann", actor="root", is_confirmed=True)
    with store.transaction() as session:
        remove_factor(session, "ann", actor="root")
        assert not has_factor(session, "ann")
        add_factor(session, "vic", actor="root", is_confirmed=True)
    with store.transaction() as session:
        users.remove_user(session, "vic", actor="root")
    with store.transaction() as session:
        users.add_user(session, "vic", PASSWORD, "viewer", actor="ann")
    assert log_in(desk, "", name="vic")
