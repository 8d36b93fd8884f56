"""Estimates how much memory a model needs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.package.figures import SUBMODEL_BYTES_FIGURE
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.states import count_state_bytes
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.system.atomic_files import find_size
from edgekit_runtime.system.engines import get_engine

_PER_PACKAGE_BYTE: Final = 3  # weights, their packed copy, activations. See docs/explanation/memory.md


def needed_bytes(packages: Iterable[Path]) -> int:
    """Estimate the memory of packages in bytes as 3 times their file sizes. Unreadable files count as 0."""
    return sum(map(find_size, packages)) * _PER_PACKAGE_BYTE


def count_sessions(manifest: Manifest, options: ModelOptions) -> int:
    """Return the number of sessions per process with the first backend of the package."""
    engine = get_engine(manifest.backend.name)
    return 1 if engine is not None and engine.shares_model else options.instances


def model_bytes(manifest: Manifest, path: Path, options: ModelOptions, sessions: int) -> int:
    """Estimate the memory of a model in bytes, in all its processes and sessions.

    A session needs the memory that the package states, or by default 3 times the size of the package. The
    states of sequences are included.

    Args:
        manifest: The manifest of the package.
        path: The path of the package.
        options: The options of the model. With a governor, all variants and numbers of threads are included.
        sessions: The number of sessions of each variant in one process.
    """
    return sequence_bytes(manifest, options) + _session_bytes(manifest, path, options, sessions)


def sequence_bytes(manifest: Manifest, options: ModelOptions) -> int:
    """Return the memory for the states of the maximum number of sequences."""
    return options.max_sequences * count_state_bytes(manifest.states, manifest.golden)


def _session_bytes(manifest: Manifest, path: Path, options: ModelOptions, sessions: int) -> int:
    stated = _stated_bytes(manifest.figures)
    governor, isolation = options.governor, options.isolation
    copies = sessions * (isolation.processes + isolation.standby) if options.isolated else sessions
    if governor is not None:
        copies *= max(1, len(governor.threads))
    if stated is None:  # the size is that of all variants, or of what a submodel reads
        size_bytes = manifest.figures.get(SUBMODEL_BYTES_FIGURE)
        return copies * _PER_PACKAGE_BYTE * (size_bytes if isinstance(size_bytes, int) else find_size(path))
    if governor is None:
        return copies * stated
    names = governor.variants or [variant.name for variant in manifest.all_variants]
    variants = [variant for variant in manifest.all_variants if variant.name in names]
    return copies * sum(_stated_bytes(variant.figures) or stated for variant in variants)


def _stated_bytes(figures: Mapping[str, JsonValue]) -> int | None:
    estimate = figures.get("memory_estimate")
    stated = estimate.get("bytes_above_engine") if isinstance(estimate, Mapping) else None
    return stated if isinstance(stated, int) and stated > 0 else None
