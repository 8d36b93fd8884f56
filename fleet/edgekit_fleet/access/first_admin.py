"""The link that makes the first administrator: printed by `fleet up` while the fleet has no user."""

import hmac
import time
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.access.digests import digest, make_secret
from edgekit_fleet.access.users import add_user
from edgekit_fleet.store.tables import UserRow
from edgekit_runtime.errors import RequestError

_LIFE_S: Final = 3600.0


class FirstAdminCode:
    """A code that is valid once, for an hour, while there is no user and this process runs.

    Attributes:
        secret: secret for the link `/first?code=SECRET`.
    """

    def __init__(self) -> None:
        self.secret = make_secret()
        self._expires_at = time.monotonic() + _LIFE_S

    def fits(self, secret: str) -> bool:
        """Return True if `secret` is this code, and the code is not an hour old yet."""
        is_same = hmac.compare_digest(digest(secret), digest(self.secret))
        return is_same and time.monotonic() < self._expires_at

    def check(self, session: Session, secret: str) -> None:
        """Refuse a code that is wrong or was used; `session` may be one that only reads.

        Raises:
            RequestError: 403, the code is wrong or was used, or there is a user.
        """
        if not self.fits(secret) or has_users(session):
            raise RequestError(
                403, "the link was used or is an hour old; make a user with `edgekit fleet user add`"
            )

    def claim(self, session: Session, secret: str, name: str, password: str) -> None:
        """Add the user `name` as the first administrator, which uses up the code.

        Raises:
            RequestError: as from `check`.
            FleetError: name or password are refused.
        """
        self.check(session, secret)
        add_user(session, name, password, "admin", actor=name)


def has_users(session: Session) -> bool:
    return session.scalars(select(UserRow.name).limit(1)).first() is not None
