"""A worker that says it is ready, and then sends what it should not; which, its environment tells."""

import os
import random
import socket
import sys
import time
from array import array

from edgekit_runtime.service.worker_wire.channel import Kind
from edgekit_runtime.service.worker_wire.messages import INDEX

CLOSED = bytes((Kind.WORKER_CLOSED,))
RETURNS = bytes((Kind.WORKER_RETURNS,))
BEAT = bytes((Kind.WORKER_HEARTBEAT,))
TRIAL = bytes((Kind.WORKER_TRIAL,))
MORE = 0x80


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.recvmsg(16, socket.CMSG_SPACE(3 * array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
    channel.send(bytes((Kind.WORKER_READY,)))
    while (packet := channel.recv(1 << 16)) and packet[0] != Kind.MAIN_LEND:
        pass  # first it is lent a connection
    seed = int(os.environ["ROGUE"])
    source = random.Random(seed)
    for packet in ROGUES[seed] if seed < len(ROGUES) else [source.randbytes(source.randrange(1, 300))] * 3:
        channel.send(packet)
    if seed == len(ROGUES):
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 0]))
        channel.sendmsg([CLOSED + INDEX.pack(0)], [rights])
    time.sleep(600)


ROGUES = [
    [CLOSED + INDEX.pack(7)],
    [CLOSED],
    [RETURNS + INDEX.pack(1 << 31)],
    [bytes((Kind.WORKER_READY,))],
    [bytes((Kind.MAIN_LEND,)) + bytes(100)],
    [b"\x00"],
    [b"\x7f" * 50],
    [BEAT + b"{"],
    [BEAT + b"[" * 100_000],
    [BEAT + b'{"succeeded": -1}'],
    [BEAT + b'{"succeeded": 1e999}'],
    [BEAT + b'{"1.0.0": [{}, {"variant": NaN}]}'],
    [TRIAL + b'{"version": "1.0.0", "outcome": "promote"}'],
    [TRIAL + b'{"version": "9.0.0", "outcome": "rollback", "gate": "", "reason": ""}'],
    [TRIAL + b'{"version": "9.0.0", "outcome": "win"}'],
    [TRIAL + b'{"version": ["9"], "outcome": "tried"}'],
    [TRIAL + b'{"surprise": 1}'],
    [bytes((Kind.WORKER_HEARTBEAT | MORE,)) + bytes(30_000)] * 200,
    [bytes((Kind.WORKER_HEARTBEAT | MORE,)) + b"{", CLOSED + INDEX.pack(0)],
    [bytes(100_000)],
]

if __name__ == "__main__":
    main()
