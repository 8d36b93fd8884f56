"""Devices that send requests to a server at random times, whether it keeps up or not: an open loop.

    load_generator.py CPU ORDER

CPU may be `-`. Prints latencies as JSON and ends. Each device is a connection with TLS; its requests arrive
by a Poisson process. Latency counts from the moment at which a request was due.

With `local_s` in the order, devices do what `RemoteSession` does: while the server says that it is loaded, or
refuses, they answer by themselves in that time, and ask again after 20 times what a request took.
"""

import asyncio
import json
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.offload.choose import LOADED

OK = 200
KINDS = ("remote", "local", "errors")
END = b"\r\n\r\n"
LOAD = b"application_utilization="
PROBE_SHARE, LEAST_PROBE_S, MOST_PROBE_S = 20, 0.25, 30.0  # of `RemoteSession`


class Device:
    """One device, connected.

    Attributes:
        remote, local: latencies in seconds, of requests behind the warm-up.
        errors: statuses other than 200 that an application would see.
    """

    def __init__(self, order: dict[str, Any], seed: int, requests: list[bytes]) -> None:
        self.remote: list[float] = []
        self.local: list[float] = []
        self.errors: list[int] = []
        self._order, self._requests = order, requests
        self._draws, self._clock = np.random.default_rng(seed), asyncio.get_running_loop().time
        self._probe_s: float | None = None  # when a device that stays local asks again
        self._probe: asyncio.Future[int] | None = None
        self._streams: Any = None

    async def run(self, begin_s: float) -> None:
        order, draws = self._order, self._draws
        context = ssl.create_default_context(cafile=order["ca_file"])
        self._streams = await asyncio.open_connection(order["host"], order["port"], ssl=context)
        due_s = begin_s + draws.exponential(1 / order["requests_per_s"])
        while due_s < begin_s + order["warm_s"] + order["seconds"]:
            await asyncio.sleep(max(due_s - self._clock(), 0))
            await self._serve(due_s, is_counted=due_s >= begin_s + order["warm_s"])
            due_s += draws.exponential(1 / order["requests_per_s"])
        if self._probe is not None:
            await self._probe
        self._streams[1].close()

    async def _serve(self, due_s: float, *, is_counted: bool) -> None:
        local_s = self._order.get("local_s")
        status = 0
        if self._probe_s is None:
            status = await self._ask()
        if status == OK:
            self.remote += [self._clock() - due_s] * is_counted
        elif local_s is None:
            self.errors += [status] * is_counted
        else:
            await asyncio.sleep(local_s)
            self.local += [self._clock() - due_s] * is_counted
            if self._probe_s is not None and self._clock() >= self._probe_s:
                self._probe_s = float("inf")  # until its reply
                self._probe = asyncio.ensure_future(self._ask())  # beside the application, as it does

    async def _ask(self) -> int:
        """Send a request, note what the reply says of the load, and return its status."""
        reader, writer = self._streams
        began_s = self._clock()
        writer.write(self._requests[int(self._draws.integers(len(self._requests)))])
        head = await reader.readuntil(END)
        lines = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
        await reader.readexactly(int(lines[b"content-length"]))
        status, now_s = int(head.split(b" ", 2)[1]), self._clock()
        load = float(lines.get(b"endpoint-load-metrics", LOAD + b"0").rpartition(LOAD)[2])
        if self._order.get("local_s") is not None:
            wait_s = min(max(PROBE_SHARE * (now_s - began_s), LEAST_PROBE_S), MOST_PROBE_S)
            self._probe_s = now_s + wait_s if status != OK or load >= LOADED else None
        return status


async def run(order: dict[str, Any]) -> dict[str, list[Any]]:
    requests = [Path(one).read_bytes() for one in order["requests"]]
    begin_s = asyncio.get_running_loop().time() + 0.2 + order["devices"] * 0.005  # to connect
    devices = [Device(order, seed, requests) for seed in range(order["devices"])]
    await asyncio.gather(*(one.run(begin_s) for one in devices))
    return {key: [each for one in devices for each in getattr(one, key)] for key in KINDS}


def main() -> None:
    if sys.argv[1] != "-":
        os.sched_setaffinity(0, {int(sys.argv[1])})
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
