"""Packages that are served straight from files, without slots."""

from collections.abc import Sequence
from pathlib import Path

from edgekit_runtime.archive import DEFAULT_LIMITS, read_package, read_unverified_manifest
from edgekit_runtime.errors import PackageError
from edgekit_runtime.service.loading import Loaded, ModelOptions, load, unload
from edgekit_runtime.service.versions import Installed
from edgekit_runtime.signing import TrustStore

_SUFFIX = ".edgepkg"


class PackageFiles:
    """A `Source` of given files, and of all packages in given folders, looked at anew each time.

    What a package says of its name is believed here without a signature; opening verifies it.
    """

    __slots__ = ("_paths", "_seen", "limits", "trust")

    def __init__(self, paths: Sequence[Path], trust: TrustStore) -> None:
        self._paths = tuple(paths)
        self.trust, self.limits = trust, DEFAULT_LIMITS
        self._seen: dict[tuple[Path, int, int], Installed] = {}

    def names(self) -> Sequence[str]:
        """Return the names of all models, in the order of the files."""
        return list(dict.fromkeys(package.name for package in self._read()))

    def find(self, name: str) -> Sequence[Installed]:
        """Return the packages of a model."""
        return [package for package in self._read() if package.name == name]

    def open(self, name: str, options: ModelOptions) -> list[Loaded]:
        """Return what is to be served of `name`, see `Source`."""
        opened: list[Loaded] = []
        try:
            for package in options.policy.choose(name, self.find(name)):
                opened.append(self.reopen(package.path, options))  # noqa: PERF401  # to close them in between
        except BaseException:
            for loaded in opened:
                unload(loaded.instances)
            raise
        return opened

    def reopen(self, path: Path, options: ModelOptions) -> Loaded:
        """Return the model of the package at `path`."""
        with read_package(path, self.trust) as package:
            return load(package, options)

    def confirm(self, name: str, version: str) -> None:
        """Nothing: files have no state."""

    def reject(self, _name: str, _version: str, _reason: str) -> bool:
        """Nothing, and nothing else to open: files have no state."""
        return False

    def _read(self) -> list[Installed]:
        files = []
        for path in self._paths:
            files += sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        return [self._describe(path) for path in files]

    def _describe(self, path: Path) -> Installed:
        try:
            status = path.stat()
        except OSError as cause:
            raise PackageError(f"cannot read package {path}: {cause.strerror}") from cause
        key = (path, status.st_mtime_ns, status.st_ino)
        if key not in self._seen:
            manifest = read_unverified_manifest(path).manifest
            self._seen[key] = Installed(manifest.name, manifest.version, path)
        return self._seen[key]
