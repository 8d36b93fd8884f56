"""How many devices a server carries while the latency of most requests stays below a limit: simulated.

Requests of all devices together arrive at random times (Poisson); the server runs one at a time, in order,
and each takes as long as was measured. Batching would raise the figure, bursts of the devices would lower it.

Source: D. V. Lindley, "The theory of queues with a single server", 1952.
"""

from typing import Final

import numpy as np

MAX_DEVICES: Final = 100_000
PERCENTILE: Final = 99.0
_REQUESTS: Final = 20_000  # of a simulation; the worst 1 % are 200


def devices_per_server(server_s: float, rest_s: float, *, limit_s: float, requests_per_s: float) -> int:
    """Return the most devices for which 99 % of requests end within a limit.

    Args:
        server_s: time of a request on the server; 0 loads no server, so it carries `MAX_DEVICES`.
        rest_s: the rest of its latency.
        limit_s: of the latency.
        requests_per_s: of one device.
    """
    if rest_s + server_s > limit_s:
        return 0
    if server_s <= 0:
        return MAX_DEVICES
    rng = np.random.default_rng(0)
    gaps = rng.exponential(1.0, _REQUESTS)  # for one request a second in all

    def keeps(devices: int) -> bool:
        return rest_s + _waiting_s(gaps / (devices * requests_per_s), server_s) + server_s <= limit_s

    low, high = 0, min(MAX_DEVICES, int(1 / (server_s * requests_per_s)) + 1)  # beyond it is overloaded
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle - 1)
    return low


def _waiting_s(gaps: "np.ndarray[tuple[int], np.dtype[np.float64]]", server_s: float) -> float:
    """Return the 99th percentile of the time that requests wait before they run."""
    steps = np.cumsum(server_s - gaps[1:])
    waits = steps - np.minimum.accumulate(np.minimum(steps, 0.0))
    return float(np.percentile(waits, PERCENTILE))
