"""How long a request takes with a plan under the conditions of the moment. Pure: it measures nothing.

The planner on the host and the choice on the device use the same model, so that they agree.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from edgekit_runtime.remote.cut_table import OffloadPlan, PlanCosts

_BITS: Final = 8
_FIRST_WINDOW_BYTES: Final = 14_480  # ten segments of 1,448 bytes, with which TCP starts (RFC 6928)
_MAX_ROUNDS: Final = 30
_SEGMENT_BYTES: Final = 1448  # of the payload of TCP in a packet of 1,500 bytes, with time stamps
_PACKET_BYTES: Final = 52  # what IPv4 and TCP add to each segment
_RECORD_BYTES: Final = 16_384  # of a record of TLS, at most
_SEAL_BYTES: Final = 22  # what TLS 1.3 adds to each record


@dataclass(frozen=True, slots=True)
class LinkState:
    """A connection to a server as it is now.

    Attributes:
        up_bits_per_s, down_bits_per_s: bandwidth to and from the server, as a large transfer over TCP shows
            it; 0 is a link that is down.
        rtt_s: round trip of a small message.
        window_bytes: what TCP may send before the first acknowledgement; that of a connection that has been
            in use is larger than at its start.
    """

    up_bits_per_s: float
    down_bits_per_s: float
    rtt_s: float
    window_bytes: float = _FIRST_WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a choice depends on.

    Attributes:
        link: the connection, or None if the server cannot be used now.
        device_slowdown: time of the device's kernels as a multiple of what was measured without load.
        server_slowdown: the same of the server.
        server_wait_s: how long a request waits on the server before it runs.
    """

    link: LinkState | None
    device_slowdown: float = 1.0
    server_slowdown: float = 1.0
    server_wait_s: float = 0.0


def predict_s(plan: OffloadPlan, conditions: Conditions) -> float:
    """Return the latency of one request in seconds; infinity where the plan cannot run now."""
    costs = plan.costs if compression_pays(plan, conditions) else plain_costs(plan.costs)
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
    return device_s + remote_s * (plan.escalation.share if plan.escalation is not None else 1.0)


def compression_pays(plan: OffloadPlan, conditions: Conditions) -> bool:
    """Return whether the bytes that compression saves take longer on the link than to compress and restore.

    It also holds where nothing is compressed, and where the link or the plain size is unknown.
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
    """Return the costs of a request whose body is not compressed."""
    return replace(
        costs,
        device_s=max(costs.device_s - costs.compress_s, 0.0),
        server_s=max(costs.server_s - costs.decompress_s, 0.0),
        upload_bytes=costs.upload_bytes if costs.plain_bytes is None else costs.plain_bytes,
        plain_bytes=None,
        compress_s=0.0,
        decompress_s=0.0,
    )


def send_plain(plan: OffloadPlan) -> OffloadPlan:
    """Return a plan whose body is not compressed."""
    return replace(plan, costs=plain_costs(plan.costs), compression="identity")


def as_sent(plan: OffloadPlan, conditions: Conditions) -> OffloadPlan:
    """Return a plan as its next request is sent: compressed only where that pays."""
    return plan if compression_pays(plan, conditions) else send_plain(plan)


def transfer_s(size_bytes: float, bits_per_s: float, rtt_s: float, window_bytes: float) -> float:
    """Return how long a body takes beyond the half round trip of its last byte.

    TCP sends a window, waits a round trip for the acknowledgement, and doubles the window, until the window
    covers what the link holds. From then on the bandwidth alone decides.

    Source: Cardwell, Savage, Anderson, "Modeling TCP latency", INFOCOM 2000, without loss.
    """
    bytes_per_s = bits_per_s / _BITS
    elapsed_s, window, rest = 0.0, max(window_bytes, 1.0), size_bytes
    for _ in range(_MAX_ROUNDS):
        if rest <= window or window >= bytes_per_s * rtt_s:
            break
        elapsed_s += rtt_s  # the window left the sender faster than this; it waits
        rest -= window
        window *= 2
    return elapsed_s + rest / bytes_per_s


def wire_bytes(message_bytes: float, *, is_tls: bool = True) -> float:
    """Return what a message takes of the link, in bytes of a large transfer over TCP.

    The bandwidth of a link counts what full segments carry. A segment that is not full, such as the last one
    of a message, carries the same headers with less in it, and so takes more than its bytes.

    Args:
        message_bytes: head and body.
        is_tls: whether it is encrypted.
    """
    if is_tls:
        message_bytes += _SEAL_BYTES * math.ceil(message_bytes / _RECORD_BYTES)
    segments = math.ceil(message_bytes / _SEGMENT_BYTES)
    return (message_bytes + _PACKET_BYTES * segments) * _SEGMENT_BYTES / (_SEGMENT_BYTES + _PACKET_BYTES)
