"""The device of the offload workloads: heads, codecs, compression and connection of the runtime itself.

Runs inside the emulated device and obeys `OffloadBench`.

A processor cannot be slowed below a tenth by `CpuQuota`. So a device that is k times slower yet waits, after
its head and after the reply, k - 1 times as long as this one takes for the same processor time.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from device_orders import obey
from edgekit_runtime.client.link import Address
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tensors import Array, TensorSpec

PAUSE_S = 0.03  # a device idles between requests, and its caches are cold then


@dataclass
class OpenWay:
    head: OrtSession | None
    tail: str | None
    sent: list[str]
    media: dict[str, MediaCodec]
    compression: Any
    expected: tuple[TensorSpec, ...]


class Runner:
    def __init__(self) -> None:
        self.server: OffloadServer | None = None
        self.timeout_s = 60.0
        self.token = ""
        self.address = Address()
        self.ways: dict[str, OpenWay] = {}
        self.samples: list[dict[str, Array]] = []
        self.turn = 0
        self.share = 1.0

    def connect(self, address: str, token: str, ca_file: str, timeout_s: float) -> None:
        self.address, self.token, self.timeout_s = Address.parse(address, ca_file), token, timeout_s
        self.reconnect()

    def reconnect(self) -> None:
        """Begin with a new connection, which knows nothing of the links before."""
        if self.server is not None:
            self.server.close()
        self.server = OffloadServer(self.address, self.token)

    def load(self, ways: list[dict[str, Any]], samples: str, share: float) -> None:
        """Open every head. `share` is that of a processor which this process gets."""
        self.share = share
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

    def run(self, name: str, slowdown: float = 1.0) -> dict[str, Any]:
        """Run one request, on a device that is slower than this one by a factor."""
        way, feeds = self.ways[name], self.samples[self.turn % len(self.samples)]
        self.turn += 1
        pace = Pace((slowdown - 1) / self.share)
        begin = time.perf_counter()
        made = {} if way.head is None else way.head.run(feeds)
        pace.wait()
        head_end = time.perf_counter()
        found: dict[str, Any] = {"sent_bytes": 0}
        if way.tail is not None:
            assert self.server is not None
            sent = {key: made[key] if key in made else feeds[key] for key in way.sent}
            for key, codec in way.media.items():
                sent[key] = np.frombuffer(encode_media(codec, sent[key][0]), np.uint8)
            request = make_tail_request(way.tail, sent, way.expected, way.compression, self.server.fields)
            pace.wait()
            pending = self.server.send(request, self.timeout_s, lambda _pending, _reply: None)
            pending.done.wait()
            assert pending.reply is not None
            if pending.reply.error is not None:
                found["error"] = str(pending.reply.error)
            found["sent_bytes"] = request.size_bytes
            pace.wait()
        return {"s": time.perf_counter() - begin, "head_s": head_end - begin, **found}

    def rounds(self, ways: list[tuple[str, float, int]], seconds: float) -> list[list[dict[str, Any]]]:
        """Run ways in turn, each round in another order, so that noise hits all alike.

        Args:
            ways: name, slowdown of the device, and how often it runs at least. They get equal time, not equal
                numbers of requests.
            seconds: of all ways together.
        """
        found: list[list[dict[str, Any]]] = [[] for _ in ways]
        spent, orders = [0.0] * len(ways), np.random.default_rng(0)
        for name in {name for name, _, least in ways if least > 1}:
            self.run(name)  # warm-up, which also opens TCP's window
        while True:
            share_s = seconds / max(len(ways), 1)
            left = [n for n, one in enumerate(ways) if len(found[n]) < one[2] or spent[n] < share_s]
            if not left:
                return found
            for n in map(int, orders.permutation(left)):
                time.sleep(PAUSE_S)
                found[n].append(self.run(*ways[n][:2]))
                spent[n] += found[n][-1]["s"] + PAUSE_S


class Pace:
    """Waits for what a slower device takes longer, in proportion to the processor time of this process."""

    def __init__(self, wait_per_cpu_s: float) -> None:
        self._factor, self._cpu_s = wait_per_cpu_s, time.process_time()

    def wait(self) -> None:
        cpu_s = time.process_time()
        time.sleep(self._factor * (cpu_s - self._cpu_s))
        self._cpu_s = cpu_s


if __name__ == "__main__":
    obey(Runner())
