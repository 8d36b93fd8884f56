"""The manager's own key, which signs the documents for devices and is named in the root of the repository.

The private key is stored with the keys of the repository, as the role `manager`. During a rotation, both the
old and the next key exist, and the root determines which of them signs.
"""

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgekit_fleet.releases.repository_keys import MANAGER_ROLE, RepositoryKeys
from edgekit_fleet.store import audit
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.shards import count_living
from edgekit_fleet.store.tables import AuditRow
from edgekit_runtime.agent.manager_keys import read_named
from edgekit_runtime.agent.signing import key_id
from edgekit_runtime.errors import ConfigError, FleetError, PackageError, SignatureError

_EXCHANGED: Final = "keys.rotate"


class ManagerKey:
    """The key that signs desired documents. `read` detects that another process has replaced the key.

    Attributes:
        version: The version of the TUF root that names the key, or 0 before the first `read`.
    """

    def __init__(self, folder: FleetFolder) -> None:
        """Use the keys and the repository of a fleet. They are read by `read`."""
        self._repository, self._keys = folder.repository, RepositoryKeys(folder.repository_keys)
        self.version = 0
        self._key: Ed25519PrivateKey | None = None

    def read(self) -> Ed25519PrivateKey:
        """Return the private key that the newest root names.

        The key is only read again if there is a newer root than in the last call.

        Raises:
            PackageError: There is no root, or it cannot be read.
            SignatureError: The folder does not contain the key that the root names.
        """
        version = _find_root(self._repository, self.version)
        if self._key is None or version != self.version:
            self._key, self.version = self._find(version), version
        return self._key

    def _find(self, version: int) -> Ed25519PrivateKey:
        named = read_named(_read_root(self._repository, version))
        for key in self._keys.list_private(MANAGER_ROLE):
            if key_id(key.public_key()) in named:
                return key
        root = _root_path(self._repository, version)
        raise SignatureError(
            f"{root} names no key of the manager that {self._keys.folder} holds; restore both from a backup,"
            " or make a new key: `edgekit fleet keys rotate manager`"
        )


def check_copies(session: Session, folder: FleetFolder, now: float) -> None:
    """Check that no other manager is running. Other managers have copies of the manager's key.

    Call this before the key is rotated. `now` is in seconds since 1970.

    Raises:
        FleetError: Other managers are running.
    """
    further = count_living(session, now) - folder.is_running
    if further > 0:
        raise FleetError(
            f"{further} further managers run, each with a copy of the manager's key; stop the further ones,"
            " exchange the key, and give each a new copy of the folder before it starts again"
        )


def record_exchange(session: Session, actor: str, roles: str, key: ManagerKey | None) -> None:
    """Write a rotation of keys to the audit log.

    Args:
        session: The session of a transaction.
        actor: The actor who rotated the keys.
        roles: The roles whose keys were rotated, as one string.
        key: The manager's new key after a call of `read`, or None if the manager's key was not rotated.
    """
    audit.record(session, actor, _EXCHANGED, roles, **({} if key is None else {"root": key.version}))


def check_newest(session: Session, key: ManagerKey) -> None:
    """Check that the manager's key was not rotated by a manager with another folder.

    Raises:
        ConfigError: The key was rotated, so devices refuse signatures with this folder's key.
    """
    statement = select(AuditRow.detail).where(AuditRow.action == _EXCHANGED).order_by(AuditRow.number.desc())
    root = next((detail["root"] for detail in session.scalars(statement) if "root" in detail), 0)
    if key.version < root:
        raise ConfigError(
            f"the manager's key in this folder is that of root {key.version}, and was exchanged by root"
            f" {root}: devices refuse what it signs; restore a new backup of the first manager's folder here,"
            " or exchange the key there: `edgekit fleet keys rotate manager`"
        )


def read_newest_root(repository: Path) -> str:
    """Return the newest root of a repository, as JSON. A new device trusts this root.

    Raises:
        PackageError: There is no root, or it cannot be read.
    """
    return _read_root(repository, _find_root(repository, 0))


def _find_root(repository: Path, version: int) -> int:
    """Return the version of the newest root. `version` is an existing version, or 0."""
    folder = repository / "metadata"
    if not version:
        names = (path.name.split(".")[0] for path in folder.glob("*.root.json"))
        version = max((int(name) for name in names if name.isdigit()), default=0)
    if not version:
        raise PackageError(f"{repository} has no root; restore it from a backup")
    while _root_path(repository, version + 1).exists():
        version += 1
    return version


def _root_path(repository: Path, version: int) -> Path:
    return repository / "metadata" / f"{version}.root.json"


def _read_root(repository: Path, version: int) -> str:
    path = _root_path(repository, version)
    try:
        return path.read_text()
    except (OSError, ValueError) as cause:
        raise PackageError(f"cannot read {path}: {cause}; restore it from a backup") from cause
