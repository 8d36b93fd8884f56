"""The manager keys that this device trusts. The newest TUF root that the device has verified names them.

The root is signed by its own keys, which may be kept offline. Therefore neither the fleet's server nor a
thief of a manager key can change the trusted keys. A device begins with the root from its enrolment. The
process that downloads newer roots writes their manager keys to `manager-keys.json` in the agent's folder. The
agent reads this file, so that it need not load a TUF library.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from edgekit_runtime.agent.documents import Desired
from edgekit_runtime.agent.signing import key_id, unseal
from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.dataclass_json import Range, from_json, to_plain
from edgekit_runtime.errors import ConfigError, SignatureError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, write_atomically

FIELD: Final = "x-edgekit-manager-keys"
"""The field of the TUF root with the manager's keys by key id, in the form of `keys`."""
_FILE: Final = "manager-keys.json"
_KEY: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeyFile:
    """Content of the file.

    Attributes:
        first_root_sha256: digest of the root from which this one was reached; another fleet has another one.
        version: version of the root that names the keys.
        keys: the keys, 64 hexadecimal digits each.
    """

    first_root_sha256: str
    version: Annotated[int, Range(1, 1 << 53)]
    keys: tuple[str, ...]


class ManagerKeys:
    """The public keys of the manager. This device obeys the documents that are signed with them.

    The newest verified root of the repository names the keys.
    """

    def __init__(self, folder: Path, first_root: str, disk: Disk = DISK) -> None:
        """Use the file in the agent's folder.

        `first_root`: content of the root that the device got when it enrolled.
        """
        self._path, self._first_root, self._disk = folder / _FILE, first_root, disk
        self._first_root_sha256 = hashlib.sha256(first_root.encode()).hexdigest()

    def read(self) -> dict[str, Ed25519PublicKey]:
        """Return a dict from key id to key. It is empty if the root names no key, or the file is damaged."""
        followed = self._read_file()
        return read_named(self._first_root) if followed is None else _load(followed.keys)

    def follow(self, version: int, named: object) -> None:
        """Trust exactly the keys that a verified root names. Ignore a root older than the last root.

        Args:
            version: version of the root.
            named: content of the field `FIELD` of the root, or None if the field is missing.

        Raises:
            OutputError: the file cannot be written.
        """
        before = self._read_file()
        followed = _KeyFile(
            first_root_sha256=self._first_root_sha256, version=version, keys=_list_keys(named)
        )
        if before == followed or (before is not None and before.version > version):
            return
        with write_atomically(self._path, mode=0o600, disk=self._disk) as file:
            file.write(encode_json(to_plain(followed)))

    def _read_file(self) -> _KeyFile | None:
        """Return the file's content, no keys if it is damaged; None if it is missing or of another fleet.

        A damaged file may have named a new key, and the one of the first root may be stolen.
        """
        nobody = _KeyFile(first_root_sha256=self._first_root_sha256, version=1, keys=())
        try:
            followed = from_json(_KeyFile, self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            return None
        except (OSError, ConfigError) as error:
            _logger.warning("%s: %s; nobody is obeyed until the metadata is verified", self._path, error)
            return nobody
        if not all(_KEY.fullmatch(key) for key in followed.keys):
            return nobody
        return followed if followed.first_root_sha256 == self._first_root_sha256 else None


def read_held(envelope: str, keys: Mapping[str, Ed25519PublicKey]) -> Desired | None:
    """Return the verified document of the journal, or None if it is missing or not signed by a key in `keys`.

    `envelope` is the field `desired` of the journal. `keys` is a dict from key id to public key.
    """
    if not envelope:
        return None
    try:
        return unseal(envelope.encode(), "desired", Desired, keys, "the journal's document")
    except SignatureError as error:
        _logger.warning("%s", error)
        return None


def read_named(root: str) -> dict[str, Ed25519PublicKey]:
    """Return the manager keys that a root names, as a dict from key id to key.

    The signatures of the root are not verified. If the text is not a root, the result is empty.
    """
    try:
        named = json.loads(root)["signed"][FIELD]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return _load(_list_keys(named))


def _load(keys: tuple[str, ...]) -> dict[str, Ed25519PublicKey]:
    public = [Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)) for key in keys]
    return {key_id(key): key for key in public}


def _list_keys(named: Any) -> tuple[str, ...]:
    """Return the Ed25519 keys in the field of a root, 64 hexadecimal digits each; others are left out."""
    keys = []
    for entry in named.values() if isinstance(named, dict) else ():
        with contextlib.suppress(KeyError, TypeError):
            if entry["keytype"] == "ed25519" and _KEY.fullmatch(entry["keyval"]["public"]):
                keys.append(entry["keyval"]["public"])
    return tuple(sorted(keys))
