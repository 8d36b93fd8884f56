"""Users of the console: their names, roles, and argon2id digests of their passwords."""

import re
import threading
import time
from dataclasses import dataclass
from typing import Final, get_args

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from edgekit_fleet.access.principal import SCOPES_OF_ROLE, Principal, Role
from edgekit_fleet.access.tokens import end_grants_of
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import KnownAddressRow, LoginRow, SecondFactorRow, UserRow, read_record
from edgekit_runtime.errors import FleetError, NotFoundError

NAME_FORM: Final = re.compile(r"[a-z0-9][a-z0-9._@-]{0,63}")
_MIN_CHARS: Final = 10
_MAX_BYTES: Final = 1024
hasher: Final = PasswordHasher()  # RFC 9106, section 4: 3 passes over 64 MiB
_one_at_a_time: Final = threading.Lock()  # many logins at once must not fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user.

    Attributes:
        name: The login name.
        role: The role of the user.
        created_at: The time of creation, in seconds since 1970.
        seen_at: The time of the last use of the console, or None.
        has_second_factor: Whether a login requires a one-time code.
        is_signed_on: Whether a proxy logs the user in. Such a user has no password.
    """

    name: str
    role: Role
    created_at: float
    seen_at: float | None
    has_second_factor: bool = False
    is_signed_on: bool = False


def add_user(session: Session, name: str, password: str, role: Role, *, actor: str) -> None:
    """Add a user.

    Raises:
        FleetError: The name is malformed or taken, the role is unknown, or the password is too short.
    """
    if not NAME_FORM.fullmatch(name):
        raise FleetError(
            f"user name {name[:80]!r}, expected 1 to 64 of a-z, 0-9, '.', '_', '@' and '-', first a letter or"
            " digit"
        )
    _check_role(role)
    if session.get(UserRow, name) is not None:
        raise FleetError(f"user '{name}' exists; choose another name")
    session.add(UserRow(name=name, password_digest=_hash(password), role=role, created_at=time.time()))
    audit.record(session, actor, "user.add", name, role=role)


def list_users(session: Session) -> list[User]:
    """Return all users, sorted by name."""
    last_seen = dict(
        session.execute(select(LoginRow.user, func.max(LoginRow.seen_at)).group_by(LoginRow.user)).all()
    )
    factors = set(session.scalars(select(SecondFactorRow.user).where(SecondFactorRow.is_confirmed)))
    return [
        read_record(
            User,
            row,
            seen_at=last_seen.get(row.name),
            has_second_factor=row.name in factors,
            is_signed_on=not row.password_digest,
        )
        for row in session.scalars(select(UserRow).order_by(UserRow.name))
    ]


def find_role(session: Session, name: str) -> str:
    """Return the role of a user.

    Raises:
        FleetError: There is no such user.
    """
    return _find(session, name).role


def set_password(session: Session, name: str, password: str, *, actor: str) -> None:
    """Set a user's password, and end their logins.

    Raises:
        FleetError: There is no such user, or the password is too short.
    """
    row = _find(session, name)
    row.password_digest = _hash(password)
    session.execute(delete(LoginRow).where(LoginRow.user == name))
    audit.record(session, actor, "user.password", name)


def set_role(session: Session, name: str, role: Role, *, actor: str) -> None:
    """Set a user's role, which takes effect in open logins at once.

    If the user was an administrator, what they created is revoked (see `end_grants_of`).

    Raises:
        FleetError: There is no such user or role, or no administrator would remain.
    """
    row = _find(session, name)
    _check_role(role)
    if role != "admin":
        _check_not_last(session, row)
        end_grants_of(session, name, actor=actor)
    row.role = role
    audit.record(session, actor, "user.role", name, role=role)


def remove_user(session: Session, name: str, *, actor: str) -> None:
    """Remove a user with their logins and everything they created (see `end_grants_of`).

    Raises:
        FleetError: There is no such user, or no administrator would remain.
    """
    row = _find(session, name)
    _check_not_last(session, row)
    end_grants_of(session, name, actor=actor)
    session.execute(delete(KnownAddressRow).where(KnownAddressRow.user == name))
    session.execute(delete(LoginRow).where(LoginRow.user == name))
    session.execute(delete(SecondFactorRow).where(SecondFactorRow.user == name))
    session.delete(row)
    audit.record(session, actor, "user.remove", name)


def check_password(digest: str | None, password: str) -> tuple[bool, str]:
    """Check a password. This takes about 50 ms, so call it outside of a transaction.

    Args:
        digest: The stored digest. It is None for an unknown user and empty for a user of a proxy.
        password: The password to check.

    Returns:
        Whether the password is right, and a new digest to store if the old one is outdated, else "".
    """
    with _one_at_a_time:
        try:
            hasher.verify(digest or _digest_of_nobody(), _encode(password)[:_MAX_BYTES])
        except (VerificationError, InvalidHashError):
            return False, ""
        if not digest:
            return False, ""
        is_old = hasher.check_needs_rehash(digest)
        return True, hasher.hash(_encode(password)) if is_old else ""


def _digest_of_nobody() -> str:
    """Return a digest of no password, with which an unknown name takes as much time as a wrong password."""
    cost = f"m={hasher.memory_cost},t={hasher.time_cost},p={hasher.parallelism}"
    return f"$argon2id$v=19${cost}$ZNrrtQPiHk42dI/hFWhoag$900l4lHIRtOCxiOiggfJmD2EzZ1r6Zptd3e860OXH8I"


def principal_of_user(row: UserRow) -> Principal:
    """Return the principal of a user, with the scopes of their role. An unknown role has no scopes."""
    return Principal(row.name, SCOPES_OF_ROLE.get(row.role, frozenset()))  # type: ignore[call-overload]  # an unknown role may nothing


def _hash(password: str) -> str:
    data = _encode(password)
    if len(password) < _MIN_CHARS or len(data) > _MAX_BYTES:
        raise FleetError(
            f"the password has {len(password)} characters, expected at least {_MIN_CHARS}, and at most"
            f" {_MAX_BYTES} bytes"
        )
    with _one_at_a_time:
        return hasher.hash(data)


def _encode(password: str) -> bytes:
    return password.encode(errors="surrogatepass")


def _find(session: Session, name: str) -> UserRow:
    row = session.get(UserRow, name)
    if row is None:
        raise NotFoundError(f"no user '{name}'; `edgekit fleet user list` shows them")
    return row


def _check_role(role: str) -> None:
    if role not in get_args(Role):
        raise FleetError(f"role {role[:80]!r}, expected one of {', '.join(get_args(Role))}")


def _check_not_last(session: Session, row: UserRow) -> None:
    others = (
        select(func.count()).select_from(UserRow).where(UserRow.role == "admin", UserRow.name != row.name)
    )
    if row.role == "admin" and not session.scalar(others):
        raise FleetError(f"'{row.name}' is the last administrator; make another one first")
