"""A port for servers of tests."""

import socket


def free_port() -> int:
    """Return a port of the loopback on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
