"""The link that creates the first administrator. `fleet up` prints it while the fleet has no users."""

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
    """A code to create the first administrator.

    It is valid for an hour, while the fleet has no users and this process runs.

    Attributes:
        secret: The secret in the link `/first?code=SECRET`.
    """

    def __init__(self) -> None:
        self.secret = make_secret()
        self._expires_at = time.monotonic() + _LIFE_S

    def fits(self, secret: str) -> bool:
        """Return True if `secret` is this code and the code has not expired."""
        is_same = hmac.compare_digest(digest(secret), digest(self.secret))
        return is_same and time.monotonic() < self._expires_at

    def check(self, session: Session, secret: str) -> None:
        """Check that a code is right and can still be used. A read-only session is enough.

        Raises:
            RequestError: 403, the code is wrong or has expired, or the fleet has users.
        """
        if not self.fits(secret) or has_users(session):
            raise RequestError(
                403, "the link was used or is an hour old; make a user with `edgekit fleet user add`"
            )

    def claim(self, session: Session, secret: str, name: str, password: str) -> None:
        """Add the user `name` as the first administrator. The code cannot be used again.

        Raises:
            RequestError: 403, as for `check`.
            FleetError: The name or the password is not accepted.
        """
        self.check(session, secret)
        add_user(session, name, password, "admin", actor=name)


def has_users(session: Session) -> bool:
    return session.scalars(select(UserRow.name).limit(1)).first() is not None
