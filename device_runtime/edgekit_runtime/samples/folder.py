"""The folder in which samples wait to be sent. Each file holds one sample, encrypted for the fleet.

    samples/MODEL/ORDER.KIND.ID     the encrypted sample, see `protocol.samples`

The modification time of the file is the time of the request. The device cannot decrypt a sample, so the file
name contains what the device needs to know. Other files are ignored.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import OutputError
from edgekit_runtime.protocol.samples import MAX_SEALED_BYTES, ORDER_ID, SAMPLE_ID, TRIGGERS
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.atomic_files import DISK, Disk, make_folders, write_atomically

SAMPLES_FOLDER: Final = "samples"
"""The folder of samples in the agent's folder."""

_LEFTOVER_S: Final = 3600.0  # older temporary files are of a run that was cut off
_OWED: Final = ("kept", "random")  # kinds that go last


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """An encrypted sample that waits to be sent.

    Attributes:
        order, kind: The id of the order, and the kind of the trigger that drew the sample.
        size_bytes: The size of the encrypted file.
        stored_at: The time of the request, in seconds since 1970.
    """

    path: Path
    id: str
    model: str
    order: str
    kind: str
    size_bytes: int
    stored_at: float

    @property
    def share(self) -> tuple[str, str]:
        return self.order, self.kind


class SampleFolder:
    """The stored samples of all models."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        """Read nothing yet. The folder is created with the first sample."""
        self.path, self._disk = path, disk

    def list_samples(self) -> list[StoredSample]:
        """Return all samples, oldest first. Also deletes temporary files left by an earlier process."""
        samples: list[StoredSample] = []
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.path):
                if folder.is_dir(follow_symlinks=False):
                    samples += self._list_model(folder)
        return sorted(samples, key=lambda sample: (sample.stored_at, sample.id))

    def _list_model(self, folder: "os.DirEntry[str]") -> Iterable[StoredSample]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                order, _, kind_and_id = entry.name.partition(".")
                kind, _, sample_id = kind_and_id.partition(".")
                is_named = ORDER_ID.fullmatch(order) and kind in TRIGGERS and SAMPLE_ID.fullmatch(sample_id)
                status = entry.stat(follow_symlinks=False)
                if not is_named or not entry.is_file(follow_symlinks=False):
                    if entry.name.endswith(".tmp") and time.time() - status.st_mtime > _LEFTOVER_S:
                        self._disk.remove(Path(entry.path))
                elif 0 < status.st_size <= MAX_SEALED_BYTES:
                    yield StoredSample(
                        path=Path(entry.path),
                        id=sample_id,
                        model=folder.name,
                        order=order,
                        kind=kind,
                        size_bytes=status.st_size,
                        stored_at=status.st_mtime,
                    )

    def write(self, model: str, share: tuple[str, str], sample_id: str, sealed: bytes) -> None:
        """Store a sample durably. `share` is the id of its order and the kind of the trigger that drew it.

        Raises:
            OutputError: The file cannot be written.
        """
        folder = self.path / model
        make_folders(folder, 0o700, self._disk)
        with write_atomically(folder / ".".join((*share, sample_id)), mode=0o600, disk=self._disk) as file:
            file.write(sealed)

    def remove(self, sample: StoredSample) -> None:
        """Delete a sample.

        Raises:
            OutputError: The file cannot be deleted.
        """
        try:
            self._disk.remove(sample.path)
        except OSError as cause:
            raise OutputError(f"cannot delete {sample.path}: {cause.strerror}") from cause

    def trim(
        self, *, oldest_at: float, max_bytes: int, shares: Mapping[tuple[str, str], int]
    ) -> list[StoredSample]:
        """Delete samples that are too old or exceed a limit, and return the others.

        Samples are not selected by their content, so the others stay unbiased. The oldest are deleted first.
        If all samples exceed `max_bytes`, those of the kinds `random` and `kept` are deleted last.

        Args:
            oldest_at: The minimum time of a sample, in seconds since 1970.
            max_bytes: The maximum size of all samples.
            shares: A dict from (order, kind) to the maximum size of their samples in bytes.
        """
        samples = self.list_samples()
        waiting, sizes, total_bytes = [], dict(shares), 0
        for sample in sorted(
            samples, key=lambda sample: (sample.kind in _OWED, sample.stored_at), reverse=True
        ):
            room_bytes = min(sizes.get(sample.share, max_bytes), max_bytes - total_bytes)
            if sample.size_bytes > room_bytes:
                sizes[sample.share] = room_bytes = 0  # else the small ones of the older would stay
            if sample.stored_at < oldest_at or not room_bytes:
                with contextlib.suppress(OutputError):
                    self.remove(sample)
                    continue
            sizes[sample.share] = sizes.get(sample.share, max_bytes) - sample.size_bytes
            total_bytes += sample.size_bytes
            waiting.append(sample)
        return waiting

    def clear(self) -> int:
        """Delete all samples and return their number.

        Raises:
            OutputError: A file cannot be deleted.
        """
        samples = self.list_samples()
        for sample in samples:
            self.remove(sample)
        return len(samples)
