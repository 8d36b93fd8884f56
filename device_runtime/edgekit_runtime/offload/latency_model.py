"""Costs of a request with a plan under given conditions, for each objective.

Depending on the objective, the cost is the latency, the time of the slowest stage or the server time, in
seconds, or the energy in joules. The planner on the host and the device use the same model, so their results
agree.
"""

import math
from dataclasses import replace
from typing import Final

from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.records import dataclass

MAX_WAITING: Final = 16  # calls. `edgekit offload serve` and exported replicas refuse further ones
LATE: Final = 0.01  # share of requests that may miss a limit on latency, which is for the 99th percentile
FIRST_WINDOW_BYTES: Final = 14_480  # ten segments of 1,448 bytes: TCP's first window (RFC 6928)
_BITS: Final = 8
# TLS and two more copies of each byte that the service receives. Measured: 11 to 191 kB, EPYC, one core.
_SERVED_BYTE_S: Final = 7e-9
_EXACT_SLACK: Final = 2.0  # the exact formula is used for waits up to this many service times
_BISECTIONS: Final = 24
_STEEPEST: Final = 50.0  # decay of waiting times per service time, of a server without load
_MAX_ROUNDS: Final = 30
_SEGMENT_BYTES: Final = 1448  # TCP's payload in a packet of 1,500 bytes, with time stamps
_PACKET_BYTES: Final = 52  # headers of IPv4 and TCP in each segment
_RECORD_BYTES: Final = 16_384  # longest record of TLS
_SEAL_BYTES: Final = 22  # bytes that TLS 1.3 adds to each record


@dataclass(frozen=True, slots=True)
class LinkState:
    """The current state of a connection to a server.

    Attributes:
        up_bits_per_s, down_bits_per_s: bandwidth of a large TCP transfer to and from the server, or 0 if the
            link is down.
        rtt_s: round trip time of a small message.
        window_bytes: number of bytes that TCP may send before the first acknowledgement. It is larger on a
            connection in use than on a new connection.
    """

    up_bits_per_s: float
    down_bits_per_s: float
    rtt_s: float
    window_bytes: float = FIRST_WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions under which a plan is chosen.

    Attributes:
        link: the connection, or None if the server cannot be used now.
        device_slowdown: current time of the device's kernels divided by their time without load.
        server_slowdown: current time of the server's kernels divided by their time without load.
        server_wait_s: how long a request waits on the server before it runs.
    """

    link: LinkState | None
    device_slowdown: float = 1.0
    server_slowdown: float = 1.0
    server_wait_s: float = 0.0


def predict_s(plan: OffloadPlan, conditions: Conditions) -> float:
    """Return the latency of one request in seconds, infinity if the plan cannot run now."""
    costs = _sent_costs(plan, conditions)
    device_s = costs.device_s * conditions.device_slowdown
    if plan.tail is None:
        return device_s
    link = conditions.link
    if link is None or link.up_bits_per_s <= 0 or link.down_bits_per_s <= 0:
        return float("inf")
    remote_s = (
        transfer_s(costs.upload_bytes, link.up_bits_per_s, link.rtt_s, link.window_bytes)
        + conditions.server_wait_s
        + costs.server_s * conditions.server_slowdown
        + transfer_s(costs.download_bytes, link.down_bits_per_s, link.rtt_s, link.window_bytes)
        + link.rtt_s
    )
    return device_s + remote_s * _share(plan)


def slowest_stage_s(plan: OffloadPlan, conditions: Conditions) -> float:
    """Return the time per request of the slowest stage (device, link or server), in seconds.

    This time determines the throughput. Requests overlap, so round trips do not count. The link is half
    duplex, like a radio link.
    """
    costs, link = _sent_costs(plan, conditions), conditions.link
    device_s = costs.device_s * conditions.device_slowdown
    if plan.tail is None:
        return device_s
    if link is None or link.up_bits_per_s <= 0 or link.down_bits_per_s <= 0:
        return math.inf
    link_s = _BITS * (costs.upload_bytes / link.up_bits_per_s + costs.download_bytes / link.down_bits_per_s)
    return max(device_s, _share(plan) * max(link_s, costs.server_s * conditions.server_slowdown))


def energy_j(plan: OffloadPlan, conditions: Conditions, radio_w: float) -> float:
    """Return the device's energy above idle for a request, in joules.

    The result is infinity if `device_j` is None or there is no link. `radio_w` is the power of the radio from
    the request to the reply, in watts.
    """
    costs, slowdown = _sent_costs(plan, conditions), conditions.device_slowdown
    if costs.device_j is None:
        return math.inf
    radio_s = predict_s(plan, conditions) - costs.device_s * slowdown
    return costs.device_j * slowdown + radio_w * radio_s


def reserved_server_s(plan: OffloadPlan, conditions: Conditions, limit_s: float) -> float:
    """Return the server time that must be reserved for a request, in seconds.

    It includes the idle time that the server needs so that requests wait only briefly. If a device sends r
    requests per second, and 99 % of them must end within `limit_s`, one server can serve 1 / (r * result)
    devices. The result is infinity if the limit cannot be met. The current wait on the server is ignored.
    """
    alone = replace(plan, escalation=None)  # the requests of a cascade that go to the server
    share = _share(plan)
    latency_s = predict_s(alone if share > LATE else plan, replace(conditions, server_wait_s=0.0))
    if latency_s > limit_s:
        return math.inf
    if plan.tail is None:
        return 0.0
    costs = _sent_costs(plan, conditions)
    server_s = served_s(replace(costs, server_s=costs.server_s * conditions.server_slowdown))
    if server_s <= 0 or share <= 0:
        return 0.0
    slack = min((limit_s - latency_s) / server_s, MAX_WAITING)
    load = utilisation(slack, LATE / share)
    return server_s * share / load if load > 0 else math.inf


def served_s(costs: PlanCosts) -> float:
    """Return the server's processor time for a request, including TLS, in seconds."""
    return costs.server_s + _SERVED_BYTE_S * costs.upload_bytes


def utilisation(slack: float, late: float = LATE) -> float:
    """Return the largest load of a server, 0 to 1, at which waits rarely exceed a limit.

    The model is an M/D/1 queue: requests arrive at random (Poisson), all take the same time, and run one
    after the other.

    Args:
        slack: the limit of the wait, as a multiple of the time that a request takes.
        late: share of the requests that may wait longer than the limit.

    Source: A. K. Erlang, "The theory of probabilities and telephone conversations", 1909, for short waits.
    For longer waits, Cramer-Lundberg's asymptotic tail of M/G/1, which is within 3 % of a simulation.
    """
    if late >= 1:
        return 1.0
    low, high = 0.0, 1.0 if slack < _EXACT_SLACK else _STEEPEST
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if slack < _EXACT_SLACK:  # `middle` is the load
            on_time = math.exp(middle * slack)
            if slack > 1:
                on_time -= middle * (slack - 1) * math.exp(middle * (slack - 1))
            is_kept = 1 - (1 - middle) * on_time <= late
            low, high = (middle, high) if is_kept else (low, middle)
            continue
        load = middle / math.expm1(middle)  # `middle` is the decay of the tail
        tail = (1 - load) / (load * math.exp(middle) - 1) * math.exp(-middle * slack)
        low, high = (low, middle) if tail <= late else (middle, high)
    return low if slack < _EXACT_SLACK else high / math.expm1(high)


def _share(plan: OffloadPlan) -> float:
    return plan.escalation.share if plan.escalation is not None else 1.0


def _sent_costs(plan: OffloadPlan, conditions: Conditions) -> PlanCosts:
    """Return the costs of a plan as its next request is sent."""
    return plan.costs if compression_pays(plan, conditions) else plain_costs(plan.costs)


def compression_pays(plan: OffloadPlan, conditions: Conditions) -> bool:
    """Return whether compression saves more time on the link than it takes on both machines.

    The result is also True if nothing is compressed, or if the link or the uncompressed size is unknown.
    """
    costs, link = plan.costs, conditions.link
    if plan.compression == "identity" or costs.plain_bytes is None or link is None:
        return True
    if link.up_bits_per_s <= 0:
        return True
    spent_s = costs.compress_s * conditions.device_slowdown + costs.decompress_s * conditions.server_slowdown
    plain_s, packed_s = (
        transfer_s(size, link.up_bits_per_s, link.rtt_s, link.window_bytes)
        for size in (costs.plain_bytes, costs.upload_bytes)
    )
    return plain_s - packed_s > spent_s


def plain_costs(costs: PlanCosts) -> PlanCosts:
    device_s = max(costs.device_s - costs.compress_s, 0.0)
    return replace(
        costs,
        device_s=device_s,
        device_j=costs.device_j and costs.device_j * device_s / max(costs.device_s, device_s, 1e-12),
        server_s=max(costs.server_s - costs.decompress_s, 0.0),
        upload_bytes=costs.upload_bytes if costs.plain_bytes is None else costs.plain_bytes,
        plain_bytes=None,
        compress_s=0.0,
        decompress_s=0.0,
    )


def send_plain(plan: OffloadPlan) -> OffloadPlan:
    return replace(plan, costs=plain_costs(plan.costs), compression="identity")


def as_sent(plan: OffloadPlan, conditions: Conditions) -> OffloadPlan:
    """Return the plan unchanged if its compression saves time, otherwise without compression."""
    return plan if compression_pays(plan, conditions) else send_plain(plan)


def transfer_s(size_bytes: float, bits_per_s: float, rtt_s: float, window_bytes: float) -> float:
    """Return the time to transfer a body over TCP, in seconds.

    TCP sends a window of data, waits one round trip for the acknowledgement, and doubles the window. Once the
    window fills the link, only the bandwidth matters. The travel time of the last byte is not included.

    Source: Cardwell, Savage, Anderson, "Modeling TCP latency", INFOCOM 2000, without loss.
    """
    bytes_per_s = bits_per_s / _BITS
    elapsed_s, window, remaining_bytes = 0.0, max(window_bytes, 1.0), size_bytes
    for _ in range(_MAX_ROUNDS):
        if remaining_bytes <= window or window >= bytes_per_s * rtt_s:
            break
        elapsed_s += rtt_s  # the sender sent the window in less, and waits
        remaining_bytes -= window
        window *= 2
    return elapsed_s + remaining_bytes / bytes_per_s


def wire_bytes(message_bytes: float, *, is_tls: bool = True) -> float:
    """Return the size of a message on the link. The transfer time is this size divided by the bandwidth.

    The result includes the bytes that TLS adds. The headers of full TCP segments are not included, because
    the bandwidth is that of the payload. `message_bytes` is the size of head and body.
    """
    if is_tls:
        message_bytes += _SEAL_BYTES * math.ceil(message_bytes / _RECORD_BYTES)
    segments = math.ceil(message_bytes / _SEGMENT_BYTES)
    return (message_bytes + _PACKET_BYTES * segments) * _SEGMENT_BYTES / (_SEGMENT_BYTES + _PACKET_BYTES)


def payload_bytes(sealed_bytes: int) -> int:
    """Return how many bytes of plaintext there are in `sealed_bytes` bytes of TLS records."""
    return sealed_bytes - _SEAL_BYTES * math.ceil(sealed_bytes / (_RECORD_BYTES + _SEAL_BYTES))
