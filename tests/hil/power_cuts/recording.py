"""Records a run of a device's code on a real ext4 file system, with a log of every write.

The file system is on a loop device, the loop device on a FUSE export of qemu's storage daemon, and the daemon
logs each write and flush before it answers. qemu 7.2 corrupts concurrent writes of such an export, so the log
is checked against the final content of the disk.
"""

import contextlib
import gzip
import json
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hil.power_cuts.mounts import LoopDevice, mount, unmount
from tests.hil.power_cuts.write_log import LogEntry, count_entries, read_log, trim_log

from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import ConfigError, DataError, OutputError
from edgekit_runtime.system.child_process import ChildProcess, run_program

# Without ext4's help for programs that forget to sync before a rename.
MOUNT_OPTIONS: Final = "noauto_da_alloc"

NOTHING: Final = "nothing"

_IMAGE_BYTES: Final = 144 << 20  # a second group of blocks, for a copy of the superblock; holes at first
_LOG_BYTES: Final = 512 << 20  # a hole at first
_JOURNAL_MB: Final = 4  # the minimum for blocks of 4 KiB; it wraps within a run
_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.02
_HEAD_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a run.

    Attributes:
        name: description of the step.
        act: runs the step; the result must be durable when it returns.
        during: versions of which one must start if the power fails during the step; `NOTHING` among them if
            nothing was installed before.
        after: versions of which one must start after the step.
    """

    name: str
    act: Callable[[], object]
    during: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """Begin and end of a step, as numbers of log entries; see `Step`."""

    name: str
    begin: int
    end: int
    during: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        size_bytes: size of the disk, which holds zeros at first.
        log: log of its writes, as `read_log` takes it; they begin with the file system's own.
        marks: marks of its steps, in order.
    """

    size_bytes: int
    log: bytes
    marks: tuple[Mark, ...]

    @property
    def entries(self) -> list[LogEntry]:
        """The writes and flushes."""
        return read_log(self.log)

    def find_allowed(self, at: int) -> tuple[str, tuple[str, ...]]:
        """Return the step and the versions of which one must start if the power fails before entry `at`."""
        found = self.marks[0]
        allowed = found.during
        for mark in self.marks:
            if at > mark.begin:
                found, allowed = mark, mark.after if at >= mark.end else mark.during
        return found.name, allowed

    def save(self, folder: Path) -> None:
        """Write the recording to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.gz").write_bytes(gzip.compress(self.log, 1))
        document = {"size_bytes": self.size_bytes, "marks": to_plain(self.marks)}
        (folder / "recording.json").write_text(json.dumps(document, indent=1))

    @classmethod
    def load(cls, folder: Path) -> "Recording":
        """Read a recording from a folder.

        Raises:
            DataError: it is damaged.
        """
        try:
            document = json.loads((folder / "recording.json").read_text())
            marks = tuple(from_plain(Mark, mark, "marks") for mark in document["marks"])
            return cls(document["size_bytes"], gzip.decompress((folder / "log.gz").read_bytes()), marks)
        except (OSError, EOFError, ValueError, KeyError, ConfigError) as cause:
            raise DataError(
                f"{folder}: holds no whole recording ({cause}); remove the folder and record again"
            ) from cause


def record(folder: Path, prepare: Callable[[Path], Sequence[Step]]) -> Recording:
    """Return a recording of a run.

    Args:
        folder: folder in memory for files of the recording, see `enter_private_memory`.
        prepare: takes the root of the file system; writes its earlier content, and returns the steps.

    Raises:
        OutputError: the disk cannot be made.
        DataError: log and disk differ at the end.
    """
    image, log, export, root = (folder / name for name in ("image", "log", "export", "root"))
    for path, size in ((image, _IMAGE_BYTES), (log, _LOG_BYTES), (export, 0)):
        with path.open("wb") as file:
            file.truncate(size)
    root.mkdir(exist_ok=True)
    marks = []
    with _export(image, log, export), contextlib.closing(LoopDevice(export)) as device:
        _format(device.path)
        mount(device.path, root, MOUNT_OPTIONS)
        try:
            for step in prepare(root):
                begin = _count(log)
                step.act()
                marks.append(Mark(step.name, begin, _count(log), step.during, step.after))
        finally:
            unmount(root)
        device.forget()
    with log.open("rb") as written, mmap.mmap(written.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        recording = Recording(_IMAGE_BYTES, trim_log(whole), tuple(marks))
    _check(recording, image)
    return recording


def _format(device: Path) -> None:
    options = ["-b", "4096", "-N", "512", "-J", f"size={_JOURNAL_MB}"]
    extended = "nodiscard,lazy_itable_init=0,lazy_journal_init=0"
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", *options, "-E", extended, str(device)]
    result = run_program(argv, (), _LIMIT_S, 1)
    if result.exit_code:
        raise OutputError(f"mke2fs ended with {result.exit_code}: {result.last_line}")


@contextlib.contextmanager
def _export(image: Path, log: Path, export: Path) -> Iterator[None]:
    """Run the storage daemon, which makes `export` the logged `image`."""
    driver = (
        "blklogwrites,node-name=logged,file=image,log=log,log-sector-size=512,log-super-update-interval=1"
    )
    arguments = [
        *("--blockdev", f"file,node-name=image,filename={image}"),
        *("--blockdev", f"file,node-name=log,filename={log}"),
        *("--blockdev", driver),
        *("--export", f"fuse,id=export,node-name=logged,mountpoint={export},writable=on,allow-other=off"),
    ]
    with ChildProcess("tests.hil.power_cuts.storage_daemon", *arguments) as daemon:
        try:
            end_s = time.monotonic() + _LIMIT_S
            while export.stat().st_size != image.stat().st_size:
                if daemon.wait(_POLL_S) is not None:
                    raise OutputError(f"qemu-storage-daemon ended {daemon.explain_end()}")
                if time.monotonic() > end_s:
                    raise OutputError(f"qemu-storage-daemon exports nothing within {_LIMIT_S:.0f} s")
            yield
        finally:
            with contextlib.suppress(OutputError):  # it may not have been mounted
                unmount(export, now=True)


def _count(log: Path) -> int:
    with log.open("rb") as file:
        return count_entries(file.read(_HEAD_BYTES))


def _check(recording: Recording, image: Path) -> None:
    """Check that the log leads to the content of the disk, and that the file system is intact.

    Raises:
        DataError: it does not.
    """
    disk = bytearray(recording.size_bytes)
    for entry in recording.entries:
        disk[entry.offset_bytes : entry.offset_bytes + len(entry.data)] = entry.data
    with image.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        if disk != held[:]:
            raise DataError("the log does not lead to what the disk holds: qemu lost or mixed up writes")
    result = run_program(["e2fsck", "-f", "-n", str(image)], (), _LIMIT_S, 1 << 16)
    if result.exit_code:
        raise DataError(f"the recorded file system is damaged: {result.output.decode(errors='replace')}")
