"""The TUF repository: a folder of signed metadata and packages that any web server can serve.

    metadata/1.root.json ... N.root.json     the keys of all roles and of the manager, with all old versions
                                             for devices that have missed updates
    metadata/V.targets.json                  delegates `CLASS/*` to the role `class-CLASS`, lists no file
    metadata/V.class-CLASS.json              the packages and deltas of one device class
    metadata/V.snapshot.json, timestamp.json
    targets/CLASS/SHA256.NAME                a package or delta

Every changed file gets a new name, except `timestamp.json`, which is replaced last. So if the process is
killed, either the old or the new repository remains. Once a day, `remove_unused` deletes files that no
metadata of the last day names, except versions of the root.

A version is the time in seconds since 1970, or the last version plus one if that is higher. So metadata that
is restored from an old backup and signed again is newer than all metadata that devices have seen. Only the
versions of the root are counted one by one, as TUF requires.

Source: The Update Framework Specification 1.0.34, sections 3, 5 and 6; consistent snapshots, section 6.2.
"""

import contextlib
import fcntl
import hashlib
import itertools
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Final, TypeVar

from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]  # has no __all__
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (  # type: ignore[attr-defined]  # names of another module
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from edgekit_fleet.releases.artifact_storage import ArtifactStorage
from edgekit_fleet.releases.repository_keys import (
    MANAGER_ROLE,
    RepositoryKeys,
    make_root_keys,
    read_root_signers,
)
from edgekit_fleet.store.fleet_folder import FleetFolder
from edgekit_fleet.store.future import CLOCK_STEP_S
from edgekit_runtime.agent import trusted_time
from edgekit_runtime.agent.manager_keys import FIELD
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import OutputError, PackageError, SignatureError
from edgekit_runtime.system.atomic_files import DISK, Disk, hash_file, make_folders, write_atomically

ONLINE_ROLES: Final = ("targets", "snapshot", "timestamp")
_CLASS_ROLE: Final = "class-"
_DAY_S: Final = 86_400.0
_GRACE_S: Final = _DAY_S  # time for downloads that began before their file was withdrawn
_REMOVABLE: Final = re.compile(
    r"metadata/\d+\.(snapshot|targets|class-[^/]+)\.json|targets/[^/]+/[0-9a-f]{64}\.[^/]+"
)
"""The names of files that `remove_unused` may delete: targets, and metadata except root and timestamp."""

Signed = TypeVar("Signed", Root, Targets, Snapshot, Timestamp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The lifetimes of metadata in seconds. `refresh` signs metadata again after half of its lifetime.

    Attributes:
        timestamp_s: The lifetime of the timestamp. An attacker can hide a new release from a device for at
            most this time.
        snapshot_s, targets_s, root_s: The lifetimes of the other roles.
    """

    timestamp_s: float = _DAY_S
    snapshot_s: float = 14 * _DAY_S
    targets_s: float = 180 * _DAY_S
    root_s: float = 730 * _DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTarget:
    """A file that devices of one class may download.

    Attributes:
        device_class: The device class, such as `x86-64`.
        name: The name of the file, without a folder.
        source: The path of the file, which is copied.
        custom: Additional fields of its metadata, besides size and digest.
    """

    device_class: str
    name: str
    source: Path
    custom: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path in the repository, `CLASS/NAME`."""
        return f"{self.device_class}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTarget:
    """A file in the repository.

    Attributes:
        path: The path, `CLASS/NAME`.
        size_bytes, sha256: The size and SHA-256 of the file.
        custom: See `NewTarget`.
    """

    path: str
    size_bytes: int
    sha256: str
    custom: Mapping[str, JsonValue]


class TufRepository:
    """The repository in a folder. Several processes may change it, since each change locks and rereads it."""

    def __init__(
        self,
        folder: Path,
        keys: Path,
        *,
        storage: ArtifactStorage | None = None,
        lifetimes: Lifetimes | None = None,
        disk: Disk = DISK,
    ) -> None:
        """Use the repository in `folder`.

        Args:
            folder: The folder that the web server serves.
            keys: The folder with the private keys of targets, snapshot, timestamp and the classes.
            storage: A storage to which each change is copied for devices, or None.
            lifetimes: The lifetimes of metadata that is signed from now on.
            disk: Carries out the steps of each change.
        """
        self.folder = folder
        self._keys = RepositoryKeys(keys, disk)
        self._storage = storage
        self._lifetimes = lifetimes or Lifetimes()
        self._disk = disk

    @property
    def exists(self) -> bool:
        """Whether the repository was completely created."""
        return (self.folder / "metadata" / "timestamp.json").exists()

    def create(
        self, now: float, *, root_keys: int = 1, threshold: int = 1, root_folder: Path | None = None
    ) -> None:
        """Create an empty repository with new keys, or complete one whose creation was interrupted.

        A complete repository is not changed.

        Args:
            now: The time in seconds since 1970.
            root_keys: The number of keys of the root.
            threshold: The number of these keys that must sign a root.
            root_folder: The folder for the keys of the root, by default the folder of the other keys. The
                keys of the root can be moved away later.

        Raises:
            OutputError: A folder cannot be written.
            ValueError: The threshold is less than one or larger than the number of keys.
        """
        if not 1 <= threshold <= root_keys:
            raise ValueError(f"threshold is {threshold}, expected 1 to {root_keys}, the number of keys")
        root_folder = root_folder or self._keys.folder
        for folder in (self.folder / "metadata", self.folder / "targets"):
            make_folders(folder, disk=self._disk)
        for folder in (self._keys.folder, root_folder):
            make_folders(folder, 0o700, self._disk)
        with self._change():
            if self.exists:
                return
            if not self._root_versions():
                missing = root_keys - len(read_root_signers(root_folder))
                make_root_keys(root_folder, max(missing, 0), self._disk)
                signers = read_root_signers(root_folder)
                root = Root(consistent_snapshot=True)
                for signer in signers:
                    root.add_key(signer.public_key, "root")
                root.roles["root"].threshold = threshold
                for role in ONLINE_ROLES:
                    root.add_key(self._keys.current(role).public_key, role)
                name_manager(root, self._keys.current(MANAGER_ROLE))
                self._sign_root(root, signers, now)
            targets = Targets(delegations=Delegations({}, {}))
            self._commit({"targets": targets}, now)

    def publish(self, targets: Sequence[NewTarget], now: float) -> tuple[PublishedTarget, ...]:
        """Publish files for the devices of their classes, all at once.

        Args:
            targets: The files to publish. Files that already exist with the same content are kept.
            now: The time in seconds since 1970.

        Returns:
            The published targets.

        Raises:
            PackageError: A file with other content has the path of a target, or a name is malformed.
            OutputError: The folder cannot be written.
            SignatureError: A key is missing.
        """
        with self._change():
            published = [(target, self._add_file(target)) for target in targets]
            top, roles = self._read_targets()
            changed: dict[str, Targets] = {}
            for target, file in published:
                role = _CLASS_ROLE + target.device_class
                listed = changed.get(role) or roles.get(role) or Targets()
                there = listed.targets.get(target.path)
                if there is None:
                    listed.targets[target.path] = file
                    changed[role] = listed
                elif there.hashes != file.hashes:
                    raise PackageError(_describe_conflict(target.path, there, file))
            if changed:
                self._commit(self._delegate(top, changed), now)
        return tuple(_describe(file) for _, file in published)

    def withdraw(self, paths: Collection[str] | Callable[[], Collection[str]], now: float) -> None:
        """Stop publishing the files at these paths. Devices keep what they have installed.

        Args:
            paths: The paths `CLASS/NAME`, or a function that returns them. The function is called while the
                repository is locked.
            now: The time in seconds since 1970.

        Raises:
            OutputError: The folder cannot be written.
            SignatureError: A key is missing.
        """
        with self._change():
            if callable(paths):
                paths = paths()
            _, roles = self._read_targets()
            changed = {
                role: listed for role, listed in roles.items() if not listed.targets.keys().isdisjoint(paths)
            }
            for listed in changed.values():
                for path in listed.targets.keys() & set(paths):
                    del listed.targets[path]
            if changed:
                self._commit(changed, now)

    def list_targets(self) -> dict[str, PublishedTarget]:
        """Return the targets that devices can download, by path.

        Raises:
            PackageError: The repository cannot be read.
        """
        _, roles = self._read_targets()
        files = (file for listed in roles.values() for file in listed.targets.values())
        return {file.path: _describe(file) for file in files}

    def read_root(self, version: int = 1) -> bytes:
        """Return the signed JSON of a version of the root.

        Raises:
            PackageError: The root cannot be read.
        """
        return self._read_bytes(f"{version}.root.json")

    def refresh(self, now: float) -> bool:
        """Sign metadata again after half of its lifetime. Return True if any was signed.

        Metadata with too long a lifetime is signed again as well. The root is never signed here, since its
        keys may be offline. `read_expiries` returns when the root expires.

        Args:
            now: The time in seconds since 1970.

        Raises:
            OutputError: The folder cannot be written.
            SignatureError: A key is missing.
        """
        with self._change():
            self._finish_exchanges(self._read_root().signed)
            top, roles = self._read_targets()
            due = {
                role: listed
                for role, listed in {"targets": top, **roles}.items()
                if _is_due(listed, self._lifetimes.targets_s, now)
            }
            snapshot = self._read("snapshot", Snapshot)
            if due or _is_due(snapshot, self._lifetimes.snapshot_s, now):
                self._commit(due, now)
                return True
            timestamp = self._read_timestamp()
            if not _is_due(timestamp, self._lifetimes.timestamp_s, now):
                return False
            self._write_timestamp(timestamp.snapshot_meta, timestamp.version, now)
            return True

    def remove_unused(self, now: float) -> int:
        """Delete unused files from the folder of the repository and from the storage.

        A file is unused if it is older than a day and no metadata of the last day names it. All versions of
        the root are kept, since devices may need them. Files that are only in the storage are kept too. If
        the folder was restored from a backup, they may belong to newer releases.

        Args:
            now: The time in seconds since 1970.

        Returns:
            The number of files that were deleted from the folder.

        Raises:
            PackageError: The repository cannot be read.
            OutputError: A file cannot be deleted. Try again.
        """
        with self.lock():  # also while the storage is cleaned: nothing may be published that is just deleted
            before = now - _GRACE_S
            named_files = self._list_named(before)
            removed = 0
            for path in sorted(self.folder.glob("*/**/*")):
                name = path.relative_to(self.folder).as_posix()
                if name in named_files or not _REMOVABLE.fullmatch(name):
                    continue
                try:
                    if path.stat().st_mtime >= before:
                        continue
                    if self._storage is not None:  # first: only what is here is looked for there
                        self._storage.remove(name)
                    self._disk.remove(path)
                    removed += 1
                except OSError as cause:
                    raise OutputError(f"cannot delete {path}: {cause.strerror}") from cause
        return removed

    def _list_named(self, since: float) -> set[str]:
        """Return the files that snapshots name which were valid after `since`, and these snapshots."""
        current = self._read_timestamp().snapshot_meta.version
        names = (path.name.split(".") for path in (self.folder / "metadata").glob("*.snapshot.json"))
        versions = sorted(int(name[0]) for name in names if name[0].isdigit())
        # A version is the time of its signature, and the older one is valid until then.
        replaced_at = dict(itertools.pairwise(versions))
        named: set[str] = set()
        for version in versions:
            if version != current and replaced_at.get(version, version) < since:
                continue
            snapshot = f"{version}.snapshot.json"
            named.add(f"metadata/{snapshot}")
            for role, meta in self._parse(snapshot, Snapshot).signed.meta.items():
                metadata = f"{meta.version}.{role}"
                if f"metadata/{metadata}" not in named:
                    named.add(f"metadata/{metadata}")
                    listed = self._parse(metadata, Targets).signed.targets.values()
                    named |= {name_target_file(file.path, file.hashes["sha256"]) for file in listed}
        return named

    def pack_metadata(self, now: float, expires_at: float) -> dict[str, bytes]:
        """Return the metadata files for devices without a network, by path in the repository.

        The timestamp is signed again and valid until `expires_at`. Until then, whoever transports the files
        can hide newer releases from the devices.

        Args:
            now: The time in seconds since 1970.
            expires_at: The time of expiry, in seconds since 1970.

        Raises:
            PackageError: The repository cannot be read.
            SignatureError: A key is missing.
        """
        self.refresh(now)
        with self._change():
            snapshot, timestamp = self._read("snapshot", Snapshot), self._read_timestamp()
            names = [f"{version}.root.json" for version in self._root_versions()]
            names += [f"{snapshot.version}.snapshot.json"]
            names += [f"{meta.version}.{name}" for name, meta in snapshot.meta.items()]
            # A higher number than that of the timestamp that devices may have, which is valid for a day only.
            timestamp.version += 1
            timestamp.expires = _expiry(expires_at, 0.0)
            self._write_timestamp(timestamp.snapshot_meta, timestamp.version, now)
            metadata = Metadata(timestamp)
            for signer in self._keys.signers("timestamp"):
                metadata.sign(signer, append=True)
            files = {f"metadata/{name}": self._read_bytes(name) for name in names}
            return {**files, "metadata/timestamp.json": metadata.to_bytes(JSONSerializer(compact=True))}

    def read_expiries(self) -> dict[str, tuple[float, float]]:
        """Return a dict from role to its time of expiry, in seconds since 1970, and its lifetime in seconds.

        Raises:
            PackageError: The repository cannot be read.
        """
        top, classes = self._read_targets()
        lifetimes = self._lifetimes
        documents: dict[str, tuple[Root | Snapshot | Timestamp | Targets, float]] = {
            "root": (self._read_root().signed, lifetimes.root_s),
            "snapshot": (self._read("snapshot", Snapshot), lifetimes.snapshot_s),
            "timestamp": (self._read_timestamp(), lifetimes.timestamp_s),
        }
        for role, listed in {"targets": top, **classes}.items():
            documents[role] = listed, lifetimes.targets_s
        return {role: (signed.expires.timestamp(), life_s) for role, (signed, life_s) in documents.items()}

    def rotate(
        self,
        now: float,
        *,
        roles: Collection[str],
        root_folder: Path | None = None,
        root_keys: int = 1,
        threshold: int = 1,
    ) -> None:
        """Rotate the keys of roles, and sign a new root. Call this again after an interruption.

        Until the new root names a role's new key, the role's metadata is signed with the old and the new key,
        so devices with either root accept it. The manager's key is replaced at once by the new root.

        Args:
            now: The time in seconds since 1970.
            roles: `root`, `targets`, `snapshot`, `timestamp`, `class-CLASS`, `manager`. If empty, the root is
                only signed again.
            root_folder: The folder of the root's old and new keys, by default the folder of all other keys.
            root_keys: The number of keys of the new root, if `roles` contains `root`.
            threshold: The number of these keys that must sign a later root.

        Raises:
            SignatureError: Too few keys of the root are in its folder, or a file is not a key.
            OutputError: The folder or the storage cannot be written. If the storage cannot be written,
                nothing was changed.
            ValueError: A role is unknown.
        """
        root_folder = root_folder or self._keys.folder
        if self._storage is not None:
            # Else the manager would sign by a root that devices cannot fetch, and they would refuse that.
            self._storage.copy(self.folder)
        with self._change():
            top, listed = self._read_targets()
            known_roles = ("root", *ONLINE_ROLES, MANAGER_ROLE, *listed)
            if unknown := sorted(set(roles) - set(known_roles)):
                raise ValueError(f"no role {', '.join(unknown)}, there are: {', '.join(known_roles)}")
            root = self._read_root().signed
            signers = read_root_signers(root_folder)
            self._check_root_signers(root, signers, root_folder)
            self._finish_exchanges(root)
            self._finish_class_exchanges(listed)
            online = [role for role in ONLINE_ROLES if role in roles]
            classes = {role: listed[role] for role in roles if role.startswith(_CLASS_ROLE)}
            for role in (*online, *classes):  # not keys that an exchange left long ago: a thief may have them
                self._keys.renew_next(role)
            self._commit({**self._delegate(top, classes, exchange=True), "targets": top}, now)
            self._finish_class_exchanges(classes)
            for role in online:
                _replace_keys(root, role, [self._keys.next(role)])
            if MANAGER_ROLE in roles:
                name_manager(root, self._keys.renew_next(MANAGER_ROLE))
            if "root" in roles:
                fresh = make_root_keys(root_folder, root_keys, self._disk)
                _replace_keys(root, "root", fresh)
                root.roles["root"].threshold = threshold
                signers = (*signers, *fresh)
            root.version += 1
            self._sign_root(root, signers, now)
            self._finish_exchanges(root)

    def _finish_class_exchanges(self, roles: Iterable[str]) -> None:
        for role in roles:
            self._keys.finish_exchange(role, frozenset(self._read_role_keys(role)))

    def _finish_exchanges(self, root: Root) -> None:
        """Drop the old keys of the roles whose next keys the root names."""
        for role in ONLINE_ROLES:
            self._keys.finish_exchange(role, frozenset(root.roles[role].keyids))
        self._keys.finish_exchange(MANAGER_ROLE, frozenset(root.unrecognized_fields.get(FIELD, {})))

    def _check_root_signers(self, root: Root, signers: Sequence[CryptoSigner], folder: Path) -> None:
        role = root.roles["root"]
        there = sum(signer.public_key.keyid in role.keyids for signer in signers)
        if there < role.threshold:
            raise SignatureError(
                f"{folder} holds {there} keys of the root, {role.threshold} must sign; bring the folder with"
                " the offline keys"
            )

    # Reading

    def _read_bytes(self, name: str) -> bytes:
        path = self.folder / "metadata" / name
        try:
            return path.read_bytes()
        except OSError as cause:
            raise PackageError(
                f"cannot read {path}: {cause.strerror}; is the repository complete?"
            ) from cause

    def _parse(self, name: str, kind: type[Signed]) -> Metadata[Signed]:
        try:
            metadata = Metadata[Signed].from_bytes(self._read_bytes(name))
        except RepositoryError as cause:
            raise PackageError(
                f"{self.folder / 'metadata' / name}: {cause}; restore it from a backup"
            ) from cause
        if not isinstance(metadata.signed, kind):
            raise PackageError(f"{self.folder / 'metadata' / name}: is no {kind.__name__}")
        return metadata

    def _root_versions(self) -> list[int]:
        names = (path.name.split(".") for path in (self.folder / "metadata").glob("*.root.json"))
        return sorted(int(name[0]) for name in names if name[0].isdigit())

    def _read_root(self) -> Metadata[Root]:
        return self._parse(f"{max(self._root_versions(), default=1)}.root.json", Root)

    def _read_timestamp(self) -> Timestamp:
        return self._parse("timestamp.json", Timestamp).signed

    def _read(self, role: str, kind: type[Signed]) -> Signed:
        """Return the metadata of a role that `timestamp.json` leads to."""
        meta = self._read_timestamp().snapshot_meta
        if role != "snapshot":
            meta = self._parse(f"{meta.version}.snapshot.json", Snapshot).signed.meta[f"{role}.json"]
        return self._parse(f"{meta.version}.{role}.json", kind).signed

    def _read_targets(self) -> tuple[Targets, dict[str, Targets]]:
        """Return the top role, and the role of each class."""
        version = self._read_timestamp().snapshot_meta.version
        meta = self._parse(f"{version}.snapshot.json", Snapshot).signed.meta
        roles = {
            name.removesuffix(".json"): self._parse(f"{entry.version}.{name}", Targets).signed
            for name, entry in meta.items()
        }
        return roles.pop("targets"), roles

    def _read_role_keys(self, role: str) -> list[str]:
        delegations = self._read("targets", Targets).delegations
        assert delegations is not None and delegations.roles is not None  # noqa: S101 - `_delegate` made both
        return delegations.roles[role].keyids

    # Writing

    def _add_file(self, target: NewTarget) -> TargetFile:
        """Copy a file into the repository, and return its metadata."""
        for label in (target.device_class, target.name):
            if not label or label.startswith(".") or set(label) & set("/\\*?["):
                raise PackageError(f"{target.path}: {label!r} is no name of a class or file in a repository")
        try:
            digest, size_bytes = hash_file(target.source), target.source.stat().st_size
        except OSError as cause:
            raise PackageError(f"cannot read {target.source}: {cause.strerror}") from cause
        path = self.folder / name_target_file(target.path, digest)
        make_folders(path.parent, disk=self._disk)
        if not path.exists():
            with (
                write_atomically(path, mode=0o644, disk=self._disk) as file,
                target.source.open("rb") as source,
            ):
                shutil.copyfileobj(source, file, 1 << 20)
            if hash_file(path) != digest:
                self._disk.remove(path)
                raise PackageError(f"{target.source} changed while it was copied; try again")
        custom = {"custom": dict(target.custom)} if target.custom else {}
        return TargetFile(size_bytes, {"sha256": digest}, target.path, custom)

    def _delegate(
        self, top: Targets, changed: Mapping[str, Targets], *, exchange: bool = False
    ) -> dict[str, Targets]:
        """Return the metadata to sign so that `top` delegates to the changed roles of classes."""
        delegations = top.delegations
        assert delegations is not None and delegations.roles is not None  # noqa: S101 - `create` made both
        result = dict(changed)
        for role in changed:
            if role in delegations.roles and not exchange:
                continue
            if role not in delegations.roles:
                paths = [f"{role.removeprefix(_CLASS_ROLE)}/*"]
                delegations.roles[role] = DelegatedRole(role, [], 1, terminating=True, paths=paths)
            for key in tuple(delegations.roles[role].keyids):
                top.revoke_key(key, role)
            signer = self._keys.next(role) if exchange else self._keys.current(role)
            top.add_key(signer.public_key, role)
            result["targets"] = top
        return result

    def _commit(self, changed: Mapping[str, Targets], now: float) -> None:
        """Write changed roles of targets, then a snapshot, and finally the timestamp, which publishes them.

        Args:
            changed: A dict from role, `targets` or `class-CLASS`, to its new content.
            now: The time in seconds since 1970.
        """
        old = self._read("snapshot", Snapshot) if self.exists else Snapshot(meta={})
        meta = dict(old.meta)
        for role, listed in changed.items():
            listed.version = self._next_version(role, listed.version if f"{role}.json" in meta else 0, now)
            listed.expires = _expiry(now, self._lifetimes.targets_s)
            data = self._write(f"{listed.version}.{role}.json", listed, self._keys.signers(role))
            meta[f"{role}.json"] = _describe_meta(listed.version, data)
        snapshot = Snapshot(
            version=self._next_version("snapshot", old.version if self.exists else 0, now),
            expires=_expiry(now, self._lifetimes.snapshot_s),
            meta=meta,
        )
        data = self._write(f"{snapshot.version}.snapshot.json", snapshot, self._keys.signers("snapshot"))
        last = self._read_timestamp().version if self.exists else 0
        self._write_timestamp(_describe_meta(snapshot.version, data), last, now)

    def _next_version(self, role: str, version: int, now: float) -> int:
        """Return a version above `version` that no file has, not even one that a killed process has left."""
        version = max(version + 1, int(now))
        while (self.folder / "metadata" / f"{version}.{role}.json").exists():
            version += 1
        return version

    def _write_timestamp(self, snapshot: MetaFile, last: int, now: float) -> None:
        timestamp = Timestamp(
            version=max(last + 1, int(now)),
            expires=_expiry(now, self._lifetimes.timestamp_s),
            snapshot_meta=snapshot,
            unrecognized_fields={trusted_time.FIELD: int(now)},
        )
        self._write("timestamp.json", timestamp, self._keys.signers("timestamp"))

    def _sign_root(self, root: Root, signers: Sequence[CryptoSigner], now: float) -> None:
        root.expires = _expiry(now, self._lifetimes.root_s)
        self._write(f"{root.version}.root.json", root, signers)

    def _write(self, name: str, signed: Signed, signers: Sequence[CryptoSigner]) -> bytes:
        metadata = Metadata(signed)
        for signer in signers:
            metadata.sign(signer, append=True)
        data = metadata.to_bytes(JSONSerializer(compact=True))
        with write_atomically(self.folder / "metadata" / name, mode=0o644, disk=self._disk) as file:
            file.write(data)
        return data

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Keep other processes from changing the repository, and copy it to the storage at the end."""
        with self.lock():
            yield
        if self._storage is not None:
            self._storage.copy(self.folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the repository against other processes, and remove temporary files of killed processes.

        Raises:
            OutputError: The folder of the keys cannot be written.
        """
        try:
            file = (self._keys.folder / "repository.lock").open("ab")
        except OSError as cause:
            raise OutputError(f"cannot lock {self._keys.folder}: {cause.strerror}") from cause
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for folder in (self._keys.folder, self.folder):
                for temporary_file in folder.rglob(".*.tmp"):
                    with contextlib.suppress(OSError):
                        temporary_file.unlink()
            yield


def open_repository(folder: FleetFolder) -> TufRepository:
    """Return the repository of a fleet, with the storage in its settings.

    Raises:
        ConfigError: There is no fleet, or its storage cannot be used.
        FleetError: The folder belongs to an additional manager.
    """
    folder.check_repository()
    url = folder.read_settings().artifacts_storage
    return TufRepository(
        folder.repository, folder.repository_keys, storage=ArtifactStorage(url) if url else None
    )


def _replace_keys(root: Root, role: str, signers: Iterable[CryptoSigner]) -> None:
    for key in tuple(root.roles[role].keyids):
        root.revoke_key(key, role)
    for signer in signers:
        root.add_key(signer.public_key, role)


def name_manager(root: Root, signer: CryptoSigner) -> None:
    key = signer.public_key
    root.unrecognized_fields[FIELD] = {key.keyid: key.to_dict()}


def _expiry(now: float, life_s: float) -> datetime:
    return datetime.fromtimestamp(int(now + life_s), timezone.utc)


def _is_due(signed: Targets | Snapshot | Timestamp, life_s: float, now: float) -> bool:
    """Return whether half of the lifetime is over, or the metadata was signed when the clock was ahead."""
    return not life_s / 2 <= signed.expires.timestamp() - now <= life_s + CLOCK_STEP_S


def _describe_meta(version: int, data: bytes) -> MetaFile:
    return MetaFile(version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def name_target_file(path: str, sha256: str) -> str:
    """Return the path of a target's file, relative to the repository's folder.

    Args:
        path: The path of the target, `CLASS/NAME`.
        sha256: The SHA-256 of its content, in hexadecimal digits.
    """
    device_class, _, name = path.rpartition("/")
    return f"targets/{device_class}/{sha256}.{name}"


def _describe(file: TargetFile) -> PublishedTarget:
    custom = file.unrecognized_fields.get("custom", {})
    return PublishedTarget(
        path=file.path, size_bytes=file.length, sha256=file.hashes["sha256"], custom=custom
    )


def _describe_conflict(path: str, there: TargetFile, file: TargetFile) -> str:
    return (
        f"{path}: a file of this name with sha256 {there.hashes['sha256'][:12]} is released, expected the"
        f" same content, got {file.hashes['sha256'][:12]}; give the new package another version"
    )
