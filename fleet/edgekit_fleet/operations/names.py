"""Names that people give to releases, rollouts and webhooks."""

import re
from typing import Final

from edgekit_runtime.errors import FleetError

_PAGE: Final = "new"  # /releases/new and /rollouts/new are forms of the console
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(kind: str, name: str) -> None:
    """Check that a name can stand in a path and in a URL.

    Args:
        kind: `release` or the like, for the message.
        name: name to check.

    Raises:
        FleetError: it cannot.
    """
    if name == _PAGE:
        raise FleetError(f"{kind} name '{name}' is an address of the console; choose another name")
    if _NAME.fullmatch(name) is None:
        raise FleetError(
            f"{kind} name {name[:80]!r}, expected 1 to 100 of A-Z, a-z, 0-9, '.', '_' and '-', the first"
            " a letter or digit"
        )
