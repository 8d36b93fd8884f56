"""Detects errors of a machine that lacks descriptors or memory.

Such errors do not mean that the data are wrong. A full disk is reported as `OutputError` instead.
"""

import errno
import os
import resource
from typing import Final

from edgekit_runtime.errors import UnavailableError

_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
_RETRY_AFTER_S: Final = 1.0


def is_lack(cause: BaseException) -> bool:
    """Return whether `cause` means that the machine lacks file descriptors or memory.

    If this process has its own memory limit, the result is False for a lack of memory.
    """
    number = cause.errno if isinstance(cause, OSError) else None
    if isinstance(cause, MemoryError) or number == errno.ENOMEM:
        return resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return number in _DESCRIPTORS


def check_lack(cause: BaseException, doing: str) -> None:
    """Raise an error if `cause` means that the machine lacks file descriptors or memory.

    Args:
        cause: An error of the system, or a `MemoryError`.
        doing: The failed action, for the message.

    Raises:
        UnavailableError: No file descriptor or memory is available.
    """
    if not is_lack(cause):
        return
    lacks = cause.strerror if isinstance(cause, OSError) else os.strerror(errno.ENOMEM)
    raise UnavailableError(
        f"{doing} now: {lacks}; try again, or raise the limit if this stays", _RETRY_AFTER_S
    ) from cause


def check_descriptors(doing: str) -> None:
    """Raise `UnavailableError` if this process cannot open a file.

    Call this after a failure of unknown cause. `doing` is the failed action, for the message.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as cause:
        check_lack(cause, doing)
