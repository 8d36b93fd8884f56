"""A source of the models that are installed in slots.

The `slots` package chooses the version to open. If a version fails, this module rejects it in the slots and
opens the next best version.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence

from edgekit_runtime.errors import BackendError, EdgekitError, SlowOpeningError, UnavailableError
from edgekit_runtime.package.archive import DEFAULT_LIMITS
from edgekit_runtime.service.models.source import Load, Source
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.sessions.backends import check_engines
from edgekit_runtime.slots import HEALTHY, MAX_BEGUN, UNPROVEN, Choice, Slots
from edgekit_runtime.slots.access import RecordError
from edgekit_runtime.slots.choice import NothingToOpenError
from edgekit_runtime.system.engines import EngineMissingError

_logger = logging.getLogger(__name__)


class InstalledModels(Source):
    """A `Source` of the packages in the slots of this device."""

    __slots__ = ("_begun", "_slots", "_slow_openings", "confirm_after_s", "limits")

    def __init__(self, slots: Slots, *, confirm_after_s: float = Source.confirm_after_s) -> None:
        self._slots, self.confirm_after_s = slots, confirm_after_s
        self._begun: set[str] = set()
        self._slow_openings: Counter[str] = Counter()  # by sha256, in this process
        self.limits = DEFAULT_LIMITS

    def names(self) -> Sequence[str]:
        """Return the names of all installed models."""
        return self._slots.models()

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the versions in `policy.specific`. If there are none, return the active version."""
        servables = []
        for version in policy.ordered() or (None,):
            candidates = self._slots.list_candidates(name, version, counted=self._begun)
            item, path = next((pair for pair in candidates if pair[1].exists()), candidates[0])
            servables.append(Servable(name, item.version, path, item.sha256))
        return servables

    def find_proven(self, name: str) -> Servable | None:
        """Return another version that is proven if the current version is not proven yet, or None."""
        state = self._slots.load(name).state
        if state.current is None or state.current.health != UNPROVEN:
            return None
        for other, path in self._slots.list_candidates(name):
            if other.health == HEALTHY and other.version != state.current.version:
                return Servable(name, other.version, path, other.sha256)
        return None

    def find_trial(self, name: str) -> str | None:
        """Return the rollout requested when the current version was installed: `shadow`, `canary` or None.

        If the current version is already proven, return None.

        Raises:
            SlotError: The model does not exist, or other users can write to its folder.
        """
        current = self._slots.load(name).state.current
        return None if current is None or current.health != UNPROVEN else current.trial or None

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Open the versions in `policy.specific`. If there are none, open the version that the slots choose.

        The slots count each start. If a version in `policy.specific` fails, its error is raised. If the
        version that the slots chose fails, it is rejected, and the slots choose another one.
        """
        if not policy.specific:
            return [self._open_active(name, load)]
        opened: list[Loaded] = []
        with contextlib.ExitStack() as undo:
            for version in policy.ordered():
                opened.append(self._load(self._begin(name, version), load))
                undo.callback(opened[-1].close)
            undo.pop_all()
        return opened

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Verify and load a package that was served before. This is not counted as a start."""
        with self._slots.open(package.name, package.sha256) as opened:
            return load(opened)

    def confirm(self, name: str, version: str) -> None:
        """Record that `version` works."""
        try:
            self._slots.confirm(name, version)
        except RecordError as error:  # such as a full disk
            raise UnavailableError(str(error)) from error

    def undo_start(self, name: str, version: str) -> bool:
        """Reduce the start count of a version by one. Return True if the new count was recorded."""
        try:
            self._slots.undo_start(name, version)
        except EdgekitError as error:
            _logger.warning(
                "%s %s: a start is counted that says nothing of the version: %s", name, version, error
            )
            return False
        return True

    def reject(self, name: str, version: str, reason: str) -> bool:
        """Record that a version failed.

        Returns:
            True if the slots chose another version to open, and counted its start.
        """
        choice = self._reject(name, version, reason)
        if choice is None:
            return False
        choice.package.close()
        return True

    def _begin(self, name: str, version: str | None = None, without: Collection[str] = ()) -> Choice:
        choice = self._slots.begin_start(name, version, counted=self._begun, without=without)
        self._begun.add(choice.sha256)
        return choice

    def _begin_another(self, name: str, without: Collection[str]) -> Choice | None:
        try:
            return self._begin(name, without=without)
        except NothingToOpenError:
            return None

    def _reject(self, name: str, version: str, reason: str, without: Collection[str] = ()) -> Choice | None:
        choice = self._slots.reject(name, version, reason, counted=self._begun, without=without)
        if choice is not None:
            self._begun.add(choice.sha256)
        return choice

    def _load(self, choice: Choice, load: Load) -> Loaded:
        """Load a version whose start was counted. If it cannot be tried now, the start is not counted."""
        try:
            with choice.package as package:
                check_engines(package.manifest)  # also for a process of its own, which would start in vain
                loaded = load(package)
        except SlowOpeningError as error:
            # Of an unproven version the slots count each start, so that one that always hangs is given up.
            self._begun.discard(choice.sha256)
            count = self._slow_openings[choice.sha256] = self._slow_openings[choice.sha256] + 1
            if choice.health == HEALTHY and count >= MAX_BEGUN:
                raise BackendError(f"opening it took too long {count} times in a row: {error}") from error
            raise
        except (UnavailableError, EngineMissingError):
            if choice.is_counted and self.undo_start(choice.model, choice.version):
                self._begun.discard(choice.sha256)
            raise
        del self._slow_openings[choice.sha256]
        return loaded

    def _open_active(self, name: str, load: Load) -> Loaded:
        choice: Choice | None = self._begin(name)
        failure: EdgekitError | None = None
        tried: set[str] = set()
        while choice is not None:
            tried.add(choice.sha256)
            try:
                return self._load(choice, load)
            except UnavailableError:  # no evidence against the version
                raise
            except EngineMissingError as error:  # nor is this; it lasts until somebody installs the engine
                failure = error
                _logger.warning("%s %s stays installed and is not opened: %s", name, choice.version, error)
                choice = self._begin_another(name, tried)
            except EdgekitError as error:  # each version is a try of its own
                failure = error
                _logger.warning("%s %s is rejected: %s", name, choice.version, error)
                choice = self._reject(name, choice.version, str(error), tried)
        raise failure if failure is not None else EdgekitError(f"{name}: nothing to open")
