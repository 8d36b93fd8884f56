"""Paths on a device: models, caches, keys, and the socket of the service."""

import os
from pathlib import Path
from typing import Final

SYSTEM_FOLDER: Final = Path("/run/edgekit")
"""The folder of the socket of the system's service."""

SYSTEM_CACHE: Final = Path("/var/cache/edgekit")
"""The cache folder of the system's service, as in its unit."""

_SOCKET_NAME: Final = "edgekit.sock"


def find_state_folder() -> Path:
    """Return `$EDGEKIT_STATE`, else `/var/lib/edgekit` for root, else a folder of the user.

    The folder of the user is `edgekit` in `$XDG_STATE_HOME` or `~/.local/state`.
    """
    if stated := os.environ.get("EDGEKIT_STATE"):
        return Path(stated)
    if os.geteuid() == 0:
        return Path("/var/lib/edgekit")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edgekit"


def find_cache_folder() -> Path:
    """Return `$EDGEKIT_CACHE`, else `edgekit` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if stated := os.environ.get("EDGEKIT_CACHE"):
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit"


def find_config_folder() -> Path:
    """Return `$EDGEKIT_HOME`, else `~/.config/edgekit`."""
    return Path(os.environ.get("EDGEKIT_HOME") or Path.home() / ".config" / "edgekit")


def find_keys_folder() -> Path:
    """Return the folder of trusted public keys: `keys` in `find_config_folder()`."""
    return find_config_folder() / "keys"


def find_device_target() -> str | None:
    """Return `$EDGEKIT_TARGET`, the required target of packages, or None if all targets are accepted."""
    return os.environ.get("EDGEKIT_TARGET") or None


def find_socket() -> Path:
    """Return the default path of the service's Unix socket.

    The folder is `$RUNTIME_DIRECTORY` (set by systemd), else `$XDG_RUNTIME_DIR/edgekit`, else `/run/edgekit`.
    """
    if folders := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(folders.split(":")[0]) / _SOCKET_NAME
    return _list_socket_folders()[0] / _SOCKET_NAME


def find_running_service() -> Path | None:
    """Return the socket of the user's or the system's service, or None if neither is accessible."""
    sockets = (folder / _SOCKET_NAME for folder in _list_socket_folders())
    return next((path for path in sockets if os.access(path, os.W_OK)), None)


def _list_socket_folders() -> list[Path]:
    own = os.environ.get("XDG_RUNTIME_DIR")
    return [*([Path(own) / "edgekit"] if own else []), SYSTEM_FOLDER]
