"""Chooses which versions of a model to serve, and in which order to swap them."""

from collections.abc import Sequence
from pathlib import Path

from edgekit_runtime.errors import RequestError
from edgekit_runtime.package.version_order import sort_key
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.model import ModelOptions, SwapOrder


@dataclass(frozen=True, slots=True)
class Servable:
    """A package that can be served. Its source has listed it, but has not verified it yet.

    Attributes:
        sha256: The digest of the package's manifest.
        submodel: The submodel of the package that is served. None for the whole model.
    """

    name: str
    version: str
    path: Path
    sha256: str
    submodel: str | None = None


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions are served. Requests without a version go to the newest served version.

    Attributes:
        latest: The number of newest versions to serve if `specific` is empty.
        specific: The versions to serve, or empty to serve the newest ones.
    """

    latest: int = 1
    specific: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: ModelOptions) -> "VersionPolicy":
        """Return the policy in the options of a model."""
        return cls(options.latest, options.specific)

    def ordered(self) -> tuple[str, ...]:
        """Return the versions in `specific`, the newest first."""
        return tuple(sorted(self.specific, key=sort_key, reverse=True))

    def choose(self, name: str, installed: Sequence[Servable]) -> tuple[Servable, ...]:
        """Return the packages to serve from `installed`, the newest version first.

        Raises:
            RequestError: No version is installed, or a version in `specific` is missing.
        """
        newest_first = sorted(installed, key=lambda package: sort_key(package.version), reverse=True)
        if not newest_first:
            raise RequestError(404, f"model '{name}' is not installed")
        if not self.specific:
            return tuple(newest_first[: self.latest])
        there = [package.version for package in newest_first]
        if missing := [version for version in self.specific if version not in there]:
            raise RequestError(
                404, f"model '{name}': version {missing[0]} is not installed, there are {', '.join(there)}"
            )
        return tuple(package for package in newest_first if package.version in self.specific)


def choose_order(needed_bytes: int, available_bytes: int, configured: SwapOrder) -> SwapOrder:
    """Return the order of a swap.

    Args:
        needed_bytes: The memory that the new version needs.
        available_bytes: The free memory of the machine while the old version is loaded.
        configured: The configured order. `auto` chooses the order from the free memory.

    Returns:
        `availability` to load the new version first, or `resource` to unload the old version first.
    """
    if configured != "auto":
        return configured
    return "availability" if needed_bytes <= available_bytes else "resource"
