"""Packages that are served straight from files, without slots."""

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import DEFAULT_LIMITS, read_package, read_unverified_manifest
from edgekit_runtime.service.models.source import Load
from edgekit_runtime.service.options.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.slots.versions import sort_key
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.trust.dsse import Verifier

_SUFFIX = ".edgepkg"

_logger = logging.getLogger(__name__)


class PackageFiles:
    """A `Source` of given files, and of all packages in given folders, looked at anew each time.

    What a package says of its name is believed here without a signature; opening verifies it. As long as this
    lives, a version that was opened and not rejected is followed by no older one: an old package is signed,
    too, and files have no state that tells a way back from an attack.
    """

    __slots__ = ("_opened", "_paths", "_rejected", "_seen", "_trust", "_unreadable", "limits")

    def __init__(self, paths: Sequence[Path], trust: Verifier) -> None:
        """Take the packages at `paths`; what goes later is said in the log.

        Args:
            paths: of files and folders.
            trust: whose packages are accepted.

        Raises:
            PackageError: one of them is not there.
        """
        for path in paths:
            _stat(path)
        self._paths = tuple(paths)
        self._trust, self.limits = trust, DEFAULT_LIMITS
        self._seen: dict[tuple[Path, int, int], Servable] = {}
        self._rejected: set[tuple[Path, int, int]] = set()
        self._unreadable: dict[Path, str] = {}
        self._opened: set[tuple[str, str]] = set()  # names and versions

    def names(self) -> Sequence[str]:
        """Return the names of all models, in the order of the files."""
        return list(dict.fromkeys(package.name for package in self._read()))

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the packages that `policy` chooses.

        Raises:
            PackageError: there are none, and one that cannot be read may be one.
            RequestError: there are none, or not a version that is asked for.
            UnavailableError: one cannot be read now.
        """
        found = [package for package in self._read() if package.name == name]
        if not found and self._unreadable:
            reasons = "; ".join(self._unreadable.values())
            raise PackageError(f"model '{name}': there is no package of it that can be read: {reasons}")
        return policy.choose(name, found)

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Return what is to be served of `name`, see `Source`."""
        opened: list[Loaded] = []
        chosen = self.find(name, policy)
        if not policy.specific:
            self._check_age(chosen[0])
        try:
            for package in chosen:
                opened.append(self.reopen(package.path, load))  # noqa: PERF401  # to close them in between
        except BaseException:
            for loaded in opened:
                loaded.close()
            raise
        self._opened.update((name, package.version) for package in chosen)
        return opened

    def reopen(self, path: Path, load: Load) -> Loaded:
        """Return the model of the package at `path`."""
        with read_package(path, self._trust) as package:
            return load(package)

    def confirm(self, name: str, version: str) -> None:
        """Nothing: files have no state."""

    def find_proven(self, _name: str) -> Servable | None:
        """Return None: files do not say which version was in use before."""
        return None

    def reject(self, name: str, version: str, _reason: str) -> bool:
        """Pass a version's file by, as long as this lives and the file stays, if there is another version."""
        own = [
            key for key, package in self._read_keys() if (package.name, package.version) == (name, version)
        ]
        others = [package for package in self._read() if package.name == name and package.version != version]
        self._opened.discard((name, version))
        if others:
            self._rejected.update(own)
        return bool(others)

    def _check_age(self, package: Servable) -> None:
        opened = tuple(self._opened)  # other models are opened meanwhile, on other threads
        newest = max((one for name, one in opened if name == package.name), key=sort_key, default=None)
        if newest is not None and sort_key(package.version) < sort_key(newest):
            raise PackageError(
                f"{package.path}: {package.name} {package.version} is older than {newest}, which was served"
                " before; to go back, start the service again, or set specific in"
                f" [models.{package.name}]"
            )

    def _read(self) -> list[Servable]:
        return [package for key, package in self._read_keys() if key not in self._rejected]

    def _read_keys(self) -> list[tuple[tuple[Path, int, int], Servable]]:
        files = []
        for path in self._paths:
            files += _list_packages(path) if path.is_dir() else [path]
        found, unreadable, problem = [], {}, None
        for path in files:
            try:
                found.append(self._describe(path))
            except PackageError as error:  # noqa: PERF203  # one that is none stops no other
                problem = error
                unreadable[path] = str(error)
                if self._unreadable.get(path) != str(error):
                    _logger.warning("%s", error)
        # Only of the files that are there now: each swap may bring another one.
        self._seen, self._unreadable = dict(found), unreadable
        if problem is not None and not found:
            raise problem
        return found

    def _describe(self, path: Path) -> tuple[tuple[Path, int, int], Servable]:
        status = _stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(f"cannot read package {path}: it is no file")
        key = (path, status.st_mtime_ns, status.st_ino)
        found = self._seen.get(key)
        if found is None:
            manifest = read_unverified_manifest(path).manifest
            found = Servable(manifest.name, manifest.version, path)
        return key, found


def _list_packages(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(_SUFFIX))
    except OSError as cause:
        check_lack(cause, f"cannot list the packages in {folder}")
        raise PackageError(f"cannot list the packages in {folder}: {cause.strerror}") from cause


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as cause:
        check_lack(cause, f"cannot read package {path}")
        raise PackageError(f"cannot read package {path}: {cause.strerror}") from cause
