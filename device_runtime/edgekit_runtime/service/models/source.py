"""The interface of a source of packages: slots, files, or the packages passed to a worker."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import Limits, OpenedPackage, read_package
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.trust.dsse import Verifier

Load: TypeAlias = Callable[[OpenedPackage], Loaded]
"""Opens the sessions of a verified package and tests them; the package may be closed after that."""


class Source(Protocol):
    """Where packages come from. Every method may wait for the disk and for engines, so it runs on a thread.

    Attributes:
        limits: limits of reading packages.
        confirm_after_s: how long a version serves before `confirm`.
    """

    __slots__ = ()

    limits: Limits
    confirm_after_s: float = 10.0

    def names(self) -> Sequence[str]:
        """Return the names of all installed models. May be called on any thread.

        Raises:
            EdgekitError: they cannot be listed.
        """

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the packages that `open` would open now, without opening or verifying them.

        Raises:
            EdgekitError: there are none, or they cannot be listed.
        """

    def find_proven(self, _name: str) -> Servable | None:
        """Return the version that should serve while a newer version is on trial, or None; opens nothing.

        Raises:
            EdgekitError: the versions cannot be listed.
        """
        return None

    def find_trial(self, _name: str) -> str | None:
        """Return the trial requested for the newest version: `canary`, `shadow` or None.

        Raises:
            EdgekitError: the request cannot be read.
        """
        return None

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Verify each package that `policy` chooses, and return what `load` makes of them.

        The first result answers requests without a version.

        Raises:
            EdgekitError: a version fails and cannot be replaced. All opened versions are closed.
        """

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Verify a package served before, and return the result of `load`.

        Raises:
            EdgekitError: it cannot be opened any more.
        """

    def confirm(self, _name: str, _version: str) -> None:
        """Record that a version is good.

        Raises:
            UnavailableError: it cannot be recorded now.
            EdgekitError: it cannot be recorded.
        """
        return  # else it would be abstract, and most sources have no state

    def undo_start(self, _name: str, _version: str) -> bool:
        """Subtract one start from a version's count of starts. Return True if that was recorded.

        The service does this before a planned stop.
        """
        return False

    def reject(self, _name: str, _version: str, _reason: str) -> bool:
        """Record that a version fails. Return True if another version should be opened instead.

        Raises:
            EdgekitError: it cannot be recorded.
        """
        return False


def open_listed(listed: Servable, trust: Verifier, limits: Limits) -> OpenedPackage:
    """Verify and return a listed package, or its part `listed.submodel`.

    Raises:
        PackageError: the file was replaced since it was listed, or `read_package` refused it.
    """
    package = read_package(listed.path, trust, limits)
    if package.manifest.sha256 != listed.sha256:
        package.close()
        raise PackageError(f"{listed.path}: was replaced while it was being loaded; load the model again")
    return package if listed.submodel is None else package.select_submodel(listed.submodel)
