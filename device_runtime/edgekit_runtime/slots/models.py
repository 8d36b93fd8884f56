"""The folders of all models below a state folder: which there are, and making one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import ManifestError, SlotError
from edgekit_runtime.package.manifest_entries import require_token
from edgekit_runtime.slots.access import check_private, make_folder
from edgekit_runtime.slots.folder import ModelFolder, Reading
from edgekit_runtime.system.atomic_files import Disk
from edgekit_runtime.system.resource_errors import check_lack

_MODELS: Final = "models"


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of models.

    Attributes:
        root: the state folder; it need not exist.
        reading: which packages are accepted.
        disk: what carries changes out.
    """

    root: Path
    reading: Reading
    disk: Disk = field(repr=False)

    @property
    def path(self) -> Path:
        """The folder that holds them."""
        return self.root / _MODELS

    def names(self) -> tuple[str, ...]:
        """Return the names of the models of which something is installed, sorted.

        Raises:
            SlotError: the folder cannot be read, or is open to other users.
            UnavailableError: it cannot be read now.
        """
        try:
            paths = list(self.path.iterdir())
            self._check()
            found = [path for path in paths if _find_problem(path.name) is None and path.is_dir()]
            return tuple(sorted(path.name for path in found if self._has_content(path)))
        except FileNotFoundError:
            return ()
        except OSError as cause:
            check_lack(cause, f"{self.path}: cannot be read")
            raise SlotError(f"{self.path}: cannot be read: {cause.strerror}") from cause

    def find(self, model: str) -> ModelFolder:
        """Return the folder of `model`.

        Raises:
            SlotError: no such model or no such name, or a folder is open to other users.
        """
        if problem := _find_problem(model):
            raise SlotError(f"no model has such a name: {problem}")
        path = self.path / model
        try:
            path.lstat()
        except FileNotFoundError as cause:
            raise SlotError(
                f"{model}: is not installed in {self.root}; see edgekit-device install"
            ) from cause
        except OSError as cause:
            raise SlotError(f"{path}: cannot be read: {cause.strerror}") from cause
        self._check()
        check_private(path)
        return self._at(path)

    def make(self, model: str) -> ModelFolder:
        """Return the folder of `model`, which is made where it is missing.

        Raises:
            SlotError: it cannot be made, or a folder is open to other users.
        """
        # Each is checked before something is made in it: a link of another user could lead elsewhere.
        make_folder(self.root, 0o755, self.disk)
        check_private(self.root, may_be_link=True)
        make_folder(self.path, 0o700, self.disk)
        check_private(self.path)
        make_folder(self.path / model, 0o700, self.disk)
        return self.find(model)

    def _has_content(self, path: Path) -> bool:
        """Return whether a model lies at `path`; one behind a link counts, though it is not opened.

        Else it would be missing without a word.
        """
        try:
            return self._at(path).has_content()
        except OSError:
            if path.is_symlink():  # the others are readable all the same
                return True
            raise

    def _check(self) -> None:
        check_private(self.root, may_be_link=True)
        check_private(self.path)

    def _at(self, path: Path) -> ModelFolder:
        return ModelFolder(path, self.reading, self.disk)


def _find_problem(name: str) -> str | None:
    try:
        require_token(name, "model")
    except ManifestError as cause:
        return str(cause)
    return None
