"""Estimates the link to a server from the requests of the application, without sending anything.

The bandwidth is computed from the time between request and reply, without the server's own time and the round
trip. A lower bandwidth is accepted at once, or after two samples if the messages are small. A much higher
bandwidth is accepted when a second sample agrees, or at once from a probe. A longer round trip can look like
a lower bandwidth. If the next measured round trip is longer, the earlier bandwidth is restored. The duration
of `send` is ignored, because `send` only fills the buffers of this machine.

Source: docs/explanation/offload.md.
"""

import statistics
from collections import deque
from dataclasses import replace
from typing import Final

from edgekit_runtime.offload.latency_model import FIRST_WINDOW_BYTES, LinkState, transfer_s
from edgekit_runtime.records import dataclass

_MAX_SAMPLES: Final = 5  # number of samples of bandwidth
_DROP: Final = 0.6  # a sample below this share of the estimate replaces it at once
_RISE: Final = 1.7  # a sample above this multiple waits for a second one
_AGREE: Final = 2.0  # two such samples differ by less than this
_LEAST_S: Final = 1e-3  # a shorter transfer shows only that the link is not slower
_LEAST_ROUND: Final = 0.25  # the same as a share of the round trip
_SMALL_BYTES: Final = 4_000  # below, a late reply means a busy machine as often as a slow link
_LEAST_BITS_PER_S: Final = 1e2
_MOST_BITS_PER_S: Final = 1e11
_STEPS: Final = 30  # steps of a bisection over nine decades, in logarithms
_IDLE_S: Final = 0.3  # after this pause TCP starts again with its first window
_BITS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request with its reply.

    Attributes:
        upload_bytes, download_bytes: size of request and reply on the link, see `wire_bytes`. For an
            unfinished request, only acknowledged bytes count.
        elapsed_s: time from the first byte sent to the last byte received.
        server_s: processing time on the server.
        window_bytes: TCP's send window after the exchange, or None.
        rest_bytes: number of bytes of the reply that came after the first read.
        rest_s: time from the first read to the last read.
        acked_s: time until all sent bytes were acknowledged, as measured by the kernel, or None.
    """

    upload_bytes: float
    download_bytes: float
    elapsed_s: float
    server_s: float
    window_bytes: float | None = None
    rest_bytes: float = 0.0
    rest_s: float = 0.0
    acked_s: float | None = None


class LinkEstimate:
    """The estimate of a link. All times are from the same monotonic clock.

    Attributes:
        up_bits_per_s: estimated bandwidth to the server, or None before the first sample.
        down_bits_per_s: estimated bandwidth from the server, or None until a reply was long enough to measure
            it.
        is_bound: whether `up_bits_per_s` is only a lower bound.
        is_claimed: whether a probe has raised `up_bits_per_s`, and no request has confirmed it since.
        rtt_s: round trip time of the network, or None before the first sample.
        overhead_s: processing time of both machines for a small exchange.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._downs: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self._pending: float | None = None
        self._before_fall: tuple[tuple[float, ...], bool] | None = None  # rates, and `is_bound`
        self._window: float | None = None
        self._used_s = float("-inf")
        self.is_bound, self.is_claimed, self.overhead_s = False, False, 0.0
        self.up_bits_per_s: float | None = None
        self.rtt_s: float | None = None

    @property
    def down_bits_per_s(self) -> float | None:
        """Estimated bandwidth from the server, from the last long replies, or None before the first."""
        return statistics.harmonic_mean(self._downs) if self._downs else None

    @property
    def is_suspect(self) -> bool:
        """Whether the bandwidth seems to have fallen, and no round trip has been measured since."""
        return self._before_fall is not None

    def note_round_trip(self, rtt_s: float, *, is_beside: bool = False) -> None:
        """Record a round trip time.

        `is_beside` states that large bodies were sent at the same time. An increase is then ignored.
        """
        if rtt_s <= 0 or (self.rtt_s is not None and rtt_s > self.rtt_s and is_beside):
            return
        before, self._before_fall = self._before_fall, None
        if before is not None and self.rtt_s is not None and rtt_s > self.rtt_s * (1 + _LEAST_ROUND):
            self._replace(before[0])
            self.is_bound = before[1]
        self.rtt_s = rtt_s

    def note(self, now_s: float, exchange: Exchange) -> None:
        self.is_claimed = False
        self._note_exchange(now_s, exchange)

    def note_probe(self, now_s: float, exchange: Exchange) -> None:
        """Record a probe. A higher bandwidth is accepted at once, and a much higher one sets `is_claimed`."""
        before = self.up_bits_per_s
        if exchange.acked_s is not None:  # a busy device notices a reply late, its kernel does not
            exchange = replace(exchange, elapsed_s=min(exchange.elapsed_s, exchange.acked_s))
        self._note_exchange(now_s, exchange)
        if self._pending is not None and self._pending > (self.up_bits_per_s or 0.0):
            self._replace((self._pending,))
        if before is not None and (self.up_bits_per_s or 0.0) > before * _RISE:
            self.is_claimed = True

    def _note_exchange(self, now_s: float, exchange: Exchange) -> None:
        self._used_s, self._window = now_s, exchange.window_bytes
        rtt_s = self.rtt_s or 0.0
        self._note_download(exchange, rtt_s)
        exchange = replace(exchange, download_bytes=max(0.0, exchange.download_bytes - exchange.rest_bytes))
        moving_s = exchange.elapsed_s - exchange.server_s - exchange.rest_s
        transfer = moving_s - rtt_s - self.overhead_s
        if moving_s <= 0:  # the server states more time than passed
            return
        if transfer < rtt_s * 0.1 and moving_s < rtt_s:
            self.note_round_trip(moving_s)
        size_bytes = exchange.upload_bytes + exchange.download_bytes
        least_s = max(_LEAST_S, _LEAST_ROUND * rtt_s)
        if transfer < least_s:
            self._note_least(size_bytes * _BITS / least_s)
            return
        bits_per_s = _solve(
            transfer,
            rtt_s,
            exchange.window_bytes or FIRST_WINDOW_BYTES,
            (exchange.upload_bytes, exchange.download_bytes),
        )
        self._note_rate(bits_per_s, is_small=size_bytes < _SMALL_BYTES)

    def note_cut_off(self, exchange: Exchange) -> None:
        """Record a request that was aborted while being sent. Its `upload_bytes` are those that arrived."""
        self.is_claimed = False
        moving_s = max(exchange.elapsed_s - (self.rtt_s or 0.0), exchange.elapsed_s / 2, 1e-6)
        bits_per_s = max(exchange.upload_bytes * _BITS / moving_s, _LEAST_BITS_PER_S)
        if self.up_bits_per_s is None or bits_per_s < self.up_bits_per_s:
            self._replace((bits_per_s,))
        else:
            self._note_rate(bits_per_s, is_small=False)

    def state(self, now_s: float) -> LinkState | None:
        """Return the estimated state of the link, or None if it has not been measured."""
        rate, rtt_s = self.up_bits_per_s, self.rtt_s
        if rate is None or rtt_s is None:
            return None
        down = self.down_bits_per_s or rate
        if self._window is not None and self.is_warm(now_s):
            return LinkState(rate, down, rtt_s, max(self._window, FIRST_WINDOW_BYTES))
        return LinkState(rate, down, rtt_s)

    def is_warm(self, now_s: float) -> bool:
        """Return whether the link was used within the last 0.3 s. TCP then still has its large window."""
        return now_s - self._used_s < _IDLE_S

    def _note_least(self, bits_per_s: float) -> None:
        if self.up_bits_per_s is None or bits_per_s > self.up_bits_per_s:
            self._replace((bits_per_s,))
            self.is_bound = True

    def _note_download(self, exchange: Exchange, rtt_s: float) -> None:
        if exchange.rest_s < max(_LEAST_S, _LEAST_ROUND * rtt_s):
            return
        bits_per_s = _solve(exchange.rest_s, rtt_s, FIRST_WINDOW_BYTES, (exchange.rest_bytes,))
        previous = self.down_bits_per_s
        if previous is not None and not _DROP < bits_per_s / previous < _RISE:
            self._downs.clear()  # one long reply is enough
        self._downs.append(bits_per_s)

    def _note_rate(self, bits_per_s: float, *, is_small: bool) -> None:
        estimate = self.up_bits_per_s
        falls = estimate is not None and bits_per_s < estimate * _DROP
        if falls and self._before_fall is None:
            self._before_fall = tuple(self._rates), self.is_bound
        if estimate is None or (falls and not is_small):
            self._replace((bits_per_s,))
            return
        if falls or bits_per_s > estimate * _RISE:
            pending = self._pending
            if pending is None or not 1 / _AGREE < bits_per_s / pending < _AGREE:
                self._pending = bits_per_s
                return
            self._replace((pending, bits_per_s))
            return
        self._pending, self.is_bound = None, False
        self._rates.append(bits_per_s)
        self.up_bits_per_s = statistics.harmonic_mean(self._rates)

    def _replace(self, rates: tuple[float, ...]) -> None:
        self._pending, self.is_bound = None, False
        self._rates.clear()
        self._rates.extend(rates)
        self.up_bits_per_s = statistics.harmonic_mean(rates)


def _solve(moving_s: float, rtt_s: float, window_bytes: float, sizes_bytes: tuple[float, ...]) -> float:
    """Return the bandwidth at which sending the bodies in sequence takes this long, in bits per second.

    Args:
        moving_s: time of their transfers by the latency model.
        rtt_s: the round trip.
        window_bytes: TCP's window at the start.
        sizes_bytes: the bodies.
    """
    direct = min(max(sum(sizes_bytes) * _BITS / moving_s, _LEAST_BITS_PER_S), _MOST_BITS_PER_S)
    if direct / _BITS * rtt_s <= window_bytes:  # TCP does not wait for acknowledgements
        return direct
    low, high = _LEAST_BITS_PER_S, _MOST_BITS_PER_S
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if sum(transfer_s(size, middle, rtt_s, window_bytes) for size in sizes_bytes) > moving_s:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)
