"""The cache of built engines on the disk of the device.

An engine is native code for one version of TensorRT on one GPU. The key of an entry includes both, so an
engine is never loaded on another system. A user who can write to the folder could replace an engine, so the
cache ignores folders that other users can write to.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from edgekit_runtime.canonical_json import JsonValue, encode_json
from edgekit_runtime.errors import PackageError
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import write_atomically

if TYPE_CHECKING:
    from edgekit_runtime.encryption.container import ContentKey

_BUILDER: Final = 1  # our revision, raised when the same model and options give another engine
_ENTRY, _PLAN = "entry.json", "engine.plan"
_POLL_S: Final = 0.2
_MAX_ENTRIES: Final = 8  # engines often have 10 MB, and the disk of a device is small

_logger = logging.getLogger(__name__)


class StoppedError(Exception):
    """The session was closed before its engine was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKey:
    """The properties that identify a built engine.

    Attributes:
        model_sha256: The digest of the ONNX model.
        tensorrt: The version of TensorRT.
        power_mode: The power mode for which TensorRT chose kernels, see `read_power_mode`.
        options: The build options as canonical JSON.
        builder: The revision of the code that builds engines.
    """

    model_sha256: str
    tensorrt: str
    gpu: str
    compute_capability: str
    power_mode: str
    options: str
    builder: int = _BUILDER

    @property
    def digest(self) -> str:
        """The name of the cache entry: the SHA-256 of all fields in hexadecimal."""
        return _digest(asdict(self))

    @property
    def machine_digest(self) -> str:
        """The SHA-256 of the fields that describe the machine. It is the name of the timing cache."""
        fields = asdict(self)
        return _digest(
            {name: fields[name] for name in ("tensorrt", "gpu", "compute_capability", "power_mode")}
        )


def _digest(fields: Mapping[str, JsonValue]) -> str:
    return hashlib.sha256(encode_json(dict(fields))).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cached engine, or the reasons why there is none.

    Attributes:
        precision: The precision of the engine, or None if there is no engine.
        seconds: A dict from each measured precision to its median latency in seconds.
        notes: The reasons why engines of other precisions failed.
        plan: The serialized engine. None if TensorRT cannot parse the model or all engines compute wrong
            values.
    """

    precision: str | None
    seconds: Mapping[str, float]
    notes: tuple[str, ...]
    plan: bytes | None


class EngineCache:
    """A folder with timing caches and up to eight engines. With a `local_key`, engines are encrypted."""

    __slots__ = ("root",)

    def __init__(self, root: Path) -> None:
        """Use `tensorrt` in the cache folder `root`; neither need exist."""
        self.root = root / "tensorrt"

    def read(self, key: EngineKey, local_key: "ContentKey | None" = None) -> CacheEntry | None:
        """Return the entry of `key`, or None if it is missing, damaged or writable by other users."""
        folder = self.root / key.digest
        if not (_is_private(self.root) and _is_private(folder)):
            return None
        try:
            stated: Any = json.loads((folder / _ENTRY).read_bytes())
            if stated["key"] != asdict(key):
                return None
            plan = None
            if stated["plan_sha256"] is not None:
                plan = _read_plan(folder / _PLAN, local_key)
                if hashlib.sha256(plan).hexdigest() != stated["plan_sha256"]:
                    return None
            return CacheEntry(stated["precision"], dict(stated["seconds"]), tuple(stated["notes"]), plan)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            PackageError,
        ):  # missing, cut off or from another writer
            return None

    def write(self, key: EngineKey, entry: CacheEntry, local_key: "ContentKey | None" = None) -> None:
        """Write `entry` and remove all but the eight newest entries.

        After a power cut, the cache contains the old entry, the new entry or neither.

        Raises:
            OutputError: The folder cannot be written.
            OSError: The folder cannot be created.
        """
        folder = self.root / key.digest
        _make_folder(folder)
        sha256 = None
        if entry.plan is not None:
            sha256 = hashlib.sha256(entry.plan).hexdigest()
            with write_atomically(folder / _PLAN, mode=0o600) as file:
                _write_plan(file, entry.plan, local_key)
        stated = {
            "key": asdict(key),
            "precision": entry.precision,
            "seconds": dict(entry.seconds),
            "notes": list(entry.notes),
            "plan_sha256": sha256,
        }
        self._prune(folder)
        # Last: it contains the digest of its engine.
        with write_atomically(folder / _ENTRY, mode=0o600) as file:
            file.write(json.dumps(stated, indent=1).encode())

    def _prune(self, new: Path) -> None:
        """Remove all but the newest entries: updates of models or JetPack leave old engines behind."""
        entries = [path.parent for path in self.root.glob(f"*/{_ENTRY}") if path.parent != new]
        entries.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in entries[_MAX_ENTRIES - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def only_one(self, key: EngineKey, stop: threading.Event) -> Iterator[None]:
        """Lock the entry of `key` during the `with` block. A crash releases the lock.

        If the cache is not writable, there is no lock. Set `stop` to cancel the wait for the lock.

        Raises:
            StoppedError: `stop` was set before the lock was free.
        """
        try:
            _make_folder(self.root)
            lock = (self.root / f"{key.digest}.lock").open("wb")
        except OSError:  # a cache that cannot be written is not shared either
            yield
            return
        with lock:
            while not _try_lock(lock.fileno()):
                if stop.wait(_POLL_S):
                    raise StoppedError
            yield

    def forget(self, key: EngineKey) -> None:
        """Remove the entry of `key` if it exists."""
        (self.root / key.digest / _ENTRY).unlink(missing_ok=True)

    def read_timing(self, key: EngineKey) -> bytes | None:
        """Return the timing cache for the machine of `key`, or None if there is none."""
        if not _is_private(self.root):
            return None
        try:
            return self._timing_path(key).read_bytes()
        except OSError:
            return None

    def write_timing(self, key: EngineKey, timing: bytes) -> None:
        """Write or replace the timing cache for the machine of `key`.

        Raises:
            OutputError: The folder cannot be written.
            OSError: The folder cannot be created.
        """
        _make_folder(self.root)
        with write_atomically(self._timing_path(key), mode=0o600) as file:
            file.write(timing)

    def _timing_path(self, key: EngineKey) -> Path:
        return self.root / f"timing-{key.machine_digest}.cache"


def _read_plan(path: Path, local_key: "ContentKey | None") -> bytes:
    if local_key is None:
        return path.read_bytes()
    from edgekit_runtime.encryption.container import decrypt_chunks  # few packages are encrypted

    return b"".join(decrypt_chunks(path, local_key))


def _write_plan(file: BinaryIO, plan: bytes, local_key: "ContentKey | None") -> None:
    if local_key is None:
        file.write(plan)
        return
    from edgekit_runtime.encryption.container import encrypt, make_header

    encrypt(io.BytesIO(plan), file, local_key, make_header(local_key, len(plan)))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_private(folder: Path) -> bool:
    """Whether the folder exists and only this user can write into it; warn if others can."""
    try:
        status = folder.stat()
    except OSError:
        return False
    private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not private:
        _logger.warning(
            "%s is not read: other users can write there; chmod 700, or set EDGEKIT_CACHE", folder
        )
    return private


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def read_power_mode() -> str:
    """Return the power mode of a Jetson as `nvpmodel -q` reports it, or `none` on other machines."""
    try:
        done = subprocess.run(
            ["nvpmodel", "-q"], capture_output=True, text=True, errors="replace", timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "none"
    return " ".join(done.stdout.split())
