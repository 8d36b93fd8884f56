"""The variant and backend that won a package's tournament on this machine, kept until the next one.

It only changes the order of what the signed manifest names. A preference that cannot be read, or that names
none of it, is ignored.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.manifest import BackendChoice, Manifest, Variant
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.paths import find_cache_folder


def keep_winner(manifest: Manifest, variant: str, place: int) -> Path:
    """Store a backend as the first choice for this very package on this machine; return the path.

    Args:
        manifest: manifest of the package.
        variant: name of the variant.
        place: position of the backend in the variant's chain; two sets of options may have one backend name.

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
        file.write(json.dumps({"variant": variant, "place": place}).encode())
    return path


def recall_order(manifest: Manifest) -> tuple[Variant, ...]:
    """Return the variants of `manifest` with the kept winner first, in its variant and of all.

    The others stand behind in their order.
    """
    variants = manifest.all_variants
    if len(variants) == len(manifest.backend.chain) == 1:
        return variants
    try:
        kept: Any = json.loads(_path(manifest).read_bytes())
        name, place = kept["variant"], kept["place"]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):  # the last: a user without a home
        return variants
    for variant in variants:
        if variant.name == name and type(place) is int and 0 <= place < len(variant.backend.chain):
            first = replace(variant, backend=_put_first(variant.backend, place))
            return (first, *(one for one in variants if one is not variant))
    return variants


def _put_first(backend: BackendChoice, place: int) -> BackendChoice:
    choices = list(backend.chain)
    choices.insert(0, choices.pop(place))
    chained = replace(choices[-1], fallback=None)
    for choice in reversed(choices[:-1]):
        chained = replace(choice, fallback=chained)
    return chained


def _path(manifest: Manifest) -> Path:
    digest = manifest.sha256
    return find_cache_folder() / "tournament" / f"{digest}.json"
