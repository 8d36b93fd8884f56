"""A source that serves packages directly from files, without slots."""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from edgekit_runtime.errors import PackageError, SignatureError
from edgekit_runtime.package.archive import DEFAULT_LIMITS, OpenedPackage, read_unverified_manifest
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.submodels import list_tails, served_name
from edgekit_runtime.package.version_order import sort_key
from edgekit_runtime.service.models.source import Load, Source, open_listed
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.system.resource_errors import check_lack
from edgekit_runtime.trust.dsse import Verifier

_Key: TypeAlias = tuple[Path, int, int]
"""The state of a file: path, time of the last change and inode."""
_ModelKey: TypeAlias = tuple[_Key, str | None]
"""A file and one of its submodels, or None for the whole model."""

_SUFFIX: Final = ".edgepkg"

_logger = logging.getLogger(__name__)


class PackageFiles(Source):
    """A `Source` of package files and folders. Folders are listed again at each access.

    Tails are submodels that a server runs for devices. From the packages in `tails`, only tails are served.
    The name of a tail contains its digest, so tails of several versions can be served at the same time.

    Listing reads the name and version of a package without verification. Opening verifies the whole package.
    After a version was opened, older versions are refused until the service restarts. This prevents rollback
    attacks with old packages, whose signatures are valid too. Older versions are allowed if the policy names
    them, or after the newer version was rejected.
    """

    def __init__(self, paths: Sequence[Path], trust: Verifier, tails: Sequence[Path] = ()) -> None:
        """Create a source of the packages at `paths`. If a package is removed later, a warning is logged.

        Raises:
            PackageError: A path does not exist.
        """
        for path in (*paths, *tails):
            _stat(path)
        self._paths, self._tails = tuple(paths), tuple(tails)
        self._trust, self.limits = trust, DEFAULT_LIMITS
        self._manifests: dict[_Key, Manifest] = {}
        self._rejected: set[_ModelKey] = set()
        self._damaged: dict[_Key, PackageError] = {}
        self._unreadable: dict[Path, str] = {}
        self._opened: set[tuple[str, str]] = set()  # names and versions

    def names(self) -> Sequence[str]:
        """Return the names of all models, in the order of their files."""
        return list(dict.fromkeys(package.name for package in self._read().values()))

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the packages that `policy` chooses.

        Raises:
            PackageError: The package was not found, and at least one file cannot be read.
            RequestError: The package or a requested version was not found.
            UnavailableError: The system is out of memory or file descriptors.
        """
        return policy.choose(name, list(self._list(name).values()))

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Verify and load the packages that `policy` chooses, as `Source.open` does.

        If a package is damaged, the next best version is opened instead. If a signature is wrong, no other
        version is opened.
        """
        loaded: list[Loaded] = []
        with contextlib.ExitStack() as packages, contextlib.ExitStack() as undo:
            opened = [packages.enter_context(package) for package in self._open_packages(name, policy)]
            for package in opened:
                loaded.append(load(package))
                undo.callback(loaded[-1].close)
            undo.pop_all()
        self._opened.update((name, package.manifest.version) for package in opened)
        return loaded

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Verify and load a package that was served before."""
        with open_listed(package, self._trust, self.limits) as opened:
            return load(opened)

    def reject(self, name: str, version: str, _reason: str) -> bool:
        """Ignore the file of a version until the file changes or the service restarts.

        Returns:
            True if the file is ignored. False if the model has no other version, and the file stays in use.
        """
        packages = {key: package for key, package in self._read().items() if package.name == name}
        own = [key for key, package in packages.items() if package.version == version]
        self._opened.discard((name, version))
        has_others = len(own) < len(packages)
        if has_others:
            self._rejected.update(own)
        return has_others

    def _list(self, name: str) -> dict[_ModelKey, Servable]:
        packages = {key: package for key, package in self._read().items() if package.name == name}
        if not packages and self._unreadable:
            reasons = "; ".join(self._unreadable.values())
            raise PackageError(f"model '{name}': none of its packages can be read: {reasons}")
        return packages

    def _open_packages(self, name: str, policy: VersionPolicy) -> list[OpenedPackage]:
        """Verify and return the packages that `policy` chooses. Damaged files are ignored from now on."""
        while True:
            listed = self._list(name)
            chosen = policy.choose(name, list(listed.values()))
            if not policy.specific:
                self._check_age(chosen[0])
            opened: list[OpenedPackage] = []
            try:
                for package in chosen:
                    opened.append(open_listed(package, self._trust, self.limits))
            except BaseException as error:
                for version in opened:
                    version.close()
                # A wrong signature may be an attack: no older version is served instead.
                if not isinstance(error, PackageError) or isinstance(error, SignatureError):
                    raise
                key = next(key for key, listed_one in listed.items() if listed_one is package)
                self._damaged[key[0]] = error
            else:
                return opened

    def _check_age(self, package: Servable) -> None:
        opened = tuple(self._opened)  # other models are opened meanwhile, on other threads
        newest = max(
            (version for name, version in opened if name == package.name), key=sort_key, default=None
        )
        if newest is not None and sort_key(package.version) < sort_key(newest):
            raise PackageError(
                f"{package.path}: {package.name} {package.version} is older than {newest}, which was served"
                " before; to go back, start the service again, or set specific in"
                f" [models.{package.name}]"
            )

    def _read(self) -> dict[_ModelKey, Servable]:
        """Return the models that exist now and were not rejected."""
        wholes, halved = _list_files(self._paths), _list_files(self._tails)
        servables: dict[_ModelKey, Servable] = {}
        manifests: dict[_Key, Manifest] = {}
        unreadable: dict[Path, str] = {}
        problem = None
        for path in dict.fromkeys((*wholes, *halved)):
            try:
                key, manifest = self._describe(path)
                manifests[key] = manifest
                if path in wholes:
                    servables[key, None] = Servable(manifest.name, manifest.version, path, manifest.sha256)
                if path in halved:
                    servables |= _list_tails(key, manifest)
            except PackageError as error:  # noqa: PERF203  # one that is none stops no other
                problem = error
                unreadable[path] = str(error)
                if self._unreadable.get(path) != str(error):
                    _logger.warning("%s", error)
        # Only of the files that are there now: each swap may bring another one.
        self._manifests, self._unreadable = manifests, unreadable
        if problem is not None and not servables:
            raise problem
        return {key: package for key, package in servables.items() if key not in self._rejected}

    def _describe(self, path: Path) -> tuple[_Key, Manifest]:
        status = _stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(f"cannot read package {path}: it is no file")
        key = (path, status.st_mtime_ns, status.st_ino)
        if key in self._damaged:
            raise self._damaged[key].with_traceback(None)
        manifest = self._manifests.get(key)
        if manifest is None:
            manifest = read_unverified_manifest(path, check_artifacts=False).manifest
        return key, manifest


def _list_tails(key: _Key, manifest: Manifest) -> dict[_ModelKey, Servable]:
    """Return the tails of a package with the names under which they are served."""
    artifacts = {artifact.path: artifact for artifact in manifest.artifacts}
    return {
        (key, tail.name): Servable(
            served_name(manifest.name, tail, artifacts), manifest.version, key[0], manifest.sha256, tail.name
        )
        for tail in list_tails(manifest.submodels)
    }


def _list_files(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        files += _list_packages(path) if path.is_dir() else [path]
    return files


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
