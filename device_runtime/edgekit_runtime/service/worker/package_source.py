"""The packages that a worker process was handed, as a source of the service in it."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgekit_runtime.errors import DigestError
from edgekit_runtime.package.archive import Limits
from edgekit_runtime.service.models.source import Load, open_listed
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.worker_wire.messages import Given
from edgekit_runtime.trust.dsse import Statement, read_unverified


class _Verdict:
    """A `Verifier` of packages whose signatures the service has verified."""

    def __init__(self, manifest_sha256: str) -> None:
        self._sha256 = manifest_sha256

    def verify(self, envelope: bytes, predicate_type: str, where: str) -> tuple[Statement, str]:
        """Return what the envelope says, where it is about the package of that manifest."""
        statement, key_id = read_unverified(envelope, predicate_type, where)
        if statement.sha256 != self._sha256:
            raise DigestError(f"{where}: the file has changed since it was verified; load the model again")
        return statement, key_id


class GivenPackages:
    """A `Source` of packages of one model; what is recorded of them is the business of who gave them."""

    __slots__ = ("_given", "_name", "limits")

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self.limits = name, limits
        self._given: dict[str, tuple[Given, Path]] = {}

    @property
    def versions(self) -> Sequence[str]:
        """Those that were handed over and not removed."""
        return tuple(self._given)

    def add(self, given: Given, package: int) -> None:
        """Take in the package of a descriptor."""
        self._given[given.version] = (given, Path(f"/proc/self/fd/{package}"))

    def remove(self, versions: Iterable[str]) -> None:
        """Forget packages, where they are known."""
        for version in self._given.keys() & set(versions):
            _, path = self._given.pop(version)
            os.close(int(path.name))

    def names(self) -> Sequence[str]:
        """Return the name of the model."""
        return (self._name,)

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the newest package that was handed over."""
        packages = [
            Servable(self._name, version, path, given.manifest_sha256)
            for version, (given, path) in self._given.items()
        ]
        return policy.choose(name, packages)[:1]

    def find_proven(self, _name: str) -> Servable | None:
        """Return None: what was handed over first serves already when another comes."""
        return None

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Return the newest version, see `Source`."""
        return [self.open_again(package, load) for package in self.find(name, policy)]

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Return the model of a package, which must be the one that was handed over."""
        with open_listed(package, _Verdict(package.sha256), self.limits) as opened:
            return load(opened)

    def confirm(self, _name: str, _version: str) -> None:
        """Nothing: the service confirms."""

    def reject(self, _name: str, _version: str, _reason: str) -> bool:
        """Nothing: the service rejects, and says what comes next."""
        return False
