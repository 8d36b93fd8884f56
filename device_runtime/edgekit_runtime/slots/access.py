"""Creates the state folder, locks it and checks its permissions.

A verified package must not change, so a folder is refused if other users own it or can write to it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import SlotError
from edgekit_runtime.system.atomic_files import DISK, Disk
from edgekit_runtime.system.resource_errors import check_lack

_LOCK_TIMEOUT_S: Final = 30.0
_LOCK_POLL_S: Final = 0.02

_logger = logging.getLogger(__name__)


class RecordError(SlotError):
    """The state cannot be written or locked. The disk is unchanged."""


class ForeignFileError(SlotError):
    """A file is not a regular file, is too large, or belongs to another user."""


def make_folder(path: Path, mode: int, disk: Disk) -> None:
    """Create `path` and its missing parents, so that they survive a power cut. The umask applies to `mode`.

    Raises:
        SlotError: The folder cannot be created.
        UnavailableError: No file descriptor or memory is available.
    """
    missing = []
    while not os.path.isdir(path):  # noqa: PTH112  # Path.is_dir() raises where a folder above is closed
        missing.append(path)
        path = path.parent
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                disk.make_folder(folder, mode)
            disk.sync_folder(folder.parent)
    except OSError as cause:
        check_lack(cause, f"cannot make the folder {folder}")
        raise SlotError(
            f"cannot make the folder {folder}: {cause.strerror}; set EDGEKIT_STATE to one that can be written"
        ) from cause


def check_private(folder: Path, *, may_be_link: bool = False) -> None:
    """Check that only this user and root can change the content of `folder`.

    If `may_be_link` is True, a symbolic link is accepted and its target is checked.

    Raises:
        SlotError: `folder` is missing, is not a folder, is a link that is not accepted, or can be changed by
            other users.
        UnavailableError: No file descriptor or memory is available.
    """
    try:
        status = folder.stat() if may_be_link else folder.lstat()
    except OSError as cause:
        check_lack(cause, f"{folder}: cannot be read")
        raise SlotError(f"{folder}: cannot be read: {cause.strerror}") from cause
    if not stat.S_ISDIR(status.st_mode):
        raise SlotError(f"{folder}: is a link or no folder; remove it and install again")
    if not belongs_to_us(status):
        raise SlotError(
            f"{folder}: belongs to user {status.st_uid}, this process is of user {os.geteuid()}; run this as"
            " that user, or set EDGEKIT_STATE"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SlotError(f"{folder}: other users can write there; chmod go-w {folder}")


@contextlib.contextmanager
def hold_for_service(folder: Path) -> Iterator[None]:
    """Lock a state folder during the `with` block, so that only one service uses it.

    The folder is created if missing. Installations use other locks and are not blocked. If the file system
    does not support locks, a warning is logged.

    Raises:
        SlotError: Another service holds the lock, or the folder cannot be created or read.
        UnavailableError: No file descriptor or memory is available.
    """
    make_folder(folder, 0o755, DISK)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as cause:
        check_lack(cause, f"{folder}: cannot be locked")
        raise SlotError(f"{folder}: cannot be read: {cause.strerror}") from cause
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            is_free = _try_lock(descriptor, folder)
        except RecordError as cause:
            _logger.warning("%s; make sure yourself that no other service uses it", cause)
            is_free = True
        if not is_free:
            raise SlotError(
                f"another service{_name_holder(descriptor)} uses the state folder {folder}; stop it, or set"
                " EDGEKIT_STATE to another folder"
            )
        yield


def _name_holder(descriptor: int) -> str:
    """Return which process has locked a file, to follow the word 'service'; empty if that is not known.

    Source: proc_locks(5).
    """
    status = os.fstat(descriptor)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == inode and int(fields[4]) > 0:
                return f" (process {fields[4]})"
    return ""


@contextlib.contextmanager
def hold(folder: Path, wait_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Lock `folder` during the `with` block. The system releases the lock if this process ends.

    Raises:
        RecordError: The folder is missing, its file system has no locks, or another process holds the lock
            for longer than `wait_s`.
        UnavailableError: No file descriptor or memory is available.
    """
    give_up_s = time.monotonic() + wait_s
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as cause:
        check_lack(cause, f"{folder}: cannot be locked")
        raise RecordError(f"{folder}: {cause.strerror}; is the model installed?") from cause
    try:
        while not _try_lock(descriptor, folder):
            if time.monotonic() > give_up_s:
                raise RecordError(f"{folder}: another process holds it for over {wait_s:.0f} s")
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as cause:
        raise RecordError(f"{folder}: this file system has no locks: {cause.strerror}") from cause
    return True


def read_own_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a small regular file that belongs to this user or root.

    Raises:
        OSError: The file is missing or cannot be read.
        ForeignFileError: The file is not regular, belongs to another user, or exceeds `max_bytes`.
        UnavailableError: No file descriptor or memory is available.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as cause:
        if cause.errno == errno.ELOOP:
            raise ForeignFileError(f"{path}: is a link") from cause
        check_lack(cause, f"{path}: cannot be read")
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not belongs_to_us(status):
            raise ForeignFileError(f"{path}: is not a regular file, or belongs to another user")
        with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > max_bytes:
        raise ForeignFileError(f"{path}: is over {max_bytes} bytes")
    return data


def belongs_to_us(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root."""
    return status.st_uid in (os.geteuid(), 0)
