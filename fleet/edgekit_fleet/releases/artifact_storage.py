"""Copies the TUF repository to an object store, from which devices or a CDN download it.

In the repository, only `metadata/timestamp.json` ever changes, and it refers to the other files. It is read
before the other files are listed, and is copied last. So devices see either the old or the new repository,
even if a copy is interrupted or two processes copy at the same time.
"""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edgekit_runtime.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TIMESTAMP: Final = "metadata/timestamp.json"
IMMUTABLE: Final = "public, max-age=31536000, immutable"
CHANGING: Final = "no-cache"
_SCHEMES: Final = ("s3://", "gs://", "az://", "file://")
_RETRY: Final[Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class ArtifactStorage:
    """A bucket, or a folder on a web server. The names of files are their paths in the repository.

    Attributes:
        url: The URL without credentials.
    """

    def __init__(self, url: str) -> None:
        """Prepare the storage, without a request.

        Args:
            url: `s3://BUCKET/PREFIX`, `gs://`, `az://` or `file:///FOLDER`. Credentials, region and endpoint
                are read from the environment, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL.

        Raises:
            ConfigError: The URL is malformed, or obstore is missing.
        """
        self.url = url
        self._store = _open(url)
        self._copied: bytes | None = None

    def copy(self, repository: Path) -> int:
        """Copy the missing files of a repository to the storage. Return the number of copied files.

        Raises:
            OutputError: The storage cannot be reached or refuses a file. Try again.
        """
        import obstore
        from obstore.exceptions import BaseError

        copied = 0
        try:
            # Another process may publish meanwhile: then its timestamp follows too, and is the last one.
            while (timestamp := (repository / TIMESTAMP).read_bytes()) != self._copied:
                there = {item["path"]: item["size"] for page in obstore.list(self._store) for item in page}
                for path in list_files(repository):
                    name = path.relative_to(repository).as_posix()
                    try:
                        size_bytes = path.stat().st_size
                    except FileNotFoundError:  # no metadata names it any more, and it was just deleted
                        continue
                    if there.get(name) != size_bytes:
                        self.put(name, path, IMMUTABLE)
                        copied += 1
                self.put(TIMESTAMP, timestamp, CHANGING)
                copied += 1
                self._copied = timestamp
        except (BaseError, OSError) as cause:
            first = str(cause).partition("\n")[0]
            raise OutputError(
                f"the repository is signed here, but cannot be copied to {self.url}: {first};"
                " check address and credentials, then run the same command again"
            ) from cause
        return copied

    def remove(self, name: str) -> None:
        """Delete a file, if it exists.

        Raises:
            OutputError: The storage cannot be reached or refuses the request. Try again.
        """
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as cause:
            first = str(cause).partition("\n")[0]
            raise OutputError(f"cannot delete {name} of {self.url}: {first}") from cause

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist.

        Raises:
            OutputError: The storage cannot be reached or refuses the request. Try again.
        """
        import obstore
        from obstore.exceptions import BaseError

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as cause:
            first = str(cause).partition("\n")[0]
            raise OutputError(f"cannot read {name} of {self.url}: {first}") from cause

    def write(self, name: str, content: bytes, cache: str) -> None:
        """Store a file. `cache` is the value of the `Cache-Control` header with which a bucket serves it.

        Raises:
            OutputError: The storage cannot be reached or refuses the request. Try again.
        """
        from obstore.exceptions import BaseError

        try:
            self.put(name, content, cache)
        except (BaseError, OSError) as cause:
            first = str(cause).partition("\n")[0]
            raise OutputError(f"cannot write {name} to {self.url}: {first}") from cause

    def put(self, name: str, content: bytes | Path, cache: str) -> None:
        import obstore

        attributes: Any = None if self.url.startswith("file:") else {"Cache-Control": cache}
        obstore.put(self._store, name, content, attributes=attributes)


def list_files(repository: Path) -> list[Path]:
    """Return the paths of a repository's files, in the order in which they are copied.

    Each path begins with `repository`. The targets come first, then the metadata except `timestamp.json`.
    """
    targets = sorted(path for path in (repository / "targets").rglob("*") if path.is_file())
    metadata = sorted(path for path in (repository / "metadata").glob("*.json"))
    return [path for path in (*targets, *metadata) if path.name[0] != "." and path.name != "timestamp.json"]


def _open(url: str) -> "ObjectStore":
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"artifacts storage is {url!r}, expected one of {', '.join(_SCHEMES)}...")
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ModuleNotFoundError as cause:
        raise ConfigError(
            f"to copy artifacts to {url}, install {cause.name}: pip install edgekit[object-storage]"
        ) from cause
    try:
        if url.startswith("file://"):
            return LocalStore(url.removeprefix("file://"), mkdir=True)
        return from_url(url, retry_config=_RETRY)
    except (BaseError, ValueError) as cause:
        raise ConfigError(f"artifacts storage {url}: {cause}") from cause
