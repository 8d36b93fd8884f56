"""Chooses the version to open: the best candidate whose package is intact."""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from edgekit_runtime.errors import EdgekitError, SlotError, UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots.access import RecordError
from edgekit_runtime.slots.folder import ModelFolder
from edgekit_runtime.slots.state import HEALTHY, REJECTED, UNPROVEN, Installed, ModelState
from edgekit_runtime.slots.transitions import count_start, list_candidates

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage

Decide: TypeAlias = Callable[[ModelState], tuple[ModelState, tuple[Installed, ...]]]
"""Takes a state, and returns the next state and the versions that can be opened, best first."""

_PROVEN_FIRST: Final = {HEALTHY: 0, UNPROVEN: 1, REJECTED: 2}

_logger = logging.getLogger(__name__)


class NothingToOpenError(SlotError):
    """No candidate can be opened. The message states the reason for each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """The version to open now. Close `package` after the session is open.

    Attributes:
        sha256: The digest of the manifest.
        package: The verified package. Read the model from it, because an installation may remove the file.
        health: `unproven`, `healthy` or `rejected`. A rejected version is chosen only if all better ones are
            damaged. If possible, open it in a separate process.
        begun: The number of starts without a confirmation, including this one if `is_counted`.
        why: The reason for this choice, as text for the user.
        is_counted: Whether this start was recorded on the disk.
    """

    model: str
    version: str
    sha256: str
    package: "OpenedPackage"
    health: str
    begun: int
    why: str
    is_counted: bool = False


def select(state: ModelState, version: str | None) -> tuple[Installed, ...]:
    """Return the installed packages that may be opened, best first.

    If `version` is not None, only packages of this version are returned.

    Raises:
        SlotError: `version` is not installed, or was rejected.
    """
    candidates = list_candidates(state)
    if version is None:
        return candidates
    chosen = tuple(item for item in candidates if item.version == version)
    if any(item.health != REJECTED for item in chosen):
        return chosen
    for item in state.rejected:
        if item.version == version:
            raise SlotError(f"{state.model} {version}: was rejected here: {item.reason}")
    there = ", ".join(sorted({item.version for item in candidates})) or "none"
    raise SlotError(f"{state.model}: version {version} is not installed, there are: {there}")


def open_first(
    folder: ModelFolder, state: ModelState, candidates: Iterable[Installed], problem: str | None
) -> Choice:
    """Open and return the first candidate whose package is intact. Nothing is recorded.

    `candidates` are sorted, best first. `problem` is an error of the state file, which is added to
    `Choice.why`, or None.

    Raises:
        NothingToOpenError: No package is intact.
        UnavailableError: No file descriptor or memory is available.
    """
    problems = [] if problem is None else [problem]
    for item in candidates:
        try:
            package = folder.open(state, item)
        except UnavailableError:  # nothing is known of the package
            raise
        except EdgekitError as cause:
            problems.append(f"{item.version}: {cause}")
            continue
        return Choice(
            model=state.model,
            version=item.version,
            sha256=item.sha256,
            package=package,
            health=item.health,
            begun=item.begun,
            why="; ".join([_describe(state, item), *problems]),
        )
    reasons = "; ".join(problems) or "nothing is installed"
    raise NothingToOpenError(f"{state.model}: no version can be opened: {reasons}; install a package")


def begin(folder: ModelFolder, decide: Decide, counted: Collection[str]) -> Choice:
    """Open the first candidate whose package is intact, and record the new state and the start.

    If the state file cannot be written, the start is not counted, and healthy versions are tried first.

    Args:
        folder: The folder of the model.
        decide: Takes the current state. Returns the new state and the candidates, best first.
        counted: The manifest digests of versions whose start was already counted.

    Raises:
        NothingToOpenError: No package is intact. Nothing is recorded.
        UnavailableError: No file descriptor or memory is available. Nothing is recorded.
        SlotError: `decide` raised it.
    """
    try:
        with folder.lock():
            loaded = folder.load()
            state, candidates = decide(loaded.state)
            choice = open_first(folder, state, candidates, loaded.problem)
            is_counted = choice.health == UNPROVEN and choice.sha256 not in counted
            try:
                folder.record(loaded, count_start(state, choice.version) if is_counted else state)
            except (RecordError, UnavailableError):
                choice.package.close()
                raise
            return replace(choice, begun=choice.begun + is_counted, is_counted=is_counted)
    except RecordError as cause:
        _logger.warning("%s: the start is not counted, so proven versions come first: %s", folder.path, cause)
        state, candidates = decide(folder.load().state)
        proven_first = sorted(candidates, key=lambda item: _PROVEN_FIRST[item.health])
        return open_first(folder, state, proven_first, str(cause))


def _describe(state: ModelState, item: Installed) -> str:
    role = "factory" if item is state.factory else "active" if item is state.active else "previous"
    if state.pinned == item.version:
        role += ", pinned"
    if item.health == UNPROVEN:
        role += ", on trial"
    return f"{role}, rejected but there is nothing else" if item.health == REJECTED else role
