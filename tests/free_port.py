"""A port for servers of tests."""

import itertools
import os
import socket
from typing import Final

# Below the ports that the kernel gives to connections, one of which could take a port before its server does.
_FIRST: Final = 10_000
_COUNT: Final = 22_000
_numbers: Final = itertools.count(4001 * os.getpid())  # processes that run side by side begin far apart


def free_port() -> int:
    """Return a port of the loopback on which nothing listens; each call in a process returns another."""
    for number in _numbers:
        port = _FIRST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable")
