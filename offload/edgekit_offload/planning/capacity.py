"""How many devices a server carries while the latency of most requests stays below a limit: simulated.

Requests of all devices together arrive at random times (Poisson); the service runs one at a time, in order,
and each takes as long as was measured, with what the service itself takes. It refuses requests where too many
wait, as `edgekit offload serve` does. Batching would raise the figure, bursts of the devices and other work
of the server would lower it: `benchmarks/offload_capacity.py` compares it with real ones.

Source: D. V. Lindley, "The theory of queues with a single server", 1952.
"""

from typing import Final

import numpy as np

from edgekit_runtime.remote.cut_table import PlanCosts

MAX_DEVICES: Final = 100_000
PERCENTILE: Final = 99.0
MAX_WAITING: Final = 16  # calls; `edgekit offload serve` refuses further ones
# TLS and two more copies of each byte that the service receives, measured: 11 to 191 kB, EPYC, one core.
_BYTE_S: Final = 7e-9
_REQUESTS: Final = 20_000  # of a simulation; the worst 1 % are 200


def served_s(costs: PlanCosts) -> float:
    """Return how long a request keeps the processor of the service: the plan's time, and TLS for its body."""
    return costs.server_s + _BYTE_S * costs.upload_bytes


def devices_per_server(server_s: float, rest_s: float, *, limit_s: float, requests_per_s: float) -> int:
    """Return the most devices for which 99 % of requests end within a limit.

    Args:
        server_s: time of a request on the server, see `served_s`; with 0 it carries `MAX_DEVICES`.
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

    most_s = min(limit_s - rest_s - server_s, MAX_WAITING * server_s)

    def keeps(devices: int) -> bool:
        return _waiting_s(gaps / (devices * requests_per_s), server_s) <= most_s

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
