"""How much memory is free for another model, and about how much one needs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions

_PER_PACKAGE_BYTE: Final = 3  # weights, their packed copy, activations; see docs/explanation/memory.md
_SHARED: Final = ("ort",)  # backends whose sessions are concurrent


def needed_bytes(packages: Iterable[Path]) -> int:
    """Return about how much memory the sessions of packages take; 0 for those that cannot be read."""
    return sum(map(_size_bytes, packages)) * _PER_PACKAGE_BYTE


def count_sessions(manifest: Manifest, instances: int) -> int:
    """Return how many sessions so many instances of a package's first backend take; see `open_instances`."""
    return 1 if manifest.backend.name in _SHARED else instances


def count_processes(options: ModelOptions) -> int:
    """Return how many processes have the model."""
    return options.isolation.processes + options.isolation.standby if options.isolated else 1


def model_bytes(manifest: Manifest, path: Path, governor: GovernorOptions | None, sessions: int = 1) -> int:
    """Return what a package says of its memory, or a multiple of its size where it says nothing.

    Args:
        manifest: of the package.
        path: of the package.
        governor: where there is one, all variants that it may choose are open, with each number of threads.
        sessions: of each of these, with as many times the memory.
    """
    stated = _stated_bytes(manifest.figures)
    copies = sessions if governor is None else sessions * max(1, len(governor.threads))
    if stated is None:  # the size is that of all variants
        return copies * needed_bytes([path])
    if governor is None:
        return copies * stated
    names = governor.variants or [variant.name for variant in manifest.all_variants]
    variants = [variant for variant in manifest.all_variants if variant.name in names]
    return copies * sum(_stated_bytes(variant.figures) or stated for variant in variants)


def _stated_bytes(figures: Mapping[str, JsonValue]) -> int | None:
    estimate = figures.get("memory_estimate")
    stated = estimate.get("bytes_above_engine") if isinstance(estimate, Mapping) else None
    return stated if isinstance(stated, int) and stated > 0 else None


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
