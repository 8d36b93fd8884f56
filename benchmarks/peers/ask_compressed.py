"""Ask a service with tritonclient's asyncio client, 64 requests at once.

    python ask_compressed.py PORT CODING ROWS COUNT

ROWS 0 sends 64 bombs instead: 65 KB that hold more than 64 MiB. It prints how often each outcome came.
"""

import asyncio
import gzip
import sys
import zlib
from collections import Counter

import aiohttp
import numpy as np
import tritonclient.http.aio as triton

AT_ONCE = 64
LIMIT = 64 << 20


async def ask(port: str, coding: str, rows: int, count: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    values = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    tensor = triton.InferInput("x", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    async with triton.InferenceServerClient(f"127.0.0.1:{port}", conn_limit=AT_ONCE) as client:
        expected = (await client.infer("linear", [tensor])).as_numpy("y")

        async def send() -> str:
            try:
                answer = await client.infer("linear", [tensor], request_compression_algorithm=coding)
            except (triton.InferenceServerException, aiohttp.ClientError) as error:
                return str(error)[:80]
            return "right" if (answer.as_numpy("y") == expected).all() else "wrong"

        for _ in range(count // AT_ONCE):
            outcomes.update(await asyncio.gather(*[send() for _ in range(AT_ONCE)]))
    return outcomes


async def attack(port: str, coding: str) -> Counter[str]:
    """Return how often each status came to bombs."""
    bomb = (gzip.compress if coding == "gzip" else zlib.compress)(bytes(LIMIT + 1))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

        async def send() -> str:
            url = f"http://127.0.0.1:{port}/v2/models/linear/infer"
            async with session.post(url, data=bomb, headers={"Content-Encoding": coding}) as response:
                return f"status {response.status}"

        return Counter(await asyncio.gather(*[send() for _ in range(AT_ONCE)]))


def main() -> None:
    port, coding, rows, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    work = ask(port, coding, rows, count) if rows else attack(port, coding)
    print(", ".join(f"{number} {outcome}" for outcome, number in asyncio.run(work).most_common()))


if __name__ == "__main__":
    main()
