"""Connections to a Unix socket, and time limits that the kernel keeps."""

import socket
import struct


def connect_local(path: str, timeout_s: float) -> socket.socket:
    """Return a connection to the Unix socket at `path`; sending and receiving have the same time limit.

    Raises:
        OSError: nobody listens there, or connecting took too long.
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
    """Limit how long each call that sends or receives may wait; then it raises `BlockingIOError`.

    The kernel enforces the limit. With Python's own time-out, each call would poll first.
    """
    value = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
