"""The interface of package sources, such as slots, files, or the packages passed to a worker."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import Limits, OpenedPackage, read_package
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.trust.dsse import Verifier

Load: TypeAlias = Callable[[OpenedPackage], Loaded]
"""Opens and tests the sessions of a verified package, which can then be closed."""


class Source(Protocol):
    """A source of packages. All methods may block on the disk or on engines, so call them on a thread.

    Attributes:
        limits: The limits for reading packages.
        confirm_after_s: How long a version must serve before `confirm` is called.
    """

    __slots__ = ()

    limits: Limits
    confirm_after_s: float = 10.0

    def names(self) -> Sequence[str]:
        """Return the names of all installed models. This may be called on any thread.

        Raises:
            EdgekitError: The models cannot be listed.
        """

    def find(self, name: str, policy: VersionPolicy) -> Sequence[Servable]:
        """Return the packages that `open` would open now, without opening or verifying them.

        Raises:
            EdgekitError: There are no packages, or they cannot be listed.
        """

    def find_proven(self, _name: str) -> Servable | None:
        """Return the version that should serve while a newer version is on trial, or None. Nothing is opened.

        Raises:
            EdgekitError: The versions cannot be listed.
        """
        return None

    def find_trial(self, _name: str) -> str | None:
        """Return the kind of trial requested for the newest version: `canary`, `shadow` or None.

        Raises:
            EdgekitError: The request cannot be read.
        """
        return None

    def open(self, name: str, policy: VersionPolicy, load: Load) -> list[Loaded]:
        """Verify each package that `policy` chooses, and call `load` with it.

        Returns:
            The results of `load`. The first version answers requests without a version.

        Raises:
            EdgekitError: A version failed and cannot be replaced. All opened versions are closed.
        """

    def open_again(self, package: Servable, load: Load) -> Loaded:
        """Verify a package that was served before, and return the result of `load`.

        Raises:
            EdgekitError: The package can no longer be opened.
        """

    def confirm(self, _name: str, _version: str) -> None:
        """Record that a version works.

        Raises:
            UnavailableError: It cannot be recorded at the moment.
            EdgekitError: It cannot be recorded.
        """
        return  # else it would be abstract, and most sources have no state

    def undo_start(self, _name: str, _version: str) -> bool:
        """Reduce the start count of a version by one. Return True if the new count was recorded.

        The service calls this before a planned stop.
        """
        return False

    def reject(self, _name: str, _version: str, _reason: str) -> bool:
        """Record that a version failed. Return True if another version should be opened instead.

        Raises:
            EdgekitError: It cannot be recorded.
        """
        return False


def open_listed(listed: Servable, trust: Verifier, limits: Limits) -> OpenedPackage:
    """Verify and return a listed package, or only its submodel `listed.submodel`.

    Raises:
        PackageError: The file was replaced after it was listed, or `read_package` refused it.
    """
    package = read_package(listed.path, trust, limits)
    if package.manifest.sha256 != listed.sha256:
        package.close()
        raise PackageError(f"{listed.path}: was replaced while it was being loaded; load the model again")
    return package if listed.submodel is None else package.select_submodel(listed.submodel)
