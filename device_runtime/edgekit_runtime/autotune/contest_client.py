"""One process of a contest as its parent sees it: started, listened to, and ended where it hangs."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any, Final

from edgekit_runtime.errors import BackendError, PackageError
from edgekit_runtime.system.child_process import child_environment, describe_end

_MODULE: Final = "edgekit_runtime.autotune.contest_child"
_FIRST_WORD_S: Final = 60.0  # until it has read the package
_ENDING_S: Final = 5.0
_CHUNK_BYTES: Final = 1 << 16


def ask_process(order: dict[str, Any]) -> list[float | str]:
    """Return what a new process has measured; it has ended, whatever happens here.

    Args:
        order: a `MeasureOrder` as JSON.

    Raises:
        BackendError: it died, or did not say anything for longer than it had announced.
        PackageError: the package is no longer what it was.
    """
    with tempfile.TemporaryFile() as words, _start(words) as process:
        answers: list[float | str] | None = None
        with contextlib.suppress(BrokenPipeError):  # how it ended says more
            _tell(process, order)
            for line in _lines(process):
                if isinstance(line, list):
                    answers = line
        code = _wait(process)
        words.seek(0)
        said = words.read().decode("utf-8", "replace").strip().splitlines()[-1:]  # engines print anything
    if code == PackageError.exit_code:
        raise PackageError(said[0] if said else "the package cannot be read any more; try again")
    if code or answers is None:
        last = f"its last words: {said[0]}" if said else "without a word"
        raise BackendError(f"the measuring process ended {describe_end(code)}, {last}")
    return answers


@contextlib.contextmanager
def _start(words: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=words,
        cwd="/",  # nobody but the system's owner can put modules there
        env=child_environment(),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # also on Ctrl-C


def _tell(process: "subprocess.Popen[bytes]", order: dict[str, Any]) -> None:
    assert process.stdin is not None  # noqa: S101  # for the type checker: it is a pipe
    with process.stdin as pipe:
        pipe.write(json.dumps(order).encode())


def _lines(process: "subprocess.Popen[bytes]") -> Iterator[Any]:
    """Yield what the process says; a number is for how many seconds it may be silent after that."""
    assert process.stdout is not None  # noqa: S101  # for the type checker: it is a pipe
    source, pending, silent_s = process.stdout.fileno(), b"", _FIRST_WORD_S
    end_s = time.monotonic() + silent_s
    while True:
        if not select.select([source], [], [], max(end_s - time.monotonic(), 0.0))[0]:
            raise BackendError(f"the measuring process hung: nothing came of it for {silent_s:.0f} s")
        chunk = os.read(source, _CHUNK_BYTES)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in map(json.loads, lines):
            if isinstance(line, int | float):
                silent_s = line
                end_s = time.monotonic() + silent_s
            yield line


def _wait(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        raise BackendError(f"the measuring process hung: it did not end within {_ENDING_S:g} s") from None
