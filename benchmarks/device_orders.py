"""Orders to a program on the emulated device: one line of JSON each, and one with the answer.

They come through a Unix socket, which works from any network namespace.
"""

import json
import socket
import sys


def obey(target: object) -> None:
    """Call the method of `target` that each order names, until the other side closes the socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        lines = connection.makefile("rw", encoding="ascii")
        for line in lines:
            order = json.loads(line)
            answer = getattr(target, order.pop("do"))(**order)
            lines.write(f"{json.dumps(answer)}\n")
            lines.flush()
