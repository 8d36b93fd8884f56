"""Time-based one-time codes (TOTP) as a second factor, and recovery codes for users who lose their phone.

An authenticator app shares a secret with the fleet and shows a new six-digit code every 30 s. The codes of
the previous and the next 30 s are accepted too, and each code works once. After `MAX_FAILURES` wrong codes in
a row, only one code is checked every `PAUSE_S`. An attacker who knows the password then guesses a code within
a year with a probability of about 1/4, and every wrong code raises an alarm.

The store holds the secrets and the digests of the recovery codes.

Source: RFC 6238 and RFC 4226; Key URI format of Google Authenticator.
"""

import base64
import hmac
import secrets
import struct
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias
from urllib.parse import quote

from sqlalchemy.orm import Session

from edgekit_fleet.access.digests import digest
from edgekit_fleet.store import audit
from edgekit_fleet.store.tables import SecondFactorRow, UserRow
from edgekit_runtime.errors import FleetError, NotFoundError

STEP_S: Final = 30
MAX_FAILURES: Final = 5
PAUSE_S: Final = 300
_DIGITS: Final = 6
_SECRET_BYTES: Final = 20  # RFC 4226, section 4: R6
_RECOVERY_CODES: Final = 8
_RECOVERY_BYTES: Final = 10  # too many to be guessed

Outcome: TypeAlias = Literal["right", "wrong", "too many"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSecondFactor:
    """A new second factor, which is shown to its user once.

    Attributes:
        uri: The URI for an authenticator app, `otpauth://totp/...`.
        recovery_codes: Codes that can each be used once in place of a code of the app.
    """

    uri: str
    recovery_codes: tuple[str, ...]


def make_code(secret: str, step: int) -> str:
    """Return the six-digit one-time code of a base-32 secret. `step` counts intervals of 30 s since 1970."""
    mac = hmac.digest(base64.b32decode(secret), struct.pack(">Q", step), "sha1")
    (number,) = struct.unpack_from(">I", mac, mac[-1] & 15)
    return f"{(number & 0x7FFFFFFF) % 10**_DIGITS:0{_DIGITS}}"


def add_factor(session: Session, name: str, *, actor: str, is_confirmed: bool) -> NewSecondFactor:
    """Give a user a new second factor. An earlier one that was not confirmed is removed.

    If `is_confirmed` is True, logins require the factor at once. Otherwise they require it after
    `confirm_factor`.

    Raises:
        NotFoundError: There is no such user.
        FleetError: The user has a confirmed second factor, or no password.
    """
    user = session.get(UserRow, name)
    if user is None:
        raise NotFoundError(f"no user '{name}'; `edgekit fleet user list` shows them")
    if not user.password_digest:
        raise FleetError(f"'{name}' logs in at a proxy, which asks for a second factor if it wants one")
    row = session.get(SecondFactorRow, name)
    if row is not None and row.is_confirmed:
        raise FleetError(f"'{name}' has a second factor; remove it first")
    if row is not None:
        session.delete(row)
        session.flush()
    secret = base64.b32encode(secrets.token_bytes(_SECRET_BYTES)).decode()
    codes = tuple(_make_recovery_code() for _ in range(_RECOVERY_CODES))
    session.add(
        SecondFactorRow(
            user=name,
            secret=secret,
            is_confirmed=is_confirmed,
            recovery_sha256=[digest(_normalise(code)) for code in codes],
        )
    )
    if is_confirmed:
        audit.record(session, actor, "user.second-factor", name)
    return NewSecondFactor(uri=make_uri(name, secret), recovery_codes=codes)


def make_uri(name: str, secret: str) -> str:
    """Return the URI `otpauth://...` for an authenticator app. `secret` is in base 32."""
    return f"otpauth://totp/edgekit:{quote(name)}?secret={secret}&issuer=edgekit"


def confirm_factor(session: Session, name: str, code: str, now: float) -> bool:
    """Confirm a user's new second factor with a code of the app. Logins require the factor from now on.

    Commit the session also after a wrong code, since the failure is counted.

    Returns:
        False if the code is wrong or there is no second factor to confirm.
    """
    row = session.get(SecondFactorRow, name, with_for_update=True)
    if row is None or row.is_confirmed or _check(row, code, now) != "right":
        return False
    row.is_confirmed = True
    audit.record(session, name, "user.second-factor", name)
    return True


def remove_factor(session: Session, name: str, *, actor: str) -> None:
    """Remove the second factor of a user, if there is one."""
    row = session.get(SecondFactorRow, name)
    if row is not None:
        session.delete(row)
        session.flush()
        audit.record(session, actor, "user.second-factor-removed", name)


def has_factor(session: Session, name: str) -> bool:
    row = session.get(SecondFactorRow, name)
    return row is not None and row.is_confirmed


def check_factor(session: Session, name: str, code: str, now: float) -> Outcome:
    """Check a user's one-time code, which cannot be used again.

    Commit the session also after a wrong code, since the failure is counted.

    Returns:
        `right`, `wrong`, or `too many` after too many failures. It is `right` if the user has no second
        factor.
    """
    row = session.get(SecondFactorRow, name, with_for_update=True)
    return "right" if row is None or not row.is_confirmed else _check(row, code, now)


def _check(row: SecondFactorRow, code: str, now: float) -> Outcome:
    text = _normalise(code)
    if (recovery := digest(text)) in row.recovery_sha256 and row.is_confirmed:
        row.recovery_sha256 = [stored for stored in row.recovery_sha256 if stored != recovery]
        return "right"
    if row.failures >= MAX_FAILURES and 0 <= now - row.failed_at < PAUSE_S:
        return "too many"
    step = int(now // STEP_S)
    last_step = row.last_step if row.last_step <= step + 1 else 0  # else the clock was ahead
    for candidate in range(step - 1, step + 2):
        if candidate > last_step and hmac.compare_digest(make_code(row.secret, candidate), text):
            row.last_step, row.failures = candidate, 0
            return "right"
    row.failures, row.failed_at = row.failures + 1, now
    return "wrong"


def _make_recovery_code() -> str:
    text = base64.b32encode(secrets.token_bytes(_RECOVERY_BYTES)).decode().lower()
    return "-".join(text[at : at + 4] for at in range(0, len(text), 4))


def _normalise(code: str) -> str:
    return "".join(letter for letter in code.lower() if letter.isascii() and letter.isalnum())[:64]
