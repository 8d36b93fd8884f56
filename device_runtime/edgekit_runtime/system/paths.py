"""Where a device keeps its models, where its service listens, and what it is."""

import os
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "edgekit.sock"


def find_state_folder() -> Path:
    """Return `$EDGEKIT_STATE`, else `/var/lib/edgekit` for root, else a folder of the user.

    That is `edgekit` in `$XDG_STATE_HOME` or `~/.local/state`.
    """
    if given := os.environ.get("EDGEKIT_STATE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/edgekit")
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "edgekit"


def find_device_target() -> str | None:
    """Return `$EDGEKIT_TARGET`, the target that packages here must have, or None where any will do."""
    return os.environ.get("EDGEKIT_TARGET") or None
