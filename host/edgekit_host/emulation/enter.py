"""Runs a command in a network namespace, in a cgroup, or on all processors but one.

    enter NAMESPACE PROCS CPU COMMAND

CPU is the processor to avoid. `-` stands for no namespace, cgroup or processor. The command replaces this
process and keeps its process id. It is killed when its parent process ends.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from edgekit_runtime.system.child_process import end_with_parent

CLONE_NEWNET: Final = 0x4000_0000
NOTHING: Final = "-"


def enter_network(descriptor: int) -> None:
    """Move the calling thread into the network namespace of an open file descriptor.

    Raises:
        OSError: The descriptor is not a namespace, or this process may not enter it.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` exists from Python 3.12 on
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter the network namespace: {os.strerror(code)}")


def main() -> None:
    """Enter the namespace and the cgroup in the arguments, avoid the processor, and run the command."""
    end_with_parent()
    namespace, procs_file, avoided_cpu, *command = sys.argv[1:]
    if avoided_cpu != NOTHING:
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus - {int(avoided_cpu)} or cpus)
    if procs_file != NOTHING:
        Path(procs_file).write_text(str(os.getpid()))
    if namespace != NOTHING:
        descriptor = os.open(namespace, os.O_RDONLY)
        enter_network(descriptor)
        os.close(descriptor)
    os.execvp(command[0], command)  # noqa: S606  # an argument list, no shell


if __name__ == "__main__":
    main()
