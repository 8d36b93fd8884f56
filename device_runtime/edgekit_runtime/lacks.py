"""What a machine may lack for a moment, such as descriptors: no verdict on what was to be read.

A full disk is none of it: reading needs no space, and what cannot be written says so by `OutputError`.
"""

import errno
import os
from typing import Final

from edgekit_runtime.errors import UnavailableError

_LACKS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
_RETRY_AFTER_S: Final = 1.0


def is_lack(cause: BaseException) -> bool:
    """Return whether `cause` says that the machine lacks descriptors or memory."""
    return isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _LACKS)


def check_lack(cause: BaseException, doing: str) -> None:
    """Return where `cause` is no lack of the machine.

    Args:
        cause: of the system, or a `MemoryError`.
        doing: what failed, for people.

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
    """Return where this process can open a file: of a failure that does not say why, that is not the reason.

    Args:
        doing: what failed, for people.

    Raises:
        UnavailableError: it cannot.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as cause:
        check_lack(cause, doing)
