"""The process of a command: its standard descriptors, and its end at any time."""

import logging
import os
import sys
from typing import NoReturn


def open_standard_descriptors() -> None:
    """Open `/dev/null` for each standard descriptor that this process was started without.

    Otherwise the next file or socket gets such a number: engines print into it, and children cannot inherit
    it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  # each is a try of its own
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)


def end_now(exit_code: int) -> NoReturn:
    """End this process at once, even while its threads run in an engine.

    Python would wait for such threads, or end while they run; an engine that returns then aborts the process.

    Args:
        exit_code: exit code of the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
