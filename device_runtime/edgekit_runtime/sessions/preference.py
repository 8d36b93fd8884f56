"""The backend that won a package's tournament on this machine, kept until the next one.

It only changes the order of the backends that the signed manifest names. A preference that cannot be read, or
that names none of them, counts for nothing.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgekit_runtime.errors import OutputError
from edgekit_runtime.files import find_cache_folder, write_atomically
from edgekit_runtime.manifest import BackendChoice, Manifest


def keep_winner(manifest: Manifest, winner: BackendChoice) -> Path:
    """Make `winner` the first choice for this very package on this machine; returns where that is kept.

    Raises:
        OutputError: the cache folder cannot be made or written.
    """
    path = _path(manifest)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(
            f"cannot make {path.parent}: {cause}; set EDGEKIT_CACHE to another folder"
        ) from cause
    with write_atomically(path, mode=0o600) as file:
        file.write(json.dumps({"backend": winner.name, "artifact": winner.artifact}).encode())
    return path


def recall_order(manifest: Manifest) -> BackendChoice:
    """Return the backends of `manifest` with the kept winner first, and the others in their order behind."""
    choices = manifest.backend.chain
    if len(choices) == 1:
        return manifest.backend
    try:
        kept: Any = json.loads(_path(manifest).read_bytes())
        winner = (kept["backend"], kept["artifact"])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):  # the last: a user without a home
        return manifest.backend
    ordered = sorted(choices, key=lambda choice: (choice.name, choice.artifact) != winner)
    chained = replace(ordered[-1], fallback=None)
    for choice in reversed(ordered[:-1]):
        chained = replace(choice, fallback=chained)
    return chained


def _path(manifest: Manifest) -> Path:
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    return find_cache_folder() / "tournament" / f"{digest}.json"
