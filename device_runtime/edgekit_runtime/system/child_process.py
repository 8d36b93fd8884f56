"""Child processes that run a module of ours: how they find it, and what is said of how they ended."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_YIELDING: Final = 5  # niceness above ours: a third of the weight, so that it is slowed but not starved


def child_environment() -> dict[str, str]:
    """Return this process's environment, with what it imports from as the import path of a child.

    Run a child in a folder of ours all the same: `python -m` looks for modules in the working folder first,
    and in a user's folder anything may lie there.
    """
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}


def open_standard_descriptors() -> None:
    """Open `/dev/null` where this process was started without a standard descriptor.

    Else the next file or socket takes its place, into which engines print, and which children cannot get.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # noqa: PERF203  # each is a try of its own
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free, which is this one
            os.set_inheritable(descriptor, True)


def describe_end(exit_code: int) -> str:
    """Return `with exit code 3` or `by SIGSEGV`, to follow the word 'ended'.

    Args:
        exit_code: negative for a signal, as `subprocess` has it.
    """
    return f"by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"with exit code {exit_code}"


def end_now(exit_code: int) -> NoReturn:
    """End this process with all its threads, also those that an engine does not come back from.

    Python would wait for them, or end while they run: an engine that then comes back aborts the process.

    Args:
        exit_code: of the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def give_way(process: int) -> None:
    """Let this process have the processors first where they are scarce; `process` leads a session of its own.

    Where the kernel shares the processors among sessions (autogroup), niceness counts only within one, so the
    whole session is told too. What the system refuses is left as it is.

    Source: sched(7), "The autogroup feature".
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, 0) + _YIELDING)
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/autogroup").write_text(str(_YIELDING))


def end_with(parent: int) -> None:
    """Let the kernel end this process when the process `parent`, that started it, ends in any way.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc or musl: the channel's end tells it too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
