"""Connections to a Unix socket with time limits that the kernel enforces."""

import socket
import struct


def connect_local(path: str, timeout_s: float) -> socket.socket:
    """Return a connection to the Unix socket at `path`. `timeout_s` also limits each send and receive.

    Raises:
        OSError: Nobody listens on the socket, or connecting took too long.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A non-blocking socket cannot wait in the queue of a busy listener.
        limit_time(connected, timeout_s)
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


def limit_time(connected: socket.socket, timeout_s: float) -> None:
    """Limit the time of each send and receive. A call that exceeds the limit raises `BlockingIOError`."""
    # A timeout of Python's socket would need one more system call for each send or receive.
    value = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
