"""The files of one model: its state, the packages in its slots and its factory package.

A package file is named after its version and digest, and has no effect until the state names it. An
installation is therefore committed in one step, when the state is replaced. This module does not decide which
package is installed or opened.

Source: docs/explanation/slots.md.
"""

import contextlib
import functools
import logging
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgekit_runtime.encryption import KEY_SUFFIX, key_path
from edgekit_runtime.errors import EdgekitError, OutputError, PackageError, SlotError, UnavailableError
from edgekit_runtime.package.version_order import sort_key
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots.access import ForeignFileError, RecordError, belongs_to_us, hold, read_own_file
from edgekit_runtime.slots.state import (
    HEALTHY,
    DamagedStateError,
    Installed,
    ModelState,
    NewerStateError,
    parse_state,
)
from edgekit_runtime.system.atomic_files import Disk, write_atomically
from edgekit_runtime.system.resource_errors import check_lack

if TYPE_CHECKING:
    from edgekit_runtime.package.archive import OpenedPackage

STATE_NAME: Final = "state.json"
_SLOT, _FACTORY, _SUFFIX = "slot-", "factory-", ".edgepkg"
_MAX_STATE_BYTES: Final = 64 << 10
_MAX_FOUND: Final = 16  # packages that are read to rebuild a state. Slots and interruptions leave fewer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundState:
    """A state that was read from its file or rebuilt from the packages.

    Attributes:
        problem: The reason why the state was rebuilt, or None.
        replaceable: Whether the state file may be written. False if it cannot be read or is from a newer
            edgekit.
    """

    state: ModelState
    problem: str | None = None
    replaceable: bool = True

    def check_replaceable(self) -> None:
        """Raise `RecordError` if the state file must not be written."""
        if not self.replaceable:
            raise RecordError(f"{self.problem}; until then nothing can be installed or recorded")


def identify(package: "OpenedPackage") -> Installed:
    """Return a new state entry for a package, which is unproven and was never started."""
    manifest = package.manifest
    return Installed(version=manifest.version, sha256=manifest.sha256, encrypted=package.is_encrypted)


class ModelFolder:
    """The folder of one model.

    Attributes:
        path: The path of the folder, which may be missing.
    """

    __slots__ = ("_disk", "_read", "model", "path")

    def __init__(self, path: Path, read: "Callable[[Path], OpenedPackage]", disk: Disk) -> None:
        """Use the folder at `path`; `read` verifies and opens a package file."""
        self.path = path
        self.model = path.name
        self._read = read
        self._disk = disk

    def has_content(self) -> bool:
        """Return whether the folder has a state or a package. A failed installation may leave it empty."""
        return any(name == STATE_NAME or name.endswith(_SUFFIX) for name in self._list_names())

    def load(self, written: Installed | None = None) -> FoundState:
        """Return the state, or rebuild it if its file is missing or damaged. Nothing is written.

        Args:
            written: A package that was just written but is not installed yet. A rebuilt state omits it.
        """
        where = self.path / STATE_NAME
        find = functools.partial(self._find_packages, written)
        try:
            state = parse_state(read_own_file(where, _MAX_STATE_BYTES), str(where))
        except FileNotFoundError:
            packages = find()
            return FoundState(packages, None if packages.current is None else f"{where}: is missing")
        except (DamagedStateError, ForeignFileError) as cause:
            return FoundState(find(), str(cause))
        except NewerStateError as cause:
            return FoundState(find(), str(cause), replaceable=False)
        except OSError as cause:  # the disk may give it out the next time
            problem = f"{where}: cannot be read: {cause.strerror}"
            return FoundState(find(), problem, replaceable=False)
        if state.model != self.model:
            return FoundState(find(), f"{where}: is of model '{state.model}'")
        return FoundState(state)

    def record(self, loaded: FoundState, state: ModelState) -> None:
        """Replace the loaded state by `state`. A power cut leaves either the old or the new state.

        Nothing is written if the loaded state is intact and equal to `state`.

        Raises:
            RecordError: The disk is full, the folder is not writable, or `loaded` is not replaceable.
            UnavailableError: No file descriptor or memory is available.
        """
        if state == loaded.state and loaded.problem is None:
            return
        loaded.check_replaceable()
        with (
            _as_record_error(),
            write_atomically(self.path / STATE_NAME, mode=0o600, disk=self._disk) as file,
        ):
            file.write(state.to_bytes())

    def open(self, state: ModelState, item: Installed) -> "OpenedPackage":
        """Verify and open the package `item`, which is an entry of `state`.

        Raises:
            PackageError: The package is missing, damaged, or not signed by a trusted key.
            SlotError: The file contains another package, or the package is for another target.
        """
        return self._open(self.locate(state, item), item)

    def locate(self, state: ModelState, item: Installed) -> Path:
        """Return the path of the package `item`, which is an entry of `state`."""
        return self.path / _file_name(item, factory=item is state.factory)

    def write(self, package: "OpenedPackage", item: Installed, *, factory: bool) -> bool:
        """Write and verify the package file of `item`. Return False if an intact file already existed.

        The file of a factory package is read-only.

        Raises:
            RecordError: The disk is full, or the folder is not writable.
            PackageError: The file on the disk differs from the package.
        """
        path = self.path / _file_name(item, factory=factory)
        with _passing_bad_ones(), self._open(path, item) as present:
            if present.is_encrypted == item.encrypted:
                return False
        mode = 0o400 if factory else 0o600
        if package.key_file:  # first: a package without its key is of no use
            with (
                _as_record_error(),
                write_atomically(key_path(path), mode=0o600, disk=self._disk) as file,
            ):
                file.write(package.key_file)
        with _as_record_error(), write_atomically(path, mode=mode, disk=self._disk) as file:
            package.copy_to(file)
        self._open(path, item).close()
        return True

    def may_name(self, item: Installed) -> bool:
        """Return whether the state file names `item`, or True if the state file cannot be read."""
        loaded = self.load()
        is_named = any(other.sha256 == item.sha256 for other in loaded.state.installed)
        return is_named if loaded.problem is None else not loaded.replaceable

    def remove(self, item: Installed, *, factory: bool) -> None:
        """Remove the package file of `item`. Errors are ignored. See `write` for `factory`."""
        with contextlib.suppress(OSError):
            path = self.path / _file_name(item, factory=factory)
            self._disk.remove(path)
            self._disk.remove(key_path(path))

    def remove_leftovers(self, state: ModelState) -> None:
        """Remove temporary files and the packages that `state` does not name. Failures are logged.

        The caller must hold the `lock`, and `state` must be the content of the state file.
        """
        named = {self.locate(state, item).name for item in state.installed}
        try:
            left_over = [
                name
                for name in self._list_names()
                if name.removesuffix(KEY_SUFFIX) not in named and _is_ours(name)
            ]
            if left_over:
                # Else a power cut could keep the removals and take the newest state back.
                self._disk.sync_folder(self.path)
            for name in left_over:
                self._disk.remove(self.path / name)
        except OSError as cause:
            _logger.warning("%s: left-over files cannot be removed now: %s", self.path, cause.strerror)

    def remove_all(self) -> None:
        """Remove all files. The state is removed last, so that no package is found without its state."""
        try:
            for name in sorted(self._list_names(), key=STATE_NAME.__eq__):
                self._disk.remove(self.path / name)
                self._disk.sync_folder(self.path)
        except OSError as cause:
            raise RecordError(f"{self.path}: cannot be removed: {cause.strerror}") from cause

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the state of this model during the `with` block, against other processes and threads.

        Raises:
            RecordError: The folder is missing, or the state is locked for over 30 s.
        """
        with hold(self.path):
            yield

    def _open(self, path: Path, item: Installed | None = None) -> "OpenedPackage":
        try:
            status = path.lstat()
        except OSError as cause:
            check_lack(cause, f"cannot read package {path}")
            raise PackageError(f"{path}: {cause.strerror}; install the package again") from cause
        if not stat.S_ISREG(status.st_mode) or not belongs_to_us(status):
            raise SlotError(f"{path}: is a link, no file, or of another user; install the package again")
        package = self._read(path)
        manifest = package.manifest
        if manifest.name != self.model or (item is not None and manifest.sha256 != item.sha256):
            package.close()
            expected = self.model if item is None else f"{self.model} {item.version}"
            raise SlotError(
                f"{path}: holds {manifest.name} {manifest.version}, not the {expected} that was installed;"
                " install the package again"
            )
        return package

    def _list_names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())

    def _find_packages(self, written: Installed | None) -> ModelState:
        """Return a state of the packages that are there whole: the newest two in the slots, both unproven."""
        slots: list[Installed] = []
        factories: list[Installed] = []
        try:
            names = self._list_names()
        except OSError as cause:
            check_lack(cause, f"{self.path}: cannot be read")
            names = []
        for prefix, installed in ((_SLOT, slots), (_FACTORY, factories)):
            packages = [name for name in names if name.startswith(prefix) and name.endswith(_SUFFIX)]
            file_name = None if written is None else _file_name(written, factory=prefix == _FACTORY)
            packages = [name for name in packages if name != file_name]
            for name in packages[:_MAX_FOUND]:
                with _passing_bad_ones():
                    installed.append(self._recognise(self.path / name, factory=prefix == _FACTORY))
        slots.sort(key=lambda item: sort_key(item.version), reverse=True)
        active, spare, *_ = (*slots, None, None)
        factory = next(iter(factories), None)
        return ModelState(model=self.model, active=active, spare=spare, factory=factory)

    def _recognise(self, path: Path, *, factory: bool) -> Installed:
        with self._open(path) as package:
            item = identify(package)
        if path.name != _file_name(item, factory=factory):
            raise SlotError(f"{path}: is not named after its content")
        return replace(item, health=HEALTHY) if factory else item


def _is_ours(name: str) -> bool:
    is_package = name.startswith((_SLOT, _FACTORY)) and name.removesuffix(KEY_SUFFIX).endswith(_SUFFIX)
    return is_package or (name.startswith(".") and name.endswith(".tmp"))


def _file_name(item: Installed, *, factory: bool) -> str:
    return f"{_FACTORY if factory else _SLOT}{item.version}-{item.sha256[:16]}{_SUFFIX}"


@contextlib.contextmanager
def _as_record_error() -> Iterator[None]:
    try:
        yield
    except OutputError as cause:
        if cause.__cause__ is not None:
            check_lack(cause.__cause__, "the state of a model cannot be written")
        raise RecordError(str(cause)) from cause


@contextlib.contextmanager
def _passing_bad_ones() -> Iterator[None]:
    try:
        yield
    except UnavailableError:  # it may be whole
        raise
    except EdgekitError:
        pass
