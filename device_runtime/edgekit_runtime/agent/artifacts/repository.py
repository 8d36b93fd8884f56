"""The client of the fleet's TUF repository, which holds the packages for the device class of this device.

python-tuf verifies the metadata. This module limits the size and duration of each download, and rejects
expired metadata even if the clock is behind. An error names the attack that could have caused it. The module
also passes the manager keys of each new root to `manager_keys`.

Source: The Update Framework Specification 1.0, section 5.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from edgekit_runtime.agent.artifacts.download import Downloader, HttpStatusError, SlowError
from edgekit_runtime.agent.manager_keys import FIELD, ManagerKeys
from edgekit_runtime.errors import OutputError, SignatureError, TransportError
from edgekit_runtime.records import dataclass

if TYPE_CHECKING:
    from tuf.ngclient.fetcher import FetcherInterface
    from tuf.ngclient.updater import Updater

Metadata = TypeVar("Metadata")

_FILE_TIMEOUT_S: Final = 60.0  # for one file of metadata
_MAX_ROOT_BYTES: Final = 64 << 10
_LATEST_S: Final = 1e11  # the year 5138. A thief of the manager's key can state any time


class RepositoryAttackError(SignatureError):
    """The metadata of the repository is invalid.

    Attributes:
        attack: the attack that could be the cause: `freeze`, `rollback`, `forged`, `mix-and-match`,
            `endless-data` or `malformed`.
    """

    def __init__(self, attack: str, message: str) -> None:
        super().__init__(message)
        self.attack = attack


@dataclass(frozen=True, slots=True)
class Offer:
    """A file that the repository offers.

    Attributes:
        size_bytes, sha256: expected size and digest of the file.
        custom: other metadata of the target, such as the engine that a package needs.
    """

    url: str
    size_bytes: int
    sha256: str
    custom: Mapping[str, Any]


class RepositoryClient:
    """Looks up files in the repository of the fleet. It is not thread-safe."""

    def __init__(
        self,
        folder: Path,
        url: str,
        root: str,
        downloader: Downloader,
        clock: Callable[[], float] = time.time,
        *,
        manager_keys: ManagerKeys | None = None,
    ) -> None:
        """Use the repository at `url`.

        Args:
            folder: folder for verified metadata, so that no older one is accepted later.
            url: address of the repository.
            root: the root metadata that is trusted first.
            downloader: fetches the files.
            clock: seconds since 1970.
            manager_keys: takes the keys of the manager that the root names; None for nobody.
        """
        self._folder, self._url, self._root = folder, url.rstrip("/"), root.encode()
        self._downloader, self._clock, self._manager_keys = downloader, clock, manager_keys

    def find(
        self, path: str, target: str, known_time_s: float, count: Callable[[int], None] = lambda _: None
    ) -> Offer | None:
        """Update and verify the metadata, and look up a file. Return None if there is no such file.

        Args:
            path: path of the file, `CLASS/NAME`.
            target: device class of this device. Files of other classes are not returned.
            known_time_s: lower bound of the current time, in seconds since 1970.
            count: called with the number of bytes received.

        Raises:
            RepositoryAttackError: the metadata is invalid.
            TransportError: the metadata cannot be fetched.
            OutputError: the metadata cannot be stored.
        """
        if not path.startswith(f"{target}/"):
            return None
        target_file = self._verify(known_time_s, count, lambda updater: updater.get_targetinfo(path))
        if target_file is None:
            return None
        folder, _, name = path.rpartition("/")
        sha256 = target_file.hashes["sha256"]
        url = f"{self._url}/targets/{folder}/{sha256}.{name}"
        return Offer(url, target_file.length, sha256, target_file.unrecognized_fields.get("custom", {}))

    def refresh(self, known_time_s: float, count: Callable[[int], None] = lambda _: None) -> None:
        """Update and verify the metadata. The arguments and errors are those of `find`."""
        self._verify(known_time_s, count, _refresh)

    def _verify(
        self,
        known_time_s: float,
        count: Callable[[int], None],
        look: "Callable[[Updater], Metadata]",
    ) -> Metadata:
        from tuf.api.exceptions import DownloadError, DownloadLengthMismatchError, RepositoryError
        from tuf.ngclient.config import UpdaterConfig
        from tuf.ngclient.updater import Updater

        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            updater = Updater(
                str(self._folder),
                f"{self._url}/metadata/",
                fetcher=_make_fetcher(self._downloader, count),
                config=UpdaterConfig(root_max_length=_MAX_ROOT_BYTES),
                bootstrap=self._root,
            )
            now = datetime.fromtimestamp(min(max(self._clock(), known_time_s), _LATEST_S), timezone.utc)
            updater._trusted_set.reference_time = now  # the library has no other way
            try:
                return look(updater)
            finally:  # a root counts as soon as it is verified, whatever somebody did to the other metadata
                if self._manager_keys is not None:
                    root = updater._trusted_set.root
                    self._manager_keys.follow(root.version, root.unrecognized_fields.get(FIELD))
        except RepositoryError as cause:
            attack = _name_attack(cause)
            raise RepositoryAttackError(attack, f"{self._url}: {attack}: {cause}") from cause
        except DownloadLengthMismatchError as cause:
            raise RepositoryAttackError("endless-data", f"{self._url}: endless-data: {cause}") from cause
        except DownloadError as cause:
            if isinstance(cause.__cause__, (SlowError, RepositoryAttackError)):
                raise cause.__cause__ from cause
            raise TransportError(f"{self._url}: {cause.__cause__ or cause}") from cause
        except OSError as cause:
            raise OutputError(f"cannot write {self._folder}: {cause.strerror}") from cause


def _refresh(updater: "Updater") -> None:
    updater.refresh()


def _make_fetcher(downloader: Downloader, count: Callable[[int], None]) -> "FetcherInterface":
    """Return python-tuf's interface over our downloads; made here, since tuf is imported only when needed."""
    from tuf.api.exceptions import DownloadHTTPError
    from tuf.ngclient.fetcher import FetcherInterface

    class BoundedFetcher(FetcherInterface):
        def _fetch(self, url: str) -> Iterator[bytes]:
            pieces = downloader.read(url, _FILE_TIMEOUT_S, count)
            try:
                first = next(pieces, b"")
            except HttpStatusError as cause:
                raise DownloadHTTPError(str(cause), cause.status) from cause

            def rest() -> Iterator[bytes]:
                with contextlib.closing(pieces):  # type: ignore[type-var]  # a generator
                    yield first
                    yield from pieces

            return rest()

    return BoundedFetcher()


def _name_attack(error: Exception) -> str:
    from tuf.api import exceptions

    names = (
        (exceptions.ExpiredMetadataError, "freeze"),
        (exceptions.BadVersionNumberError, "rollback"),
        (exceptions.UnsignedMetadataError, "forged"),
        (exceptions.LengthOrHashMismatchError, "mix-and-match"),
    )
    return next((name for kind, name in names if isinstance(error, kind)), "malformed")
