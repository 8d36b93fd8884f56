"""Whether a flood of TLS handshakes makes devices time out at the fleet's web server.

    scripts/python -m benchmarks.fleet_handshakes [--networks N] [--at-once N] [--processes N] [--seconds N]

Processes open connections to the web server of `edgekit fleet up` as fast as they can, some at once, in turn
from some addresses of loopback. Each sends the first message of TLS, waits for the server's answer, which
costs the server a signature, and begins again. Meanwhile 20 devices, each with an address of its own,
fetch the authority's certificate once, at times spread over the seconds. A device gives up after 30 s, as the
agent does. Ends by itself.
"""

import asyncio
import itertools
import json
import multiprocessing
import resource
import ssl
import time
from contextlib import suppress

from benchmarks.fleet_parts import make_context, running_on_free_ports
from benchmarks.processes import read_cpu_s, read_memory
from benchmarks.results import make_parser

DEVICES = 20
TIMEOUT_S = 30.0


def make_first_message() -> bytes:
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        make_context().wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def flood(
    port: int, networks: int, at_once: int, answered: "multiprocessing.sharedctypes.Synchronized[int]"
) -> None:
    """Begin handshakes without end; `answered` counts those that the server answered."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    message = make_first_message()
    addresses = itertools.cycle(f"127.0.1.{number + 1}" for number in range(networks))

    async def begin_handshakes() -> None:
        while True:
            with suppress(OSError, asyncio.TimeoutError):
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection("127.0.0.1", port, local_addr=(next(addresses), 0)), 5.0
                )
                try:
                    writer.write(message)
                    if await asyncio.wait_for(reader.read(1 << 14), 5.0):
                        answered.value += 1
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0)

    async def run() -> None:
        await asyncio.gather(*(begin_handshakes() for _ in range(at_once)))

    asyncio.run(run())


async def fetch(number: int, port: int, context: ssl.SSLContext, delay_s: float) -> float | None:
    """Return the seconds that a fetch takes, or None if it fails."""

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            port,
            ssl=context,
            ssl_handshake_timeout=TIMEOUT_S,
            local_addr=(f"127.0.2.{number + 1}", 0),
        )
        writer.write(b"GET /authority HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await reader.read(-1)
        writer.close()
        return answer

    await asyncio.sleep(delay_s)
    begin_s = time.monotonic()
    try:
        answer = await asyncio.wait_for(ask(), TIMEOUT_S)
    except (OSError, asyncio.TimeoutError):
        return None
    return time.monotonic() - begin_s if answer.startswith(b"HTTP/1.1 200") else None


async def fetch_all(port: int, seconds: float) -> list[float | None]:
    context = make_context()
    delays = (number * seconds / DEVICES for number in range(DEVICES))
    return await asyncio.gather(*(fetch(number, port, context, delay) for number, delay in enumerate(delays)))


def describe(times: list[float | None]) -> dict[str, object]:
    answered = sorted(value for value in times if value is not None)
    return {
        "failed": times.count(None),
        "median_s": round(answered[len(answered) // 2], 2) if answered else None,
        "slowest_s": round(answered[-1], 2) if answered else None,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--networks", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with running_on_free_ports() as (_, pid, ports):
        port = ports["web"]
        print(json.dumps({"before": describe(asyncio.run(fetch_all(port, 5.0)))}), flush=True)
        counts = [multiprocessing.Value("L") for _ in range(options.processes)]
        attackers = [
            multiprocessing.Process(
                target=flood, args=(port, options.networks, options.at_once, count), daemon=True
            )
            for count in counts
        ]
        for attacker in attackers:
            attacker.start()
        time.sleep(5.0)
        begin_s, begin_cpu_s = time.monotonic(), read_cpu_s(pid)
        begin_count = sum(count.value for count in counts)
        during = describe(asyncio.run(fetch_all(port, options.seconds)))
        took_s, count = time.monotonic() - begin_s, sum(count.value for count in counts) - begin_count
        rates = {
            "handshakes_a_second": round(count / took_s),
            "manager_cores": round((read_cpu_s(pid) - begin_cpu_s) / took_s, 2),
            "manager_mb": round(read_memory(pid)["Rss"] / 1e6),
        }
        print(json.dumps({"during": during, **rates}), flush=True)
        for attacker in attackers:
            attacker.terminate()
            attacker.join()


if __name__ == "__main__":
    main()
