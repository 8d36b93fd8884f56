"""Checks the names of releases, rollouts and webhooks, and sorts them in lists."""

import re
from typing import Final

from sqlalchemy import ColumnElement, and_, or_

from edgekit_fleet.store.tables import ReleaseRow, RolloutRow
from edgekit_runtime.errors import FleetError

_PAGE: Final = "new"  # /releases/new and /rollouts/new are forms of the console
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(kind: str, name: str) -> None:
    """Check that a name can be used in a path and a URL.

    `kind` is the kind of object for the error message, such as `release`.

    Raises:
        FleetError: The name is malformed, or is an address of the console.
    """
    if name == _PAGE:
        raise FleetError(f"{kind} name '{name}' is an address of the console; choose another name")
    if _NAME.fullmatch(name) is None:
        raise FleetError(
            f"{kind} name {name[:80]!r}, expected 1 to 100 of A-Z, a-z, 0-9, '.', '_' and '-', the first"
            " a letter or digit"
        )


def follows(kind: type[ReleaseRow] | type[RolloutRow], created_at: float, name: str) -> ColumnElement[bool]:
    """Return the SQL condition for the rows after a given row, in a list with the newest first.

    `created_at` is the time of the row in seconds since 1970, and `name` is its name. Rows with equal times
    are sorted by name.
    """
    is_next = and_(kind.created_at == created_at, kind.name > name)
    return or_(kind.created_at < created_at, is_next)
