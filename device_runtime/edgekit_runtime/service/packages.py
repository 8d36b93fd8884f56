"""Packages that are served straight from files, without slots."""

from collections.abc import Sequence
from pathlib import Path

from edgekit_runtime.archive import read_unverified_manifest
from edgekit_runtime.errors import PackageError
from edgekit_runtime.service.versions import Installed

_SUFFIX = ".edgepkg"


class PackageFiles:
    """A `Source` of given files, and of all packages in given folders, looked at anew each time.

    What a package says of its name is believed here without a signature; loading verifies it.
    """

    __slots__ = ("_paths",)

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)

    def names(self) -> Sequence[str]:
        """Return the names of all models, in the order of the files."""
        return list(dict.fromkeys(package.name for package in self._read()))

    def find(self, name: str) -> Sequence[Installed]:
        """Return the packages of a model."""
        return [package for package in self._read() if package.name == name]

    def _read(self) -> list[Installed]:
        files = []
        for path in self._paths:
            files += sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]
        return [_describe(path) for path in files]


def _describe(path: Path) -> Installed:
    if not path.exists():
        raise PackageError(f"{path}: there is no such file")
    manifest = read_unverified_manifest(path).manifest
    return Installed(manifest.name, manifest.version, path)
