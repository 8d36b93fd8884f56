"""Stores results of this machine: the winners of tournaments, tuned options and passed self-tests.

A winner changes the order in which the backends of the signed manifest are tried. Tuned options affect only
the speed, and are valid for one package, engine release and number of processors. A passed self-test is valid
for one package, processor and set of engine releases. Unreadable files are ignored, and the oldest files are
deleted.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice, Manifest, Variant
from edgekit_runtime.records import dataclass
from edgekit_runtime.sessions.ort_providers import VARIABLE, find_gpus
from edgekit_runtime.system.atomic_files import write_atomically
from edgekit_runtime.system.engines import EngineMissingError, find_engine
from edgekit_runtime.system.own_process import count_cores
from edgekit_runtime.system.paths import find_cache_folder

MAX_RESULTS: Final = 256
"""The maximum number of stored results of each kind."""

_PROCESSOR_LINES: Final = ("model name", "flags", "Features", "CPU part")  # of /proc/cpuinfo


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best options that tuning found.

    Attributes:
        objective: `latency` or `throughput`.
        options: The tunable options of the backend that differ from those in the package.
        instances: The number of simultaneous runs.
        batch: The number of rows per run.
        figures: A dict from names to measured figures for display, or None.
    """

    objective: str
    options: Mapping[str, JsonValue]
    instances: int = 1
    batch: int = 1
    figures: Mapping[str, JsonValue] | None = None


def keep_tuned(manifest: Manifest, choice: BackendChoice, tuned: Tuned) -> Path:
    """Store `tuned` for this package, engine release and number of processors. Return the path of the file.

    Raises:
        OutputError: The cache folder cannot be created or written.
    """
    document = {
        "package": f"{manifest.name} {manifest.version}",
        "backend": choice.name,
        "engine": _engine_version(choice.name),
        "processors": count_cores(),
        "label": "measured",
        "objective": tuned.objective,
        "options": dict(tuned.options),
        "instances": tuned.instances,
        "batch": tuned.batch,
        "figures": dict(tuned.figures or {}),
    }
    return _keep(_find_tuned(manifest, choice), document)


def recall_tuned(manifest: Manifest, choice: BackendChoice) -> Tuned | None:
    """Return the stored options for a backend of a package, or None."""
    try:
        document: Any = json.loads(_find_tuned(manifest, choice).read_bytes())
        if document["engine"] != _engine_version(choice.name) or document["processors"] != count_cores():
            return None
        options = document["options"]
        counts = (document["instances"], document["batch"])
        unknown = set(options) - find_engine(choice.name).tunable
        if unknown or not all(type(count) is int and count >= 1 for count in counts):
            return None
        return Tuned(str(document["objective"]), options, *counts, document["figures"])
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, EngineMissingError):
        return None  # RuntimeError: a user without a home


def apply_tuned(manifest: Manifest, choice: BackendChoice) -> BackendChoice:
    """Return `choice` with the options stored for it and for each of its fallbacks."""
    tuned = recall_tuned(manifest, choice)
    options = choice.options if tuned is None else {**choice.options, **tuned.options}
    fallback = None if choice.fallback is None else apply_tuned(manifest, choice.fallback)
    return replace(choice, options=options, fallback=fallback)


def keep_winner(manifest: Manifest, variant: str, chain_index: int) -> Path:
    """Store a backend as the first choice of this machine for this package. Return the path of the file.

    Args:
        manifest: The manifest of the package.
        variant: The name of the variant.
        chain_index: The index of the backend: 0 for the variant's backend, 1 for its first fallback.

    Raises:
        OutputError: The cache folder cannot be created or written.
    """
    return _keep(_find_winner(manifest), {"variant": variant, "place": chain_index})


def recall_order(manifest: Manifest) -> tuple[Variant, ...]:
    """Return the variants of `manifest` in the order in which to try them.

    The variant of the stored winner comes first, and its winning backend is tried first. The other variants
    keep their order.
    """
    variants = manifest.all_variants
    if len(variants) == len(manifest.backend.chain) == 1:
        return variants
    try:
        winner: Any = json.loads(_find_winner(manifest).read_bytes())
        name, position = winner["variant"], winner["place"]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):  # RuntimeError: a user without a home
        return variants
    for variant in variants:
        if variant.name == name and type(position) is int and 0 <= position < len(variant.backend.chain):
            first = replace(variant, backend=_put_first(variant.backend, position))
            return (first, *(other for other in variants if other is not variant))
    return variants


def keep_opening(package: OpenedPackage, variants: Sequence[str]) -> Path:
    """Record that the engines of this machine have opened and self-tested a package.

    Return the path of the file.

    Args:
        package: The verified package.
        variants: The names of the variants that were opened, or empty for the preferred variant.

    Raises:
        OutputError: The cache folder cannot be created or written.
    """
    return _keep(_find_opening(package, variants), _describe_opening(package, variants))


def is_opening_kept(package: OpenedPackage, variants: Sequence[str]) -> bool:
    """Return True if `keep_opening` stored these variants for the current engine releases and processor."""
    try:
        opening = json.loads(_find_opening(package, variants).read_bytes())
        return bool(opening == _describe_opening(package, variants))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home
        return False


def _describe_opening(package: OpenedPackage, variants: Sequence[str]) -> dict[str, JsonValue]:
    parts = (package, *package.list_members().values())
    order = [variant for part in parts for variant in recall_order(part.manifest)]  # as they are opened
    names = {choice.name for variant in order for choice in variant.backend.chain}
    return {
        "submodel": package.submodel,
        "variants": list(variants),
        "order": [[variant.name, *(choice.name for choice in variant.backend.chain)] for variant in order],
        "engines": {name: _engine_version(name) for name in sorted(names)},
        "processor": _find_processor(),
    }


def _find_processor() -> str:
    """Return a digest of the processor and GPUs, by which an engine chooses its kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    described = sorted({line for line in lines if line.startswith(_PROCESSOR_LINES)})
    gpu = (*find_gpus(), os.environ.get(VARIABLE, ""))
    return hashlib.sha256("\n".join((platform.machine(), *described, *gpu)).encode()).hexdigest()[:16]


def _put_first(backend: BackendChoice, position: int) -> BackendChoice:
    choices = list(backend.chain)
    choices.insert(0, choices.pop(position))
    chained = replace(choices[-1], fallback=None)
    for choice in reversed(choices[:-1]):
        chained = replace(choice, fallback=chained)
    return chained


def _find_winner(manifest: Manifest) -> Path:
    return find_cache_folder() / "tournament" / f"{manifest.sha256}.json"


def _find_opening(package: OpenedPackage, variants: Sequence[str]) -> Path:
    part = hashlib.sha256(json.dumps([package.submodel, *variants]).encode()).hexdigest()[:16]
    return find_cache_folder() / "openings" / f"{package.signed_sha256}-{part}.json"


def _find_tuned(manifest: Manifest, choice: BackendChoice) -> Path:
    artifact = hashlib.sha256(choice.artifact.encode()).hexdigest()[:16]
    return find_cache_folder() / "tuning" / f"{manifest.sha256}-{choice.name}-{artifact}.json"


def _keep(path: Path, document: Mapping[str, JsonValue]) -> Path:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(
            f"cannot make {path.parent}: {cause}; set EDGEKIT_CACHE to another folder"
        ) from cause
    with write_atomically(path, mode=0o600) as file:
        file.write(json.dumps(document, indent=2).encode())
    with contextlib.suppress(OSError):  # as another process may remove the same
        for oldest in sorted(path.parent.glob("*.json"), key=lambda result: result.stat().st_mtime)[
            :-MAX_RESULTS
        ]:
            oldest.unlink()
    return path


def _engine_version(backend: str) -> str | None:
    with contextlib.suppress(EngineMissingError):
        return " ".join(find_engine(backend).installation.find_release())
    return None
