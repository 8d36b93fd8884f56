"""Keeping all models under one memory cap: what a model takes, and which others go for it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgekit_runtime.archive import read_unverified_manifest
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.manifest import Manifest
from edgekit_runtime.service.eviction import Loaded, choose_evictions
from edgekit_runtime.service.memory import needed_bytes
from edgekit_runtime.service.served import Served
from edgekit_runtime.service.versions import Installed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What all models may take together.

    Attributes:
        max_bytes: of all models that are loaded, by what their packages say; None for no cap.
        load_wait_s: how long a request waits for a model that was unloaded for others, until it gets a 503.
        max_waiting: requests that wait so at once; further ones get a 503.

    Raises:
        ValueError: a value is out of range.
    """

    max_bytes: int | None = None
    load_wait_s: float = 10.0
    max_waiting: int = 128

    def __post_init__(self) -> None:
        if (
            (self.max_bytes is not None and self.max_bytes < 1)
            or self.load_wait_s < 0
            or self.max_waiting < 0
        ):
            raise ValueError(
                f"expected max_bytes over 0, load_wait_s and max_waiting of 0 or more, got {self}"
            )


def estimate_bytes(packages: Iterable[Installed]) -> int:
    """Return about what the models of `packages` take once they are loaded."""
    return sum(_estimate(package.path) for package in packages)


def _estimate(path: Path) -> int:
    try:
        manifest = read_unverified_manifest(path).manifest
    except EdgekitError:  # opening it says what is wrong
        return 0
    return size_of(manifest, path)


def size_of(manifest: Manifest, path: Path) -> int:
    """Return what the package says of its memory, or a multiple of its size where it says nothing."""
    estimate = manifest.figures.get("memory_estimate")
    stated = estimate.get("bytes_above_engine") if isinstance(estimate, Mapping) else None
    if isinstance(stated, int) and stated > 0:
        return stated
    return needed_bytes([Installed(manifest.name, manifest.version, path)])


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory, as the registry knows it.

    Attributes:
        name: of the model.
        versions: that are loaded.
        loaded_s: when, on the clock of the schedulers.
        is_pinned: whether it must stay.
        is_changing: whether it is being loaded, swapped or unloaded now.
    """

    name: str
    versions: tuple[Served, ...]
    loaded_s: float
    is_pinned: bool
    is_changing: bool


def choose_victims(residents: Iterable[Resident], needed: int, max_bytes: int) -> tuple[str, ...]:
    """Return the names of the models to unload before one that needs `needed` bytes is loaded.

    Raises:
        MemoryCapError: it does not fit, now or ever.
    """
    found = [
        Loaded(
            one.name,
            sum(size_of(served.loaded.manifest, served.loaded.path) for served in one.versions),
            max([one.loaded_s, *(served.metrics.last_s or 0.0 for served in one.versions)]),
            one.is_pinned,
            one.is_changing or any(served.metrics.waiting for served in one.versions),
        )
        for one in residents
        if one.versions
    ]
    return tuple(victim.name for victim in choose_evictions(found, needed, max_bytes))
