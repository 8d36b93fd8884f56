"""How many descriptors a process has open, and processes that have none free."""

import contextlib
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def list_free(pid: int) -> Iterator[int]:
    """Yield the descriptors that the process would open next."""
    entries = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208  # at once: it has a descriptor of its own
    used = {int(name) for name in entries if Path(f"/proc/{pid}/fd/{name}").is_symlink()}
    return (number for number in itertools.count() if number not in used)


def count_descriptors(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextlib.contextmanager
def without_descriptors(pid: int, spare: int = 0) -> Iterator[None]:
    """Let a process open none but `spare` more, while those that it has go on."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = next(itertools.islice(list_free(pid), spare, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
