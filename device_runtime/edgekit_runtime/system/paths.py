"""Where things lie on a device: models, caches, keys, and the socket of the service."""

import os
from pathlib import Path
from typing import Final

SYSTEM_FOLDER: Final = Path("/run/edgekit")
"""Where the service of the system listens."""

_SOCKET_NAME: Final = "edgekit.sock"


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


def find_cache_folder() -> Path:
    """Return `$EDGEKIT_CACHE`, else `edgekit` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if given := os.environ.get("EDGEKIT_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "edgekit"


def find_keys_folder() -> Path:
    """Return the folder of keys: `$EDGEKIT_HOME/keys`, or `~/.config/edgekit/keys`."""
    home = os.environ.get("EDGEKIT_HOME")
    return (Path(home) if home else Path.home() / ".config" / "edgekit") / "keys"


def find_socket() -> Path:
    """Return where the Unix socket is by default.

    In `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/edgekit` or `/run/edgekit`.
    """
    if given := os.environ.get("RUNTIME_DIRECTORY"):  # systemd's RuntimeDirectory=edgekit
        return Path(given.split(":")[0]) / _SOCKET_NAME
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(given) / "edgekit" / _SOCKET_NAME
    return SYSTEM_FOLDER / _SOCKET_NAME


def find_running_service() -> Path | None:
    """Return the Unix socket of the service where there is one: of this user, else of the system."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    folders = [Path(own) / "edgekit"] if own else []
    sockets = (folder / _SOCKET_NAME for folder in (*folders, SYSTEM_FOLDER))
    return next((path for path in sockets if os.access(path, os.W_OK)), None)
