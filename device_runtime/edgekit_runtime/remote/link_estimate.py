"""Estimates the link to a server from the requests that are sent anyway. A state machine without a clock.

Bandwidth is what remains of a reply's time without the server's own time and the round trip. It falls at
once, or after two small replies, and rises when a second sample agrees. It sends nothing, and never looks at
how fast `send` returned: that only filled the buffers of this machine.

Source: docs/explanation/offload.md.
"""

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.remote.latency_model import LinkState, transfer_s

_KEPT: Final = 5  # samples of bandwidth, and of the round trip
_DROP: Final = 0.6  # a sample below this share of the estimate replaces it at once
_RISE: Final = 1.7  # a sample above this multiple waits for a second one
_AGREE: Final = 2.0  # two such samples differ by less than this
_LEAST_S: Final = 1e-3  # a transfer that took less says only that the link is not slower
_LEAST_ROUND: Final = 0.25  # the same as a share of the round trip
_SMALL_BYTES: Final = 4_000  # below, one late reply is a hiccup of a machine as often as a slow link
_LEAST_BITS_PER_S: Final = 1e2
_MOST_BITS_PER_S: Final = 1e11
_STEPS: Final = 30  # of a bisection over nine decades, in logarithms
_IDLE_S: Final = 0.3  # after which TCP starts again with its first window
_STALE_S: Final = 30.0
_RTT_AGE_S: Final = 60.0
_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request with its reply.

    Attributes:
        upload_bytes, download_bytes: sizes of both bodies; of an unfinished request what was acknowledged.
        elapsed_s: from the first byte sent to the last received.
        server_s: the server's own time.
        window_bytes: TCP's window after it, or None where there is no TCP.
    """

    upload_bytes: float
    download_bytes: float
    elapsed_s: float
    server_s: float
    window_bytes: float | None = None


class LinkEstimate:
    """What is known of a link; every time is on the same monotonic clock.

    Attributes:
        up_bits_per_s: estimate of the bandwidth, None before the first sample.
        updated_s: time of the last sample of it.
    """

    __slots__ = ("_pending", "_rates", "_rtts", "_used_s", "_window", "up_bits_per_s", "updated_s")

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._rtts: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._pending: float | None = None
        self._window: float | None = None
        self._used_s = float("-inf")
        self.up_bits_per_s: float | None = None
        self.updated_s = float("-inf")

    @property
    def rtt_s(self) -> float | None:
        """The round trip: the smallest of the recent ones; None before the first."""
        return min((rtt_s for _, rtt_s in self._rtts), default=None)

    def note_round_trip(self, now_s: float, rtt_s: float) -> None:
        """Take the time of a small exchange without the server's own time."""
        if rtt_s <= 0:
            return
        while self._rtts and now_s - self._rtts[0][0] > _RTT_AGE_S:
            self._rtts.popleft()
        self._rtts.append((now_s, rtt_s))

    def note(self, now_s: float, exchange: Exchange) -> None:
        """Take a request whose bodies may say something about the bandwidth."""
        self._used_s, self._window = now_s, exchange.window_bytes
        rtt_s = self.rtt_s or 0.0
        moving_s = exchange.elapsed_s - exchange.server_s
        transfer = moving_s - rtt_s
        if moving_s <= 0:  # a server that states more than passed
            return
        if transfer < rtt_s * 0.1 and moving_s < rtt_s:
            self.note_round_trip(now_s, moving_s)
        size_bytes = exchange.upload_bytes + exchange.download_bytes
        least_s = max(_LEAST_S, _LEAST_ROUND * rtt_s)
        if transfer < least_s:
            self._note_least(now_s, size_bytes * _BITS / least_s)
            return
        bits_per_s = _solve_bandwidth(exchange, moving_s, rtt_s)
        self._note_rate(now_s, bits_per_s, is_small=size_bytes < _SMALL_BYTES)

    def note_cut_off(self, now_s: float, exchange: Exchange) -> None:
        """Take a request that was given up while it was sent: the link is not faster than this."""
        bits_per_s = max(exchange.upload_bytes * _BITS / max(exchange.elapsed_s, 1e-6), _LEAST_BITS_PER_S)
        if self.up_bits_per_s is None or bits_per_s < self.up_bits_per_s:
            self._replace(now_s, (bits_per_s,))

    def state(self, now_s: float) -> LinkState | None:
        """Return the link as it seems to be, or None before it was measured."""
        rate, rtt_s = self.up_bits_per_s, self.rtt_s
        if rate is None or rtt_s is None:
            return None
        if self._window is not None and now_s - self._used_s < _IDLE_S:
            return LinkState(rate, rate, rtt_s, max(self._window, 14_480.0))
        return LinkState(rate, rate, rtt_s)

    def is_stale(self, now_s: float) -> bool:
        """Whether the bandwidth was measured so long ago that a probe is worth it."""
        return self.up_bits_per_s is None or now_s - self.updated_s > _STALE_S

    def _note_least(self, now_s: float, bits_per_s: float) -> None:
        """Take that the bandwidth is at least this."""
        if self.up_bits_per_s is None or bits_per_s > self.up_bits_per_s:
            self._replace(now_s, (bits_per_s,))
        else:
            self.updated_s = now_s

    def _note_rate(self, now_s: float, bits_per_s: float, *, is_small: bool) -> None:
        estimate = self.up_bits_per_s
        falls = estimate is not None and bits_per_s < estimate * _DROP
        if estimate is None or (falls and not is_small):
            self._replace(now_s, (bits_per_s,))
            return
        if falls or bits_per_s > estimate * _RISE:
            pending = self._pending
            if pending is None or not 1 / _AGREE < bits_per_s / pending < _AGREE:
                self._pending, self.updated_s = bits_per_s, now_s
                return
            self._replace(now_s, (pending, bits_per_s))
            return
        self._pending = None
        self._rates.append(bits_per_s)
        self.up_bits_per_s, self.updated_s = statistics.harmonic_mean(self._rates), now_s

    def _replace(self, now_s: float, rates: tuple[float, ...]) -> None:
        self._pending = None
        self._rates.clear()
        self._rates.extend(rates)
        self.up_bits_per_s, self.updated_s = statistics.harmonic_mean(rates), now_s


def _solve_bandwidth(exchange: Exchange, moving_s: float, rtt_s: float) -> float:
    """Return the bandwidth at which the latency model gives the time that was measured, in bits per second.

    Args:
        exchange: the sizes.
        moving_s: time for the way there and back with both bodies.
        rtt_s: the round trip.
    """
    window = exchange.window_bytes or 14_480.0
    low, high = _LEAST_BITS_PER_S, _MOST_BITS_PER_S
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        predicted = rtt_s
        for size_bytes in (exchange.upload_bytes, exchange.download_bytes):
            predicted += transfer_s(size_bytes, middle, rtt_s, window)
        if predicted > moving_s:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)
