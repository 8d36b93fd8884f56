"""A worker that says it is ready and lies of a version that it is told to try; its environment tells how."""

import json
import os
import socket
import sys
import time
from array import array
from types import SimpleNamespace
from typing import Any

from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.worker_wire.channel import Kind
from edgekit_runtime.service.worker_wire.messages import TrialReport
from edgekit_runtime.service.worker_wire.snapshots import write_snapshots

ARM = {"answers": 3, "failed": 0}


def write_counts() -> Any:
    """Return the counts of a version that nobody asked, as a worker tells them."""
    version = SimpleNamespace(version="1", metrics=LaneMetrics("", ""), to_json=dict)
    counts, _ = json.loads(write_snapshots([version]))["1"]  # type: ignore[list-item]
    return counts


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    room = socket.CMSG_SPACE(3 * array("i").itemsize)
    channel.recvmsg(16, room)

    def say(kind: Kind, payload: bytes = b"") -> None:
        channel.send(bytes((kind,)) + payload)

    def tell(outcome: str) -> None:
        word = TrialReport(version, outcome, "gate", "reason")  # type: ignore[arg-type]
        say(Kind.WORKER_TRIAL, word.to_bytes())

    say(Kind.WORKER_READY)
    packet, *_ = channel.recvmsg(1 << 16, room)
    while packet[0] != Kind.MAIN_TRY:
        packet, *_ = channel.recvmsg(1 << 16, room)
    version = json.loads(packet[1:])["version"]
    if os.environ["LIE"] == "promote":  # before it is loaded
        tell("promote")
    if os.environ["LIE"] == "tried":  # without a word of what is known
        tell("tried")
    if os.environ["LIE"] in ("early", "failing"):  # against its own counts
        failed = {**ARM, "answers": 10**9, "failed": 10**9}
        candidate = ARM if os.environ["LIE"] == "early" else failed
        rollout = {"current": {**ARM, "answers": 10**9}, "candidate": candidate, "agreement": None}
        said = [write_counts(), {"variant": "x", "rollout": rollout}]
        say(Kind.WORKER_HEARTBEAT, json.dumps({version: said}).encode())
        tell("tried")
        tell("promote")
    if os.environ["LIE"] == "beat":
        rollout = {"current": ARM, "candidate": {**ARM, "answers": "many"}, "agreement": None}
        say(Kind.WORKER_HEARTBEAT, json.dumps({version: [{}, {"variant": "x", "rollout": rollout}]}).encode())
    time.sleep(600)


if __name__ == "__main__":
    main()
