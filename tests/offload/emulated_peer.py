"""Both ends of a measured connection: `serve HOST PORT`, `measure HOST PORT SIZE` or `repeat HOST PORT SIZE`.

An exchange is two numbers of 4 bytes, how much follows and how much is asked for, and then that many bytes.
"""

import contextlib
import json
import socket
import sys
import threading
import time


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 16))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _answer(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, contextlib.suppress(EOFError, OSError):
        while True:
            head = _receive(connection, 8)
            _receive(connection, int.from_bytes(head[:4], "big"))
            connection.sendall(bytes(int.from_bytes(head[4:], "big")))


def serve(host: str, port: int) -> None:
    listener = socket.create_server((host, port))
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


class Client:
    """A connection to `serve`."""

    def __init__(self, host: str, port: int, limit_s: float = 30.0) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self._connection = socket.create_connection((host, port), timeout=limit_s)
                self.exchange(1, 1)
                break
            except (OSError, EOFError):  # the server starts, and a proxy accepts before it does
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, up_bytes: int, down_bytes: int) -> float:
        """Return how long it takes to send and to receive that much, in seconds."""
        begin = time.perf_counter()
        self._connection.sendall(
            up_bytes.to_bytes(4, "big") + down_bytes.to_bytes(4, "big") + bytes(up_bytes)
        )
        _receive(self._connection, down_bytes)
        return time.perf_counter() - begin


def measure(host: str, port: int, size: int) -> None:
    """Print round trip and bandwidth; the least of several tries is what other work did not disturb."""
    client = Client(host, port)
    rtt_s = min(client.exchange(1, 1) for _ in range(20))
    client.exchange(size, size)
    up_s, down_s = (
        min(client.exchange(*sizes) for _ in range(6)) - rtt_s for sizes in ((size, 1), (1, size))
    )
    rates = {"up_mbit_s": size * 8 / up_s / 1e6, "down_mbit_s": size * 8 / down_s / 1e6}
    print(json.dumps({"rtt_ms": rtt_s * 1e3, **rates}))


def repeat(host: str, port: int, size: int) -> None:
    """Send that much over one connection again and again, and print how long each takes."""
    client = Client(host, port)
    while True:
        print(client.exchange(size, 1), flush=True)


if __name__ == "__main__":
    {"serve": serve, "measure": measure, "repeat": repeat}[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
