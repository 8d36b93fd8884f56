"""The floor of a transport: python serve_bytes.py UP_BYTES DOWN_BYTES PORT.

Receives UP_BYTES into one buffer, answers with DOWN_BYTES, and so on, for one client at a time.
"""

import socket
import sys

up_bytes, down_bytes, port = map(int, sys.argv[1:])
received, answer = memoryview(bytearray(up_bytes)), bytes(down_bytes)
with socket.create_server(("127.0.0.1", port)) as listener:
    while True:
        connected, _ = listener.accept()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connected:
            count = filled = 0
            while count := connected.recv_into(received[filled:]):
                filled += count
                if filled == up_bytes:
                    connected.sendall(answer)
                    filled = 0
