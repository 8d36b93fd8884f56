"""A port for servers of tests."""

import itertools
import os
import socket
from typing import Final

# Below the ports that the kernel gives to connections, one of which could take a port before its server does.
_FIRST: Final = 10_000
_COUNT: Final = 22_000
_numbers: Final = itertools.count(4001 * os.getpid())  # processes that run side by side begin far apart
_reserved: Final[list[socket.socket]] = []


def free_port() -> int:
    """Return a port of the loopback on which nothing listens; no test of this machine gets it again.

    A name in the abstract namespace reserves it, until this process ends.
    """
    for number in _numbers:
        port = _FIRST + number % _COUNT
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0edgekit-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _reserved.append(name)
        return port
    raise AssertionError("unreachable")
