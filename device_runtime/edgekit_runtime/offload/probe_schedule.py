"""Decides when to probe a server, and how long to wait for a reply before the model also runs on the device.

A server is probed after a fault, and whenever no requests measure the link. Probes run on a separate thread,
so requests never wait for them. This module does no I/O. The time and the random numbers are arguments.

Source: Nygard, "Release It!", 2nd edition, section 5.2; back-off with equal jitter as in Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015; hedged requests as in Dean and Barroso, "The
Tail at Scale", CACM 56(2), 2013.
"""

from typing import Final

from edgekit_runtime.offload.latency_model import LinkState

LEAST_MOVED_BYTES: Final = 1500  # if less is acknowledged between two looks, the link carries nothing
_FIRST_S: Final = 0.5
_MOST_S: Final = 60.0
_MOST_STEPS: Final = 16
_LEAST_PAUSE_S: Final = 0.25
_SHARE: Final = 0.05  # pause between two probes, as a share of the time since the server was left
_LINK_SHARE: Final = 5  # a probe takes at most a fifth of the link's time
_HOUR_S: Final = 3600.0
_BUSY_S: Final = 0.1  # time that a probe waits for a request to end, before it is sent beside it
_MOST_RUNS: Final = 4  # local runs that hedges may take at once
_MOST_WAIT: Final = 0.3  # longest wait, as a share of the local run that follows: 1.3 local runs in all
_MOST_WAIT_S: Final = 10e-3  # part of the 20 ms that a fault may add. The rest starts the local run
_SLACK: Final = 0.25  # how late a reply may be if there is time enough, as a share of its usual time
_SLACK_S: Final = 2e-3
_EARLY_WAIT: Final = 0.1  # a hedge sooner than this share of the local run gains little
_MOST_LATE_S: Final = 1.0
_LATE_SHARE: Final = 0.1  # share of replies that take longer than usual
_STEP: Final = 0.1
_DECAY: Final = 0.99  # each request keeps this share of the longest local run, which load may have caused
_MOST_USUAL: Final = 2.0
_FIRST_BITS: Final = 8 * 2 * LEAST_MOVED_BYTES  # TCP acknowledges every other segment
_MOST_UNSEEN_BYTES: Final = 4 * LEAST_MOVED_BYTES  # so few bytes may be acknowledged only with the reply


class BackOff:
    """Exponential back-off with jitter.

    The pause is at most 0.5 s after the first failure. It doubles with each further failure, up to 60 s.
    """

    __slots__ = ("_failures",)

    def __init__(self) -> None:
        self._failures = 0

    def fail(self, chance: float) -> float:
        """Count a failure and return the pause after it.

        Args:
            chance: A random number, uniform in [0, 1).

        Returns:
            The pause in seconds.
        """
        wait_s = min(_MOST_S, _FIRST_S * 2.0 ** min(self._failures, _MOST_STEPS))
        self._failures += 1
        return wait_s * (0.5 + chance / 2)

    def succeed(self) -> None:
        self._failures = 0


class CircuitBreaker:
    """Stops sending requests to a server that fails.

    While the breaker is closed, requests go to the server. While it is open, nothing is sent. After a pause
    it is half-open, and one probe may be sent. A correct reply closes it and resets the count of
    failures. Each plan also has its own `BackOff`, since a server that answers golden inputs correctly may
    fail on the inputs of the application.

    Attributes:
        is_closed: Whether requests may go to the server.
        cause: One sentence that says why the breaker is open.
    """

    __slots__ = ("_back_off", "_retry_s", "cause", "is_closed")

    def __init__(self) -> None:
        self.is_closed = False
        self.cause = "the server has not answered yet"
        self._back_off = BackOff()
        self._retry_s = float("-inf")

    def may_probe(self, now_s: float) -> bool:
        return not self.is_closed and now_s >= self._retry_s

    def succeed(self) -> None:
        self.is_closed, self.cause = True, ""
        self._back_off.succeed()

    def fail(self, now_s: float, cause: str, chance: float, at_least_s: float = 0.0) -> None:
        """Open the breaker. The pause grows with each failure in a row.

        Args:
            now_s: The time of the monotonic clock, in seconds.
            cause: One sentence that says what happened.
            chance: A random number, uniform in [0, 1).
            at_least_s: The pause in seconds that the server asked for. At most 60 s are granted.
        """
        self.is_closed, self.cause = False, cause
        self._retry_s = now_s + max(min(at_least_s, _MOST_S), self._back_off.fail(chance))


class ProbeSchedule:
    """Decides when to probe the link.

    The pause between probes is 5 % of the time since the device stopped using a server plan, from 0.25 s up
    to 60 s. For example, if the link was bad for 10 minutes, its recovery is noticed within 30 s. All times
    are in seconds of the monotonic clock.
    """

    __slots__ = ("_bytes_per_s", "_left_s", "_paid_s", "due_s")

    def __init__(self, now_s: float, bytes_per_hour: float | None = None) -> None:
        """Create a schedule whose first probe is due at once.

        `bytes_per_hour` limits the size of all probes. None means no limit.
        """
        self._left_s, self.due_s = now_s, float("-inf")
        self._bytes_per_s = float("inf") if bytes_per_hour is None else bytes_per_hour / _HOUR_S
        self._paid_s = float("-inf")  # when the bytes sent so far will be within the limit

    def restart(self, now_s: float) -> None:
        """Reset the probe interval after leaving a plan that worked."""
        self._left_s = now_s
        self.due_s = min(self.due_s, now_s + _LEAST_PAUSE_S)

    def note_probe(self, now_s: float, took_s: float) -> None:
        pause_s = max(_SHARE * (now_s - self._left_s), (_LINK_SHARE - 1) * took_s, _LEAST_PAUSE_S)
        self.due_s = now_s + min(pause_s, _MOST_S)

    def postpone(self, now_s: float) -> None:
        """Delay the next probe by 0.25 s."""
        self.due_s = now_s + _LEAST_PAUSE_S

    def spend(self, now_s: float, size_bytes: float) -> None:
        """Count the bytes of a probe towards the hourly limit."""
        if self._bytes_per_s > 0:
            self._paid_s = max(self._paid_s, now_s) + size_bytes / self._bytes_per_s

    def may_spend(self, now_s: float) -> bool:
        """Return whether the hourly limit on bytes allows a probe now."""
        return self._bytes_per_s > 0 and now_s >= self._paid_s

    def is_due(self, now_s: float, *, is_busy: bool) -> bool:
        """Return whether a probe is due. While requests run (`is_busy`), it is due 0.1 s later than usual."""
        return now_s >= self.due_s + (_BUSY_S if is_busy else 0.0)


class HedgePolicy:
    """Decides how long to wait for a reply, and limits the device time that hedges use.

    A hedge is a local run that starts because a reply is late. A token bucket limits hedges. Each request
    adds a share of its device time to the credit, and each hedge takes its device time from the credit. If
    the credit does not cover a local run, hedges start later. If the credit is negative, no request goes to
    the server. Not thread-safe.
    """

    __slots__ = ("_credit_s", "_longest_s", "_share", "_usual")

    def __init__(self, share: float, local_s: float) -> None:
        """Start with full credit.

        Args:
            share: The fraction of the requests' device time that hedges may use.
            local_s: The time of a local run.
        """
        self._share, self._credit_s = share, _MOST_RUNS * local_s
        self._longest_s = local_s  # of recent local runs, because requests differ in rows
        self._usual = 1.0  # multiple of the prediction: nine of ten replies come sooner

    @property
    def is_in_debt(self) -> bool:
        return self._credit_s < 0

    def may_hedge(self, local_s: float) -> bool:
        return self._credit_s >= local_s

    def earn(self, device_s: float, local_s: float) -> None:
        """Add a share of a request's device time to the credit.

        The credit is at most four times the longest recent local run.

        Args:
            device_s: The time that the request took on the device.
            local_s: The time of a local run.
        """
        self._longest_s = max(local_s, self._longest_s * _DECAY)
        self._credit_s = min(self._credit_s + self._share * device_s, _MOST_RUNS * self._longest_s)

    def spend(self, device_s: float) -> None:
        """Take the device time of a hedge, in seconds, from the credit."""
        self._credit_s -= device_s

    def note_reply(self, took_s: float, expected_s: float) -> None:
        step = _STEP * (1 - _LATE_SHARE if took_s > self._usual * expected_s else -_LATE_SHARE)
        self._usual = min(max(self._usual + step, 0.0), _MOST_USUAL)

    def allow_s(self, expected_s: float, local_s: float, spent_s: float) -> float:
        """Return the delay in seconds between sending a request and starting a local run if no reply arrives.

        A failed request then takes at most about 1.3 times as long as a local run, unless normal replies are
        slower.

        Args:
            expected_s: The predicted time from sending to reply.
            local_s: The time of a local run.
            spent_s: The time of this request before it was sent.
        """
        usual_s = expected_s * self._usual
        late_s = max(_SLACK * usual_s, _SLACK_S, _EARLY_WAIT * local_s)
        if not self.may_hedge(local_s):
            return usual_s + min(late_s + usual_s, local_s)
        limit_s = _MOST_WAIT * local_s + _MOST_WAIT_S - spent_s
        return min(usual_s + min(late_s, _MOST_LATE_S), max(limit_s, usual_s + _SLACK_S))


class ReplyWait:
    """Decides how long a request waits for its reply, depending on whether the link carries bytes.

    A request has a maximum wait. A dead link is noticed after half of it, or when the first acknowledgement
    is late. A slow link gets more time if the reply is expected before a local run would end.

    Attributes:
        look_s: The time in seconds to wait before the first call of `more_s`.
    """

    __slots__ = ("_after_s", "_allowed_s", "_local_s", "_previous", "_upload_bytes", "look_s")

    def __init__(
        self, allowed_s: float, local_s: float, after_s: float, upload_bytes: int, *, link: LinkState | None
    ) -> None:
        """Start to wait when the request is sent.

        `allowed_s` is the wait before a local run starts if nothing is known about the link. `after_s` is the
        time from the last byte of the request to the reply.
        """
        acked_s = 0.0  # when its first bytes may be acknowledged
        if link is not None:
            acked_s = link.rtt_s + _FIRST_BITS / max(link.up_bits_per_s, 1.0) + _SLACK_S
        self.look_s = min(max(allowed_s / 2, acked_s), allowed_s)
        self._allowed_s, self._local_s = allowed_s, local_s
        self._after_s, self._upload_bytes = after_s, upload_bytes
        self._previous = (0.0, 0)  # at the last look

    def more_s(self, elapsed_s: float, sent_bytes: int | None) -> float | None:
        """Return how many seconds to wait before the next call, or None if the local run should start.

        Args:
            elapsed_s: The time since the request was sent, in seconds.
            sent_bytes: The number of acknowledged bytes, or None if unknown.
        """
        (before_s, before_bytes), self._previous = self._previous, (elapsed_s, sent_bytes or 0)
        is_over = elapsed_s >= self._allowed_s
        rest_s = None if is_over else self._allowed_s - elapsed_s
        if sent_bytes is None:
            return rest_s
        if sent_bytes >= self._upload_bytes:
            has_got_more_time = before_s >= self._allowed_s and before_bytes < self._upload_bytes
            return self._after_s if has_got_more_time else rest_s
        if (moved_bytes := sent_bytes - before_bytes) < LEAST_MOVED_BYTES:
            return None if self._upload_bytes > _MOST_UNSEEN_BYTES else rest_s
        if not is_over:
            return rest_s
        upload_s = (self._upload_bytes - sent_bytes) / moved_bytes * (elapsed_s - before_s)
        due_s = upload_s + self._after_s
        if elapsed_s + due_s > self._allowed_s + self._local_s:
            return None
        return min(due_s, self.look_s)  # the link may fail at any time
