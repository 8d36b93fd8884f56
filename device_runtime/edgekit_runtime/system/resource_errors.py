"""Errors of a machine that is out of descriptors or memory now; they say nothing of what was to be read.

A full disk does not count: reading needs no space, and a write that fails raises `OutputError`.
"""

import errno
import os
import resource
from typing import Final

from edgekit_runtime.errors import UnavailableError

_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
_RETRY_AFTER_S: Final = 1.0


def is_lack(cause: BaseException) -> bool:
    """Return whether `cause` says that the machine lacks descriptors or memory.

    Where this process has a limit of its own, what does not fit into that will not fit at the next start.
    """
    number = cause.errno if isinstance(cause, OSError) else None
    if isinstance(cause, MemoryError) or number == errno.ENOMEM:
        return resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    return number in _DESCRIPTORS


def check_lack(cause: BaseException, doing: str) -> None:
    """Raise if `cause` says that the machine lacks descriptors or memory.

    Args:
        cause: an error of the system, or a `MemoryError`.
        doing: what failed, for the message.

    Raises:
        UnavailableError: it is one, of descriptors or memory.
    """
    if not is_lack(cause):
        return
    lacks = cause.strerror if isinstance(cause, OSError) else os.strerror(errno.ENOMEM)
    raise UnavailableError(
        f"{doing} now: {lacks}; try again, or raise the limit if this stays", _RETRY_AFTER_S
    ) from cause


def check_descriptors(doing: str) -> None:
    """Raise if this process cannot open a file, which explains a failure that has no reason of its own.

    Args:
        doing: what failed, for the message.

    Raises:
        UnavailableError: it cannot.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as cause:
        check_lack(cause, doing)
