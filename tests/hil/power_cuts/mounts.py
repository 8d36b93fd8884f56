"""Mounts and loop devices in a private mount namespace, which the kernel removes when its processes end.

So nothing is left, not even after SIGKILL: mounts end with the namespace, a loop device with its last user,
and the files are in memory that is mounted there too.
"""

import ctypes
import fcntl
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import OutputError

_EMPTY_FOLDERS: Final = ("/mnt", "/media", "/srv")  # a mount on one that is empty hides nothing
_PROGRAMS: Final = {"qemu-storage-daemon": "qemu-utils", "mke2fs": "e2fsprogs"}
_CAP_SYS_ADMIN: Final = 21
_CLONE_NEWNS: Final = 0x20000
_MS_NOATIME: Final = 0x400
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000
_MNT_DETACH: Final = 2
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_CONFIG: Final = struct.Struct("<II5Q4I64s64s32s2Q8Q")  # struct loop_config of linux/loop.h
_LO_FLAGS_AUTOCLEAR: Final = 4
_BLKFLSBUF: Final = 0x1261
_LOOP_TRIES: Final = 20  # another process may take the free device first


def find_obstacle(status: Path = Path("/proc/self/status"), devices: Path = Path("/dev")) -> str | None:
    """Return why power cuts cannot be tried on this machine, or None."""
    if sys.platform != "linux":
        return "power cuts need Linux"
    lines = status.read_text().splitlines()
    (effective,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff"))
    if not effective >> _CAP_SYS_ADMIN & 1:
        return "power cuts need root (CAP_SYS_ADMIN), to mount file systems"
    paths = (devices / "fuse", devices / "loop-control")
    if refused := next((path for path in paths if not _can_open(path)), None):
        return f"power cuts need {refused}, which is missing or not allowed here"
    for program, package in _PROGRAMS.items():
        if shutil.which(program) is None:
            return f"power cuts need the program {program}: apt-get install {package}"
    return None


def _can_open(path: Path) -> bool:
    try:
        path.open("rb+", 0).close()
    except OSError:
        return False
    return True


def enter_private_memory(size_bytes: int) -> Path:
    """Move this single-threaded process into a mount namespace of its own; return a folder in memory.

    Both end with the process and its children.

    Raises:
        OutputError: the system refuses it.
    """
    folder = next(
        (path for path in map(Path, _EMPTY_FOLDERS) if path.is_dir() and not any(path.iterdir())), None
    )
    if folder is None:
        raise OutputError(
            f"power cuts need an empty folder to mount memory on: one of {', '.join(_EMPTY_FOLDERS)}"
        )
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC_PRIVATE, None)
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size_bytes}".encode())
    return folder


def mount(source: Path, folder: Path, options: str) -> None:
    """Mount the ext4 on a block device.

    Raises:
        OutputError: the kernel refuses it.
    """
    _call("mount", os.fsencode(source), os.fsencode(folder), b"ext4", _MS_NOATIME, options.encode())


def unmount(folder: Path, *, now: bool = False) -> None:
    """Unmount what is mounted at `folder`; with `now` also if it is in use or does not answer.

    Raises:
        OutputError: the kernel refuses it.
    """
    _call("umount2", os.fsencode(folder), _MNT_DETACH if now else 0)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # `os.unshare` exists from Python 3.12 on, `mount` never
    if getattr(libc, name)(*arguments):
        code = ctypes.get_errno()
        named = " ".join(os.fsdecode(each) for each in arguments if isinstance(each, bytes))
        raise OutputError(f"{name} {named}: {os.strerror(code)}")


class LoopDevice:
    """A file as a block device, until `close` or the end of the process.

    Attributes:
        path: path of the device.
    """

    def __init__(self, file: Path) -> None:
        """Make the device.

        Raises:
            OutputError: the system has none left, or refuses it.
        """
        try:
            with file.open("rb+", 0) as backing, Path("/dev/loop-control").open("rb+", 0) as control:
                for left in reversed(range(_LOOP_TRIES)):
                    number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                    self.path = Path(f"/dev/loop{number}")
                    self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                    try:
                        # Without direct I/O: qemu 7.2 corrupts concurrent writes to a FUSE export.
                        fcntl.ioctl(self._descriptor, _LOOP_CONFIGURE, _configure(backing.fileno()))
                        break
                    except OSError:
                        os.close(self._descriptor)
                        if not left:
                            raise
        except OSError as cause:
            raise OutputError(f"cannot make a loop device of {file}: {cause.strerror}") from cause

    def forget(self) -> None:
        """Write back and drop the kernel's cache of the device, which must not be mounted.

        Then the file may be changed beneath it.
        """
        fcntl.ioctl(self._descriptor, _BLKFLSBUF)

    def close(self) -> None:
        """Release the device; while it is mounted, it remains until the unmount."""
        os.close(self._descriptor)


def _configure(descriptor: int) -> bytes:
    """Return the `struct loop_config` of a whole file, with the default size of a block."""
    information = (0, 0, 0, 0, 0, 0, 0, 0, _LO_FLAGS_AUTOCLEAR, b"", b"", b"", 0, 0)
    return _LOOP_CONFIG.pack(descriptor, 0, *information, *[0] * 8)
