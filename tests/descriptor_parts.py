"""Processes that have no descriptor free."""

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def find_lowest_free(pid: int) -> int:
    """Return the descriptor that the process would open next."""
    if pid == os.getpid():
        found = os.open(os.devnull, os.O_RDONLY)
        os.close(found)
        return found
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in used)


@contextlib.contextmanager
def without_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open none but `spare` more, while those that it has go on."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (find_lowest_free(pid) + spare, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
