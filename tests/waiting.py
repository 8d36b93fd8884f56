"""Waits that end: with what was waited for, or with a failure that says what did not come."""

import contextlib
import errno
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any, AnyStr, BinaryIO

SHARED_S = 3600.0
"""Limit of a process that the tests of a file share; what hangs is a test, which `tests/conftest.py` ends."""


def wait_for(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "it to hold",
    limit_s: float = 120.0,
    *,
    progress: Callable[[], Any] = lambda: None,
) -> Any:
    """Return what `condition` returns once that is true; it is asked for a twentieth of the time at most.

    Args:
        condition: what is waited for.
        what: its name, or what says at the end what did not come.
        limit_s: time without progress after which the wait fails.
        progress: returns another value as long as there is progress; by default there is none. It is asked
            ten times in `limit_s`.
    """
    begin_s = asked_s = looked_s = time.monotonic()
    last = progress()
    while not (found := condition()):
        now_s = time.monotonic()
        if now_s >= min(looked_s + limit_s / 10, begin_s + limit_s):
            looked_s = now_s
            if (current := progress()) != last:
                last, begin_s = current, now_s
        if now_s >= begin_s + limit_s:
            raise AssertionError(f"waited {limit_s} s for: {what if isinstance(what, str) else what()}")
        time.sleep(min(max(20 * (now_s - asked_s), 0.01), 0.25))
        asked_s = time.monotonic()
    return found


def allow(seconds: float) -> None:
    """Let a test of many commands take longer than pyproject.toml allows; it still ends at a hang."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_when_read(pipe: Path, may_come: Callable[[], bool]) -> BinaryIO:
    """Open `pipe` for writing once it is read, while that `may_come`: open() would wait for the dead too."""

    def opened() -> BinaryIO | None:
        assert may_come(), f"who was to read {pipe.name} has ended"
        try:
            return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "wb")
        except OSError as error:
            if error.errno != errno.ENXIO:  # which says that nobody reads it yet
                raise
            return None

    file: BinaryIO = wait_for(opened, f"a reader of {pipe.name}")
    return file


@contextlib.contextmanager
def bounded(process: "Popen[AnyStr]", limit_s: float = 240.0) -> Iterator["Popen[AnyStr]"]:
    """End `process` after the block; kill it after `limit_s`, which ends all that waits for it, and fail."""
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.terminate()
        assert not timer.finished.is_set(), f"{process.args!r} did not end within {limit_s} s"
    finally:
        timer.cancel()
