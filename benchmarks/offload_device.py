"""The device of the offload benchmarks: runs inside the emulated device, and obeys `offload_bench.Device`.

It connects to a Unix socket, which works from any network namespace, and reads orders, one line of JSON each.
"""

import telemetry_off  # noqa: F401

import json
import socket
import ssl
import sys
import time
from typing import Any

import numpy as np
import onnxruntime

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError


class SendClock:
    """Time that the client spends in `send`, which is what some estimate bandwidth from."""

    def __init__(self) -> None:
        self.seconds = 0.0
        plain = ssl.SSLSocket.sendall

        def timed(connection: ssl.SSLSocket, data: Any, flags: int = 0) -> None:
            begin = time.perf_counter()
            try:
                plain(connection, data, flags)
            finally:
                self.seconds += time.perf_counter() - begin

        ssl.SSLSocket.sendall = timed  # type: ignore[method-assign]


class Runner:
    """Ways to run models, by hand: a head here, a tail there."""

    def __init__(self) -> None:
        self.send_clock = SendClock()
        self.client: Client | None = None
        self.ways: dict[str, tuple[onnxruntime.InferenceSession | None, list[str], str | None]] = {}
        self.feeds: dict[str, np.ndarray] = {}
        self.expected: list[np.ndarray] = []
        self.outputs: list[str] = []
        self.tolerance = 0.0

    def connect(self, address: str, token: str | None, ca_file: str | None, timeout_s: float) -> None:
        self.client = Client(address, token=token, ca_file=ca_file, timeout_s=timeout_s)

    def reconnect(self) -> None:
        """Begin with a new connection, which knows nothing of the links before."""
        assert self.client is not None
        self.client.close()

    def time_heads(self, ways: list[str], rounds: int, pause_s: float) -> dict[str, float]:
        """Return the median time of each head, with pauses as between requests: caches are then cold."""
        found: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for name in ways:
                head, names, _ = self.ways[name]
                if head is None:
                    continue
                time.sleep(pause_s)
                begin = time.perf_counter()
                head.run(names, self.feeds)
                found.setdefault(name, []).extend([time.perf_counter() - begin] if number else [])
        return {name: float(np.median(each)) for name, each in found.items()}

    def load(self, ways: list[dict[str, Any]], feeds: str, local: str, tolerance: float) -> None:
        """Open every head, and compute what is right from the whole model."""
        self.ways.clear()
        with np.load(feeds) as found:
            self.feeds = dict(found)
        whole = self._open(local)
        self.outputs = [one.name for one in whole.get_outputs()]
        self.expected, self.tolerance = whole.run(None, self.feeds), tolerance
        for way in ways:
            head = None if way["head"] is None else self._open(way["head"])
            names = [] if head is None else [one.name for one in head.get_outputs()]
            self.ways[way["name"]] = (head, names, way["tail"])

    def run(self, name: str) -> dict[str, Any]:
        """Run one request."""
        head, names, tail = self.ways[name]
        self.send_clock.seconds = 0.0
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            tensors = self.feeds
            if head is not None:
                tensors = dict(zip(names, head.run(names, self.feeds), strict=True))
            if tail is not None:
                assert self.client is not None
                tensors = self.client.infer(tail, tensors)
        except EdgekitError as cause:
            return {"s": time.perf_counter() - begin, "error": str(cause)}
        end, end_cpu = time.perf_counter(), time.process_time()
        wrong = max(
            float(np.abs(tensors[key] - right).max(initial=0.0))
            for key, right in zip(self.outputs, self.expected, strict=True)
        )
        return {
            "s": end - begin,
            "cpu_s": end_cpu - begin_cpu,
            "send_s": self.send_clock.seconds,
            "is_right": wrong <= self.tolerance,
        }

    def rounds(
        self, ways: list[str], seconds: float, least: int, way_seconds: float
    ) -> dict[str, list[dict[str, Any]]]:
        """Run the ways in turn, each round in another order, so that noise hits all alike."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        spent = dict.fromkeys(ways, 0.0)
        orders, until_s = np.random.default_rng(0), time.monotonic() + seconds
        for name in ways:
            self.run(name)  # warm-up, which also opens TCP's window
        while True:
            left = [one for one in ways if len(found[one]) < least or spent[one] < way_seconds]
            if not left or (time.monotonic() > until_s and all(len(one) >= least for one in found.values())):
                return found
            for name in orders.permutation(left):
                found[name].append(self.run(name))
                spent[name] += found[name][-1]["s"]

    @staticmethod
    def _open(path: str) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(path, options)


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
