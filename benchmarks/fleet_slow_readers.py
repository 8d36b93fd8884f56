"""Whether slow readers of downloads keep devices out, and what memory they cost the manager.

    scripts/python -m benchmarks.fleet_slow_readers [--seconds N] [--attacks N]

Three addresses of loopback hold 170 TLS connections each to the web server of `edgekit fleet up`. Each asks
for a package of 64 MiB and takes 1 kB a second, four times the least rate; it connects again when it was
ended. Meanwhile 58 others, each with an address of its own, fetch the authority's certificate in turn. Memory
is the resident set of the manager in 10^6 bytes: at rest; before the attacks, when the 58 have fetched
128 KiB of the package at once; at most during each attack, and 30 s after it. Ends by itself.
"""

import asyncio
import json
import ssl
import time
from contextlib import suppress

from benchmarks.fleet_parts import make_context, running_on_free_ports
from benchmarks.processes import read_memory
from benchmarks.results import make_parser

ATTACKERS, READERS, OTHERS = 3, 170, 58
PACKAGE_BYTES = 64 << 20
PIECE_BYTES, PACE_S = 1000, 1.0
CERTIFICATE = "/authority HTTP/1.1"
FIRST_BYTES = "/artifacts/targets/large HTTP/1.1\r\nRange: bytes=0-131071"
AFTER_S = 30.0


async def read_slowly(address: str, port: int, context: ssl.SSLContext) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, local_addr=(address, 0), limit=PIECE_BYTES
            )
            try:
                writer.write(b"GET /artifacts/targets/large HTTP/1.1\r\nHost: a\r\n\r\n")
                while await reader.read(PIECE_BYTES):
                    await asyncio.sleep(PACE_S)
            finally:
                writer.transport.abort()
        await asyncio.sleep(PACE_S)


async def ask(request: str, number: int, port: int, context: ssl.SSLContext) -> bool:

    async def fetch() -> bytes:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, local_addr=(f"127.0.2.{number + 1}", 0)
        )
        writer.write(f"GET {request}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(-1)
        writer.close()
        return answer

    try:
        return (await asyncio.wait_for(fetch(), 10.0)).startswith(b"HTTP/1.1 20")
    except (OSError, asyncio.TimeoutError):
        return False


def read_rss_mb(pid: int) -> float:
    return read_memory(pid)["Rss"] / 1e6


async def attack(pid: int, port: int, context: ssl.SSLContext, seconds: float) -> dict[str, float]:
    """Attack the manager; returns what others and its memory went through."""
    readers = [
        asyncio.create_task(read_slowly(f"127.0.1.{attacker + 1}", port, context))
        for attacker in range(ATTACKERS)
        for _ in range(READERS)
    ]
    await asyncio.sleep(20.0)
    answers, end_s, slowest_s, peak_mb = [], time.monotonic() + seconds, 0.0, 0.0
    for number in range(OTHERS):
        begin_s = time.monotonic()
        answers.append(await ask(CERTIFICATE, number, port, context))
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
        peak_mb = max(peak_mb, read_rss_mb(pid))
        await asyncio.sleep(max(0.0, (end_s - time.monotonic()) / (OTHERS - number)))
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await asyncio.sleep(AFTER_S)
    return {
        "refused": answers.count(False),
        "slowest_answer_s": round(slowest_s, 2),
        "peak_mb": round(peak_mb),
        "after_mb": round(read_rss_mb(pid)),
    }


async def run(pid: int, port: int, seconds: float, attacks: int) -> None:
    """Print the memory before attacks, and each attack."""
    context = make_context()
    rest_mb = read_rss_mb(pid)
    asked = await asyncio.gather(*(ask(FIRST_BYTES, number, port, context) for number in range(OTHERS)))
    await asyncio.sleep(AFTER_S)
    before = {"refused": asked.count(False), "rest_mb": round(rest_mb), "before_mb": round(read_rss_mb(pid))}
    print(json.dumps(before), flush=True)
    for _ in range(attacks):
        print(json.dumps(await attack(pid, port, context, seconds)), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=260.0)
    parser.add_argument("--attacks", type=int, default=1)
    options = parser.parse_args()
    with running_on_free_ports() as (folder, pid, ports):
        with (folder / "repository" / "targets" / "large").open("wb") as file:
            file.truncate(PACKAGE_BYTES)
        asyncio.run(run(pid, ports["web"], options.seconds, options.attacks))


if __name__ == "__main__":
    main()
