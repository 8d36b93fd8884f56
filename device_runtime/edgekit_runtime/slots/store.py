"""The installed models of a device. Selects the version to open, and records whether it worked.

All functions may block, because they access the disk and verify whole packages. Do not call them on an event
loop. Several processes and threads can use the same folder at the same time.

Source: docs/explanation/slots.md.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.errors import EdgekitError, ManifestError, SlotError, UnavailableError
from edgekit_runtime.package.manifest_entries import require_token
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots import transitions
from edgekit_runtime.slots.access import RecordError, check_private, hold, make_folder
from edgekit_runtime.slots.choice import Choice, NothingToOpenError, begin, open_first, select
from edgekit_runtime.slots.folder import FoundState, ModelFolder, identify
from edgekit_runtime.slots.state import REJECTED, Installed, ModelState
from edgekit_runtime.slots.transitions import Permissions
from edgekit_runtime.system.atomic_files import DISK, Disk
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.trust.dsse import Verifier

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.package.manifest import Manifest

_MODELS: Final = "models"
_READS: Final = 3  # tries to read a state that changes meanwhile
_AS_USUAL: Final = Permissions()

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The result of an installation. `active` is True if the installed version is now the current one."""

    model: str
    version: str
    active: bool
    state: ModelState


@dataclass(frozen=True, slots=True)
class Place:
    """One installed package of a model.

    Attributes:
        name: `active`, `spare` or `factory`.
        installed: The entry in the state.
        path: The path of the package file.
        problem: The reason why the package cannot be opened, or None.
    """

    name: str
    installed: Installed
    path: Path
    problem: str | None


@dataclass(frozen=True, slots=True)
class Slots:
    """The installed models in one folder.

    All methods raise `UnavailableError` if the machine lacks file descriptors or memory. The version is not
    the cause. They raise `SlotError` if the model is unknown, if other users can change its folder, or if a
    change cannot be recorded.

    Attributes:
        folder: The folder that `find_state_folder` returns. It may be missing.
        trust: The keys whose packages are accepted.
        target: The target of this device. Packages for other targets are refused. None accepts all targets.
        disk: The functions that change files, see `Disk`.
    """

    folder: Path
    trust: Verifier
    target: str | None = None
    disk: Disk = field(default=DISK, repr=False)

    def models(self) -> tuple[str, ...]:
        """Return the sorted names of all installed models, including damaged ones.

        Raises:
            SlotError: The folder cannot be read, or other users can change it.
            UnavailableError: No file descriptor or memory is available.
        """
        try:
            paths = list(self._models.iterdir())
            self._check_folders()
            models = [path for path in paths if _find_problem(path.name) is None and path.is_dir()]
            return tuple(sorted(path.name for path in models if self._has_content(path)))
        except FileNotFoundError:
            return ()
        except OSError as cause:
            check_lack(cause, f"{self._models}: cannot be read")
            raise SlotError(f"{self._models}: cannot be read: {cause.strerror}") from cause

    def load(self, model: str) -> FoundState:
        """Return the state of `model`. If its file is damaged, the state is rebuilt but not written."""
        return self._find(model).load()

    def examine(self, model: str) -> tuple[FoundState, tuple[Place, ...]]:
        """Verify the packages of `model`, and return its state and its packages."""
        folder = self._find(model)
        loaded = folder.load()
        return loaded, tuple(_examine(folder, loaded.state))

    def choose(self, model: str, version: str | None = None) -> Choice:
        """Choose a version and open its package. Nothing is recorded.

        Args:
            model: The name of the model.
            version: The version to open. None selects the active version, or the best intact version if the
                active one is damaged or rejected.

        Raises:
            SlotError: No version can be opened. The message states the reason for each.
        """
        folder = self._find(model)
        for _ in range(_READS):
            loaded = folder.load()
            state = transitions.give_up(loaded.state)
            try:
                return open_first(folder, state, select(state, version), loaded.problem)
            except NothingToOpenError:
                # An installation may have removed a package after its state was read.
                if folder.load() == loaded:
                    raise
        raise SlotError(f"{folder.path}: changes all the time; try again")

    def list_candidates(
        self, model: str, version: str | None = None, *, counted: Collection[str] = ()
    ) -> tuple[tuple[Installed, Path], ...]:
        """Return the entries that `choose` would try, with their paths, best first. No package is opened.

        See `choose` for `version`, and `begin_start` for `counted`.

        Raises:
            SlotError: The version is not installed, or nothing is installed.
        """
        folder = self._find(model)
        state = transitions.give_up(folder.load().state, counted)
        located = tuple((item, folder.locate(state, item)) for item in select(state, version))
        if not located:
            raise NothingToOpenError(f"{model}: nothing is installed; install a package")
        return located

    def open(self, model: str, sha256: str) -> "OpenedPackage":
        """Open the package with the manifest digest `sha256`, even if it was rejected. Nothing is recorded.

        Raises:
            SlotError: The package is not installed or cannot be opened. The message states the reason.
        """
        folder = self._find(model)
        loaded = folder.load()
        items = [item for item in loaded.state.installed if item.sha256 == sha256]
        return open_first(folder, loaded.state, items, loaded.problem).package

    def begin_start(
        self,
        model: str,
        version: str | None = None,
        *,
        counted: Collection[str] = (),
        without: Collection[str] = (),
    ) -> Choice:
        """Choose a version like `choose`. If the version is unproven, record this start on the disk.

        A version that was started `MAX_BEGUN` times without a confirmation is rejected, so that a crash loop
        ends. If the start cannot be recorded, healthy versions are preferred.

        Args:
            model: The name of the model.
            version: See `choose`.
            counted: The manifest digests of versions whose start this process has already counted. They are
                not counted again.
            without: The manifest digests of versions that this device cannot open. They are skipped.
        """

        def decide(state: ModelState) -> tuple[ModelState, tuple[Installed, ...]]:
            state = transitions.give_up(state, counted)
            return state, tuple(item for item in select(state, version) if item.sha256 not in without)

        return begin(self._find(model), decide, counted)

    def undo_start(self, model: str, version: str) -> None:
        """Remove a start from the count, because it ended for a reason unrelated to the version."""
        self._change(model, lambda state: transitions.undo_start(state, version))

    def confirm(self, model: str, version: str) -> None:
        """Record that `version` passed its self-test and served. Nothing happens if it is not installed."""
        self._change(model, lambda state: transitions.confirm(state, version))

    def reject(
        self,
        model: str,
        version: str,
        reason: str,
        *,
        counted: Collection[str] = (),
        without: Collection[str] = (),
    ) -> Choice | None:
        """Record that `version` failed, choose another version, and record the start of that version.

        The result is None if all other versions are rejected or cannot be opened. If the failure cannot be
        recorded, a warning is logged.

        `reason` is a text for the user. See `begin_start` for `counted` and `without`.

        Raises:
            UnavailableError: No file descriptor or memory is available. The failure is recorded.
        """

        def decide(state: ModelState) -> tuple[ModelState, tuple[Installed, ...]]:
            state = transitions.reject(state, version, reason)
            good = (item for item in select(state, None) if item.health != REJECTED)
            return state, tuple(
                item for item in good if item.version != version and item.sha256 not in without
            )

        def record() -> None:
            try:
                self._change(model, lambda state: decide(state)[0])
            except (RecordError, UnavailableError) as cause:
                _logger.warning("%s: the failure of %s is not recorded: %s", model, version, cause)

        try:
            return begin(self._find(model), decide, counted)
        except NothingToOpenError as cause:
            _logger.warning("%s", cause)
            record()
            return None
        except UnavailableError:
            record()
            raise

    def rollback(self, model: str) -> ModelState:
        """Reject the current version, make the previous one current, and return the new state.

        Raises:
            SlotError: There is no previous version.
            PackageError: The package of the previous version is missing or damaged.
        """

        def change(state: ModelState) -> ModelState:
            current, previous = state.current, transitions.find_previous(state)
            if current is None or previous is None:
                raise SlotError(f"{model}: there is no previous version to go back to; install one")
            folder.open(state, previous).close()
            return transitions.reject(state, current.version, "was rolled back by hand")

        folder = self._find(model)
        return self._change(model, change)

    def pin(self, model: str, pinned: bool) -> ModelState:
        """Pin the model to its current version, or unpin it. Return the new state."""
        return self._change(model, lambda state: transitions.pin(state, pinned))

    def install(
        self,
        path: Path,
        allowed: Permissions = _AS_USUAL,
        *,
        factory: bool = False,
        check: "Callable[[Manifest], None] | None" = None,
        trial: str = "",
    ) -> Receipt:
        """Install the package at `path`. The last step, which activates the version, is atomic.

        Args:
            path: The path of the package, which is verified before anything is written.
            allowed: The changes that are permitted. All are refused by default.
            factory: Whether to install the package as the factory package, which is never removed.
            check: Raises an `EdgekitError` if this device cannot run the package. Then nothing is written.
            trial: How a service tests the version: `shadow`, `canary`, or empty for the default of the
                service.

        Raises:
            PackageError: The package is invalid. The subclass states the reason.
            SlotError: `transitions.add` refuses the version, the target differs, or the folder is not
                writable.
        """
        with self._read(path) as package:
            if check is not None:
                check(package.manifest)
            new = replace(identify(package), trial=trial)

            def change(state: ModelState) -> ModelState:
                if factory:
                    return transitions.add_factory(state, new, allowed)
                return transitions.add(state, new, allowed)

            model = package.manifest.name
            folder = self._make(model)
            with hold(self._models):  # one installation at a time
                with folder.lock():
                    loaded = folder.load()
                    change(loaded.state)  # refuses before anything is written
                    loaded.check_replaceable()
                    folder.remove_leftovers(loaded.state)
                is_new = folder.write(package, new, factory=factory)
                try:
                    state = self._change(model, change, written=new if is_new else None)
                except SlotError:
                    if is_new and not folder.may_name(new):
                        folder.remove(new, factory=factory)
                    raise
                with folder.lock():
                    folder.remove_leftovers(folder.load().state)
        active = state.current is not None and state.current.sha256 == new.sha256
        return Receipt(model=model, version=new.version, active=active, state=state)

    def remove(self, model: str) -> None:
        """Remove a model with all its packages and its state. If this was interrupted, call it again."""
        folder = self._find(model)
        with hold(self._models), folder.lock():
            folder.remove_all()

    def _change(
        self, model: str, change: Callable[[ModelState], ModelState], written: Installed | None = None
    ) -> ModelState:
        folder = self._find(model)
        with folder.lock():
            loaded = folder.load(written)
            state = change(loaded.state)
            folder.record(loaded, state)
        return state

    @property
    def _models(self) -> Path:
        return self.folder / _MODELS

    def _read(self, path: Path) -> "OpenedPackage":
        """Return the package at `path` after all of it has been verified.

        Raises:
            PackageError: the package is wrong; the subclass says how.
            SlotError: it is for another target.
        """
        from edgekit_runtime.package.archive import read_package  # with numpy, which an idle agent lacks

        package = read_package(path, self.trust)
        if self.target is not None and package.manifest.target != self.target:
            package.close()
            raise SlotError(
                f"{path}: is for target '{package.manifest.target}', this device is '{self.target}'"
                " (EDGEKIT_TARGET)"
            )
        return package

    def _find(self, model: str) -> ModelFolder:
        """Return the folder of `model`.

        Raises:
            SlotError: no such model or no such name, or a folder is open to other users.
        """
        if problem := _find_problem(model):
            raise SlotError(f"no model has such a name: {problem}")
        path = self._models / model
        try:
            path.lstat()
        except FileNotFoundError as cause:
            raise SlotError(
                f"{model}: is not installed in {self.folder}; see edgekit-device install"
            ) from cause
        except OSError as cause:
            raise SlotError(f"{path}: cannot be read: {cause.strerror}") from cause
        self._check_folders()
        check_private(path)
        return ModelFolder(path, self._read, self.disk)

    def _make(self, model: str) -> ModelFolder:
        """Return the folder of `model`, which is made where it is missing.

        Raises:
            SlotError: it cannot be made, or a folder is open to other users.
        """
        # Each is checked before something is made in it: a link of another user could lead elsewhere.
        make_folder(self.folder, 0o755, self.disk)
        check_private(self.folder, may_be_link=True)
        make_folder(self._models, 0o700, self.disk)
        check_private(self._models)
        make_folder(self._models / model, 0o700, self.disk)
        return self._find(model)

    def _check_folders(self) -> None:
        check_private(self.folder, may_be_link=True)
        check_private(self._models)

    def _has_content(self, path: Path) -> bool:
        """Return whether a model lies at `path`; one behind a link is listed, though it is not opened."""
        try:
            return ModelFolder(path, self._read, self.disk).has_content()
        except OSError:
            if path.is_symlink():  # the others are readable all the same
                return True
            raise


def _find_problem(name: str) -> str | None:
    try:
        require_token(name, "model")
    except ManifestError as cause:
        return str(cause)
    return None


def _examine(folder: ModelFolder, state: ModelState) -> Iterator[Place]:
    for name, item in (("active", state.active), ("spare", state.spare), ("factory", state.factory)):
        if item is None:
            continue
        problem = None
        try:
            folder.open(state, item).close()
        except EdgekitError as cause:
            problem = str(cause)
        yield Place(name, item, folder.locate(state, item), problem)
