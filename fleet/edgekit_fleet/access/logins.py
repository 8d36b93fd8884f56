"""Logins of users at the console. A login is a cookie with a secret, whose digest the store keeps.

The CSRF token is derived from the secret, so it is only valid during the login.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from edgekit_fleet.access import failure_limit, second_factor, users
from edgekit_fleet.access.client_network import find_network
from edgekit_fleet.access.digests import digest, make_secret
from edgekit_fleet.access.principal import Principal
from edgekit_fleet.store import audit
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.tables import KnownAddressRow, LoginRow, UserRow
from edgekit_runtime.errors import RequestError
from edgekit_runtime.system.shown_text import clean_line

LIFE_S: Final = 12 * 3600.0
IDLE_S: Final = 3600.0
KNOWN_S: Final = 90 * 86_400
MAX_SPREAD: Final = 100  # failures a minute, of a name at many addresses, or an address with many names
MAX_TOTAL: Final = 200  # failures a minute of all: each takes a core for about 0.1 s
_MAX_ALARMS: Final = 60  # a minute
_WRONG: Final = "name or password is wrong, or the one-time code"
_NOTE_S: Final = 60.0  # precision of `seen_at`. Otherwise each page would write to the store


@dataclass(frozen=True, slots=True)
class Login:
    """A login that is still valid.

    Attributes:
        principal: The user.
        csrf_token: The token that every form of the console contains.
        signed_on_role: The role of a user whom a proxy logged in. It is None for a user with a password.
    """

    principal: Principal
    csrf_token: str
    signed_on_role: str | None = None

    def accepts(self, csrf_token: str) -> bool:
        """Return True if this is the CSRF token of this login."""
        return hmac.compare_digest(self.csrf_token.encode(), csrf_token.encode(errors="replace"))


class LoginDesk:
    """Logs users in by name and password, and limits the rate of guesses.

    After a login, a cookie identifies the browser. Failures from a browser with this cookie have a separate
    limit. So attackers without the cookie cannot lock the user out of that browser.

    Other failures are counted for the pair of name and address. Other users at that address, and this user at
    other addresses, are not locked out. Higher limits apply to the failures for each name, for each address,
    and in total. These limits do not apply to a user at an address where that user has logged in before. The
    audit log gets at most one alarm a minute for each address.

    Source: OWASP, *Slow Down Online Guessing Attacks with Device Cookies*.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        """Make a desk.

        `clock`: seconds since 1970.
        """
        self._store = store
        self._clock = clock

    def log_in(self, name: str, password: str, address: str, browser: str = "", *, code: str = "") -> str:
        """Check name, password and code, and open a login. Return the secret for its cookie.

        This takes about 0.1 s. A failure counts against the limits and is written to the audit log as an
        alarm.

        Args:
            name: The name that the client states.
            password: The password to check.
            address: The IP address of the client.
            browser: The secret in the browser's cookie (see `browser_of`), or empty.
            code: The one-time code (see `second_factor`), or empty.

        Raises:
            RequestError: 401, name, password or code is wrong. 429, there were too many failures.
        """
        name, password = name.replace("\0", ""), password.replace("\0", "")
        now, address = self._clock(), find_network(address)
        browser = _browser_key(browser)
        with self._store.snapshot() as session:
            limits = _list_limits(session, name, address, browser)
            is_allowed = failure_limit.allows(session, limits, now)  # a flood of guesses writes nothing
        if is_allowed:
            with self._store.transaction() as session:
                # Counted before the password is checked: many attempts may come at once.
                is_allowed = failure_limit.take(session, limits, now)
                row = session.get(UserRow, name)
                digest = None if row is None else row.password_digest
        if not is_allowed:
            raise failure_limit.too_many("failures")
        is_right, newer = users.check_password(digest, password)
        failed = f"login as '{clean_line(name, 64)}' failed"
        if not is_right:
            self.alarm("alarm.login", address, failed, now)
            raise RequestError(401, _WRONG)
        with self._store.transaction() as session:
            row = session.get(UserRow, name)
            if row is None or row.password_digest != digest:
                raise RequestError(401, _WRONG)
            outcome = second_factor.check_factor(session, name, code, now)
        if outcome != "right":
            text = f"{failed} by its one-time code, with the right password"
            self.alarm("alarm.login", address, text, now)
            if outcome == "wrong":
                raise RequestError(401, _WRONG)
            pause_s = second_factor.PAUSE_S
            raise RequestError(429, f"too many wrong codes; wait {pause_s} s", retry_after_s=pause_s)
        with self._store.transaction() as session:
            row = session.get(UserRow, name)
            if row is None or row.password_digest != digest:
                raise RequestError(401, _WRONG)
            row.password_digest = newer or row.password_digest
            failure_limit.forgive(session, limits)
            session.execute(delete(KnownAddressRow).where(KnownAddressRow.address == browser))
            session.merge(KnownAddressRow(user=name, address=address, seen_at=now))
            return open_login(session, name, now)

    def alarm(self, action: str, address: str, text: str, now: float) -> None:
        """Write an alarm to the audit log, at most one a minute for each address and 60 a minute in total.

        `action` is the action of the entry, such as `alarm.login`. `now` is in seconds since 1970.
        """
        with self._store.transaction() as session:
            limits = {f"login alarm {address}": 1, "login alarms": _MAX_ALARMS}
            if failure_limit.take(session, limits, now):
                text = f"{text}; at most one such alarm a minute and address"
                audit.record(session, "console", action, address, text=text)


def _list_limits(session: Session, name: str, address: str, browser: str) -> dict[str, int]:
    if session.get(KnownAddressRow, (name, browser)) is not None:
        return {f"login {name} by {browser}": failure_limit.MAX_FAILURES}
    limits = {f"login {name} at {address}": failure_limit.MAX_FAILURES}
    if session.get(KnownAddressRow, (name, address)) is None:
        limits |= {
            f"login name {name}": MAX_SPREAD,
            f"login address {address}": MAX_SPREAD,
            "logins": MAX_TOTAL,
        }
    return limits


def browser_of(secret: str) -> str:
    """Return the cookie value that identifies a browser even after the login with `secret` has ended."""
    return digest(f"browser {secret}")


def _browser_key(browser: str) -> str:
    return f"browser {digest(browser)}"


def open_login(session: Session, user: str, now: float) -> str:
    """Open a login for a user, and return the secret for its cookie. Expired logins are deleted.

    From now on the browser counts as known for this user. `now` is in seconds since 1970.
    """
    secret = make_secret()
    session.flush()  # the user may be new, and must be there first
    session.add(KnownAddressRow(user=user, address=_browser_key(browser_of(secret)), seen_at=now))
    session.execute(delete(KnownAddressRow).where(KnownAddressRow.seen_at < now - KNOWN_S))
    session.execute(delete(LoginRow).where((LoginRow.expires_at < now) | (LoginRow.seen_at < now - IDLE_S)))
    session.add(
        LoginRow(
            secret_sha256=digest(secret), user=user, created_at=now, seen_at=now, expires_at=now + LIFE_S
        )
    )
    audit.record(session, user, "user.login", user)
    return secret


def find_login(store: Store, secret: str, now: float, *, is_use: bool = True) -> Login | None:
    """Return the login of a cookie, or None if it is unknown or has ended.

    Args:
        store: The store of the fleet.
        secret: The secret in the cookie.
        now: The time in seconds since 1970.
        is_use: Whether the request came from a person, which extends the login. It is False for a request
            that an open page sends automatically.
    """
    with store.snapshot() as session:
        row = session.get(LoginRow, digest(secret))
        if row is None or not now < min(row.expires_at, row.seen_at + IDLE_S):
            return None
        user = session.get_one(UserRow, row.user)
        signed_on_role = None if user.password_digest else user.role
        login = Login(users.principal_of_user(user), csrf_of(secret), signed_on_role)
    if is_use and now - row.seen_at >= _NOTE_S:
        with store.transaction() as session:
            session.execute(
                update(LoginRow).where(LoginRow.secret_sha256 == row.secret_sha256).values(seen_at=now)
            )
    return login


def csrf_of(secret: str) -> str:
    """Return the CSRF token for the forms of a login, which identifies the login even after its end."""
    return digest(f"csrf {secret}")


def close_login(session: Session, secret: str) -> None:
    session.execute(delete(LoginRow).where(LoginRow.secret_sha256 == digest(secret)))
