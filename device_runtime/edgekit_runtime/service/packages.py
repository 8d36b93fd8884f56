"""Packages that are served straight from files, without slots."""

import logging
from collections.abc import Sequence
from pathlib import Path

from edgekit_runtime.archive import DEFAULT_LIMITS, read_package, read_unverified_manifest
from edgekit_runtime.errors import EdgekitError, PackageError
from edgekit_runtime.service.loading import Loaded, ModelOptions, load, unload
from edgekit_runtime.service.versions import Installed
from edgekit_runtime.signing import TrustStore

_SUFFIX = ".edgepkg"

_logger = logging.getLogger(__name__)


class PackageFiles:
    """A `Source` of given files, and of all packages in given folders, looked at anew each time.

    A file in a folder that is damaged or goes away meanwhile is passed by; a file that was named is an error.
    What a package says of its name is believed here without a signature; opening verifies it.
    """

    __slots__ = ("_paths", "_problems", "_rejected", "_seen", "limits", "trust")

    def __init__(self, paths: Sequence[Path], trust: TrustStore) -> None:
        self._paths = tuple(paths)
        self.trust, self.limits = trust, DEFAULT_LIMITS
        self._seen: dict[tuple[Path, int, int], Installed] = {}
        self._rejected: set[tuple[Path, int, int]] = set()
        self._problems: list[str] = []

    def names(self) -> Sequence[str]:
        """Return the names of all models, in the order of the files."""
        return list(dict.fromkeys(package.name for package in self._read()))

    def find(self, name: str) -> Sequence[Installed]:
        """Return the packages of a model.

        Raises:
            PackageError: a file cannot be read: a named one, or in a folder one that may be this model's.
        """
        found = [package for package in self._read() if package.name == name]
        if not found and self._problems:
            raise PackageError(f"model '{name}' is in no package that can be read: {self._problems[0]}")
        return found

    def open(self, name: str, options: ModelOptions) -> list[Loaded]:
        """Return what is to be served of `name`, see `Source`."""
        opened: list[Loaded] = []
        try:
            for package in options.policy.choose(name, self.find(name)):
                opened.append(self.reopen(package.path, options))  # noqa: PERF401  # to close them in between
        except BaseException:
            for loaded in opened:
                unload(loaded.sessions)
            raise
        return opened

    def reopen(self, path: Path, options: ModelOptions) -> Loaded:
        """Return the model of the package at `path`."""
        with read_package(path, self.trust) as package:
            return load(package, options)

    def confirm(self, name: str, version: str) -> None:
        """Nothing: files have no state."""

    def find_proven(self, _name: str) -> Installed | None:
        """Return None: files do not say which version was in use before."""
        return None

    def reject(self, name: str, version: str, _reason: str) -> bool:
        """Pass a version's file by, as long as this lives and the file stays, if there is another version."""
        own = [
            key for key, package in self._read_keys() if (package.name, package.version) == (name, version)
        ]
        others = [package for package in self._read() if package.name == name and package.version != version]
        if others:
            self._rejected.update(own)
        return bool(others)

    def _read(self) -> list[Installed]:
        return [package for key, package in self._read_keys() if key not in self._rejected]

    def _read_keys(self) -> list[tuple[tuple[Path, int, int], Installed]]:
        described, problems = [], []
        for path in self._paths:
            if not path.is_dir():
                described.append(self._describe(path))
                continue
            for file in sorted(path.glob(f"*{_SUFFIX}")):
                try:
                    described.append(self._describe(file))
                except EdgekitError as error:  # noqa: PERF203  # one that is damaged stops no other
                    problems.append(str(error))
                    if problems[-1] not in self._problems:  # they are looked at often
                        _logger.warning("a file of a folder is passed by: %s", error)
        self._problems = problems
        return described

    def _describe(self, path: Path) -> tuple[tuple[Path, int, int], Installed]:
        try:
            status = path.stat()
        except OSError as cause:
            raise PackageError(f"cannot read package {path}: {cause.strerror}") from cause
        key = (path, status.st_mtime_ns, status.st_ino)
        if key not in self._seen:
            manifest = read_unverified_manifest(path).manifest
            self._seen[key] = Installed(manifest.name, manifest.version, path)
        return key, self._seen[key]
