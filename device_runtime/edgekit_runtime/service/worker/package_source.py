"""A source of the packages that the service sends to a worker process."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit_runtime.package.archive import Limits
from edgekit_runtime.service.models.source import Load, Source, open_listed
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.worker_wire.messages import VerifiedPackage
from edgekit_runtime.trust.dsse import KnownDigest

if TYPE_CHECKING:
    from edgekit_runtime.encryption.container import ContentKey


class ReceivedPackages(Source):
    """A `Source` of the packages of one model, in a worker.

    Confirmed and rejected versions are recorded by the service.
    """

    __slots__ = ("_local_keys", "_name", "_packages", "limits")

    def __init__(self, name: str, limits: Limits) -> None:
        self._name, self.limits = name, limits
        self._packages: dict[str, Servable] = {}
        self._local_keys: dict[str, ContentKey] = {}

    @property
    def versions(self) -> Sequence[str]:
        """The versions that were added and not removed."""
        return tuple(self._packages)

    def add(self, package: VerifiedPackage, descriptor: int) -> None:
        """Add a package whose file is open as `descriptor`. The source owns the descriptor from now on."""
        path = Path(f"/proc/self/fd/{descriptor}")
        version = package.version
        if package.local_key is not None:
            from edgekit_runtime.encryption.container import ContentKey  # few packages are encrypted
            from edgekit_runtime.system.own_process import forbid_dumps

            forbid_dumps()
            self._local_keys[version] = ContentKey.from_text(package.local_key)
        self._packages[version] = Servable(
            self._name, version, path, package.manifest_sha256, package.submodel
        )

    def remove(self, versions: Iterable[str]) -> None:
        for version in self._packages.keys() & set(versions):
            os.close(int(self._packages.pop(version).path.name))

    def names(self) -> Sequence[str]:
        return (self._name,)

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        return policy.choose(name, list(self._packages.values()))[:1]

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Load the newest version that the policy allows, see `Source.open`."""
        return [self.open_again(package, load) for package in self.find(name, policy)]

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Check the digest of a package, and load it."""
        with open_listed(package, KnownDigest(package.sha256), self.limits) as opened:
            opened.local_key = self._local_keys.get(package.version)
            return load(opened)
