"""Where samples wait until they are sent: a file each, sealed for the fleet.

    samples/MODEL/ORDER.KIND.ID     content: see `protocol.samples`; its time is that of the request

The device cannot read a sealed sample, so its name states what the device needs later. Files with other
names are not samples.
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
"""In the agent's folder."""

_LEFTOVER_S: Final = 3600.0  # older temporary files are of a run that was cut off
_OWED: Final = ("kept", "random")  # kinds that go last


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sealed sample that waits in the folder to be sent.

    Attributes:
        order, kind: identifier of its order, and kind of the trigger that drew it.
        size_bytes: size of the sealed file.
        stored_at: seconds since 1970.
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
    """The samples of all models."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        """Read nothing yet; the folder is made with the first sample."""
        self.path, self._disk = path, disk

    def list_samples(self) -> list[StoredSample]:
        """Return all samples, the oldest first; delete temporary files of an earlier run."""
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
        """Store a sample; it survives a power cut.

        `share`: id of its order, and kind of the trigger that drew it.

        Raises:
            OutputError: it cannot be written.
        """
        folder = self.path / model
        make_folders(folder, 0o700, self._disk)
        with write_atomically(folder / ".".join((*share, sample_id)), mode=0o600, disk=self._disk) as file:
            file.write(sealed)

    def remove(self, sample: StoredSample) -> None:
        """Delete a sample; raises OutputError."""
        try:
            self._disk.remove(sample.path)
        except OSError as cause:
            raise OutputError(f"cannot delete {sample.path}: {cause.strerror}") from cause

    def trim(
        self, *, oldest_at: float, max_bytes: int, shares: Mapping[tuple[str, str], int]
    ) -> list[StoredSample]:
        """Delete samples that are too old or beyond a limit, and return the rest.

        Only age and kind decide, never the content, so the choice of the remaining samples is still unbiased.
        Within a share the oldest go first. Beyond `max_bytes`, samples of the kinds `random` and `kept` go
        last; the oldest go first among them, and among the others.

        `oldest_at`: seconds since 1970. `shares`: (order, kind) -> its limit in bytes, if any.
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
        """Delete all samples, and return how many there were; raises OutputError."""
        samples = self.list_samples()
        for sample in samples:
            self.remove(sample)
        return len(samples)
