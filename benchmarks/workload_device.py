"""The device of the offload workloads: heads, codecs, compression and connection of the runtime itself.

Runs inside the emulated device and obeys `OffloadBench`, one line of JSON each.
"""

import telemetry_off  # noqa: F401

import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.client.link import Address
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.remote.offload_server import OffloadServer, make_tail_request
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import Array, TensorSpec

PAUSE_S = 0.03  # a device idles between requests, and its caches are cold then


@dataclass
class OpenWay:
    """A way that is ready to run."""

    head: OrtSession | None
    tail: str | None
    sent: list[str]
    media: dict[str, MediaCodec]
    compression: Any
    expected: tuple[TensorSpec, ...]


class Runner:
    """Runs requests, each on the next sample."""

    def __init__(self) -> None:
        self.server: OffloadServer | None = None
        self.timeout_s = 60.0
        self.token = ""
        self.address = Address()
        self.ways: dict[str, OpenWay] = {}
        self.samples: list[dict[str, Array]] = []
        self.turn = 0

    def connect(self, address: str, token: str, ca_file: str, timeout_s: float) -> None:
        self.address, self.token, self.timeout_s = Address.parse(address, ca_file), token, timeout_s
        self.reconnect()

    def reconnect(self) -> None:
        """Begin with a new connection, which knows nothing of the links before."""
        if self.server is not None:
            self.server.close()
        self.server = OffloadServer(self.address, self.token)

    def load(self, ways: list[dict[str, Any]], samples: str) -> None:
        """Open every head."""
        with np.load(samples) as found:
            for key in found:
                number, name = key.split("|", 1)
                if int(number) == len(self.samples):
                    self.samples.append({})
                self.samples[int(number)][name] = found[key]
        for way in ways:
            head = None if way["head"] is None else OrtSession(Path(way["head"]), OrtOptions(threads=1))
            self.ways[way["name"]] = OpenWay(
                head, way["tail"], way["sent"],
                {name: MediaCodec.parse(codec) for name, codec in way["media"].items()},
                way["compression"],
                tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in way["outputs"]),
            )  # fmt: skip

    def run(self, name: str) -> dict[str, Any]:
        """Run one request."""
        way, feeds = self.ways[name], self.samples[self.turn % len(self.samples)]
        self.turn += 1
        begin = time.perf_counter()
        made = {} if way.head is None else way.head.run(feeds)
        head_end = time.perf_counter()
        found: dict[str, Any] = {"sent_bytes": 0}
        if way.tail is not None:
            assert self.server is not None
            sent = {key: made[key] if key in made else feeds[key] for key in way.sent}
            for key, codec in way.media.items():
                sent[key] = np.frombuffer(encode_media(codec, sent[key][0]), np.uint8)
            request = make_tail_request(way.tail, sent, way.expected, way.compression, self.server.fields)
            pending = self.server.send(request, self.timeout_s, lambda _pending, _reply: None)
            pending.done.wait()
            assert pending.reply is not None
            if pending.reply.error is not None:
                found["error"] = str(pending.reply.error)
            found["sent_bytes"] = request.size_bytes
        return {"s": time.perf_counter() - begin, "head_s": head_end - begin, **found}

    def rounds(self, least: dict[str, int], seconds: float) -> dict[str, list[dict[str, Any]]]:
        """Run ways in turn, each round in another order, so that noise hits all alike.

        Args:
            least: way -> how often it runs at least. Ways get equal time, not equal numbers of requests.
            seconds: of all ways together.
        """
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in least}
        spent, orders = dict.fromkeys(least, 0.0), np.random.default_rng(0)
        for name, rounds in least.items():
            if rounds > 1:
                self.run(name)  # warm-up, which also opens TCP's window
        while True:
            share_s = seconds / len(least)
            left = [one for one in least if len(found[one]) < least[one] or spent[one] < share_s]
            if not left:
                return found
            for name in map(str, orders.permutation(left)):
                time.sleep(PAUSE_S)
                found[name].append(self.run(name))
                spent[name] += found[name][-1]["s"] + PAUSE_S


def main() -> None:
    """Obey until the connection closes."""
    runner = Runner()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        lines = connection.makefile("rw", encoding="ascii")
        for line in lines:
            order = json.loads(line)
            answer = getattr(runner, order.pop("do"))(**order)
            lines.write(f"{json.dumps(answer)}\n")
            lines.flush()


if __name__ == "__main__":
    main()
