"""Devices that send requests to a server at random times, whether it keeps up or not: an open loop.

    load_generator.py CPU ORDER

CPU may be `-`. Prints latencies as JSON and ends. Each device is a connection with TLS; its requests arrive
by a Poisson process. Latency counts from the moment at which a request was due.
"""

import telemetry_off  # noqa: F401

import asyncio
import json
import os
import ssl
import sys
from pathlib import Path
from typing import Any

import numpy as np

END = b"\r\n\r\n"


async def run_device(order: dict[str, Any], seed: int, requests: list[bytes], begin_s: float) -> list[Any]:
    """Return latencies of one device in seconds, or the status of what went wrong."""
    context = ssl.create_default_context(cafile=order["ca_file"])
    draws, clock = np.random.default_rng(seed), asyncio.get_running_loop().time
    reader, writer = await asyncio.open_connection(order["host"], order["port"], ssl=context)
    due_s, found = begin_s + draws.exponential(1 / order["requests_per_s"]), []
    while due_s < begin_s + order["warm_s"] + order["seconds"]:
        await asyncio.sleep(max(due_s - clock(), 0))
        writer.write(requests[int(draws.integers(len(requests)))])
        head = await reader.readuntil(END)
        lines = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
        await reader.readexactly(int(lines[b"content-length"]))
        status = int(head.split(b" ", 2)[1])
        if due_s >= begin_s + order["warm_s"]:
            found.append(clock() - due_s if status == 200 else f"status {status}")
        due_s += draws.exponential(1 / order["requests_per_s"])
    writer.close()
    return found


async def run(order: dict[str, Any]) -> list[Any]:
    """Return what all devices found."""
    requests = [Path(one).read_bytes() for one in order["requests"]]
    begin_s = asyncio.get_running_loop().time() + 0.2 + order["devices"] * 0.005  # to connect
    devices = [run_device(order, seed, requests, begin_s) for seed in range(order["devices"])]
    return [one for found in await asyncio.gather(*devices) for one in found]


def main() -> None:
    """Obey one order."""
    if sys.argv[1] != "-":
        os.sched_setaffinity(0, {int(sys.argv[1])})
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
