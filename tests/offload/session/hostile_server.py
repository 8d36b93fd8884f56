"""A server that is right until it is told to misbehave, on a real socket."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable

import numpy as np
from tests.offload.session.offload_parts import WEIGHT

Misbehave = Callable[["HostileServer", socket.socket, bytes], bytes | None]


class HostileServer:
    """Answers health, and `linear` rightly, or as `misbehave` says: bytes to send, or None to end.

    Attributes:
        port: of TCP on loopback.
        over: set when it shall end.
        refused: compressed bodies, which it does not read.
        probes: paths and bodies of probes of the link.
        stated: headers of its answers to those.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.misbehave: Misbehave | None = None
        self.over = threading.Event()
        self.refused = 0
        self.probes: list[tuple[str, bytes]] = []
        self.stated = ""
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError, ValueError), client:
            while True:
                while b"\r\n\r\n" not in data:
                    data += self._read(client)
                head, _, data = data.partition(b"\r\n\r\n")
                fields = dict(
                    line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if ": " in line
                )
                size = int(fields["content-length"])
                while len(data) < size:
                    data += self._read(client)
                body, data = data[:size], data[size:]
                if head.startswith(b"GET"):
                    client.sendall(http(b"{}"))
                    continue
                if b"/models/edgekit-link-probe/" in head:
                    self.probes.append((head.decode().split()[1], body))
                    client.sendall(http(b"{}", "404 Not Found", self.stated))
                    continue
                if "content-encoding" in fields:
                    self.refused += 1
                    client.sendall(http(b"{}", "415 Unsupported Media Type"))
                    continue
                x = np.frombuffer(body[int(fields["inference-header-content-length"]) :], np.float32)
                right = (x.reshape(-1, 4) @ WEIGHT).tobytes()
                reply = tensor_reply(right) if self.misbehave is None else self.misbehave(self, client, right)
                if reply is None:
                    return
                client.sendall(reply)

    def _read(self, client: socket.socket) -> bytes:
        found = client.recv(65536)
        if not found:
            raise ValueError("closed")
        return found

    def hang_up(self) -> None:
        """End all connections; new ones are accepted."""
        while self._clients:
            with contextlib.suppress(OSError):
                self._clients.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.over.set()
        self._listener.close()
        for client in self._clients:
            client.close()


def http(body: bytes, status: str = "200 OK", fields: str = "", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{fields}Content-Length: {size}\r\n\r\n".encode() + body


def tensor_reply(data: bytes, fields: str = "", request_id: str | None = None, **changes: object) -> bytes:
    entry = {
        "name": "y",
        "datatype": "FP32",
        "shape": [len(data) // 8, 2],
        "parameters": {"binary_data_size": len(data)},
        **changes,
    }
    repeated = {} if request_id is None else {"id": request_id}
    text = json.dumps({"model_name": "linear", **repeated, "outputs": [entry]}).encode()
    fields += f"Inference-Header-Content-Length: {len(text)}\r\n"
    return http(text + data, fields=fields)
