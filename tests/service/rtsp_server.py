"""A camera in the network: an RTSP server of Motion JPEG over TCP.

Source: RFC 2326 (RTSP), RFC 3550 (RTP), RFC 2435 (JPEG in RTP).
"""

import contextlib
import itertools
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
from numpy.typing import NDArray

_PART_BYTES = 1200
_SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\nm=video 0 RTP/AVP 26\r\na=control:track\r\n"


class RtspServer:
    """Sends pictures again and again to each client that asks for them.

    Attributes:
        hangs: whether it accepts clients, and says nothing to them.
    """

    def __init__(self, port: int, pictures: Sequence[NDArray[Any]], fps: float = 30.0) -> None:
        self.show(pictures)
        self.hangs = False
        self._spoilt: dict[socket.socket, bytes] = {}
        self._interval_s = 1 / fps
        self._is_over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._clients: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def show(self, pictures: Sequence[NDArray[Any]]) -> None:
        """Send these pictures from now on."""
        self._frames = [_read_jpeg(picture) for picture in pictures]

    def spoil(self, data: bytes = b"") -> None:
        """Send the present clients this instead of pictures, or nothing; later ones get pictures."""
        self._spoilt = dict.fromkeys(self._clients, data)

    def close(self) -> None:
        """Vanish, together with all connections."""
        self._is_over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60)
        self._listener.close()
        for client in self._clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(60)
        for client in self._clients:
            client.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._clients.append(client)
                thread = threading.Thread(target=self._serve, args=[client])
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as lines:
            while not self._is_over.is_set():
                head = itertools.takewhile(
                    lambda line: line not in (b"", b"\r\n"), iter(lines.readline, None)
                )
                request = b"".join(head).decode("latin-1")
                method, number = request.split(" ")[0], re.search(r"CSeq: *(\d+)", request)
                while self.hangs and not self._is_over.is_set():
                    time.sleep(self._interval_s)
                if number is None:
                    return
                fields, body = f"CSeq: {number[1]}\r\nSession: 1\r\n", ""
                if method == "DESCRIBE":
                    body = _SDP
                    fields += f"Content-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
                elif method == "SETUP":
                    fields += "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n"
                elif method == "OPTIONS":
                    fields += "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
                client.sendall(f"RTSP/1.0 200 OK\r\n{fields}\r\n{body}".encode())
                if method == "PLAY":
                    self._play(client)

    def _play(self, client: socket.socket) -> None:
        sequence = 0
        begin_s = time.monotonic()
        while not self._is_over.wait(self._interval_s):
            if self.hangs or client in self._spoilt:
                client.sendall(b"" if self.hangs else self._spoilt[client])
                continue
            stamp = round(90_000 * (time.monotonic() - begin_s))
            frames = self._frames
            picture = frames[round((time.monotonic() - begin_s) / self._interval_s) % len(frames)]
            for payload, is_last in picture:
                head = struct.pack(">BBHII", 0x80, 26 | is_last << 7, sequence % 65536, stamp, 1)
                client.sendall(struct.pack(">cBH", b"$", 0, len(head) + len(payload)) + head + payload)
                sequence += 1


def _read_jpeg(picture: NDArray[Any]) -> list[tuple[bytes, bool]]:
    """Return the payloads of a picture, uint8 [height, width, 3] in RGB, each with whether it is the last."""
    height, width = picture.shape[:2]
    _, encoded = cv2.imencode(".jpg", cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    data = encoded.tobytes()
    tables, at = b"", 2
    while data[at + 1] != 0xDA:  # the scan
        size = int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == 0xDB:
            segment = data[at + 4 : at + 2 + size]
            tables += b"".join(segment[begin + 1 : begin + 65] for begin in range(0, len(segment), 65))
        at += 2 + size
    scan = data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") : -2]
    return list(_split(scan, tables, width // 8, height // 8))


def _split(scan: bytes, tables: bytes, width: int, height: int) -> Iterator[tuple[bytes, bool]]:
    for offset in range(0, len(scan), _PART_BYTES):
        head = struct.pack(">IBBBB", offset, 1, 255, width, height)  # 4:2:0, with tables
        head += struct.pack(">BBH", 0, 0, len(tables)) + tables if offset == 0 else b""
        yield head + scan[offset : offset + _PART_BYTES], offset + _PART_BYTES >= len(scan)
