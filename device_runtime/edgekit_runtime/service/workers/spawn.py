"""Starting a worker process, which gets its order, its package and the memory of its leases."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from array import array
from typing import Final

from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.service.worker_wire.messages import Order
from edgekit_runtime.system.child_process import child_environment

_MODULE: Final = "edgekit_runtime.service.worker"


def start(order: Order, package: int, table: int) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Return a worker that was started, and this end of its channel.

    Args:
        order: what it is to do.
        package: descriptor of the package.
        table: descriptor of the memory of the leases.

    Raises:
        OSError: it cannot be started.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        try:
            _send_order(near, order, package, table)
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(far.fileno())],
                cwd="/",  # nobody but the system's owner can put modules there
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(far.fileno(),),
            )
        except BaseException:
            near.close()
            raise
    return process, near


def _send_order(near: socket.socket, order: Order, package: int, table: int) -> None:
    order_file = os.memfd_create("edgekit-order", os.MFD_CLOEXEC)
    with os.fdopen(order_file, "w") as file:
        json.dump(to_plain(order), file)
        file.flush()
        passed = array("i", (order_file, package, table))
        near.sendmsg([b"open"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that can be read once the process has ended, or None before Linux 5.3."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None
