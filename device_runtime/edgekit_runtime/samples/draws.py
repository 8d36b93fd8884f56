"""Draws the requests of a model that become samples, with probabilities that are set before each request.

Each trigger of an order has a credit, which is the number of samples that it may draw. The credit grows at a
constant rate, and its maximum is the number of samples in six hours. The probability for the next request
depends only on the credit and on past requests:

    probability = samples per second / fitting requests per second * credit / (maximum credit / 2)

For example, an order asks for 20 uncertain samples a day, and 1 % of 10 requests per second are uncertain.
With half of the maximum credit, 1 of 430 uncertain requests is drawn.

A request is drawn before its triggers are checked, so most requests cost just one subtraction. A sample
states the probability 1 - (1 - p1)(1 - p2)... over all triggers that fit, even if only one of them drew it.
Without credit or disk space, a trigger draws nothing. It exceeds its credit by at most one sample.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger
from edgekit_runtime.records import dataclass

KEPT: Final = "kept"
"""The kind of trigger with which applications keep samples. It draws nothing itself."""

_DAY_S: Final = 86_400.0
_MIN_CREDIT: Final = 4.0
_MEMORY_S: Final = 6 * 3600.0  # older requests count less in their rate
_MAX_LOOKS: Final = 256.0  # then all looks so far count half
_LOOKS_PER_S: Final = 1 / 20  # at requests that may draw nothing: they show how many of them fit
_NEVER: Final = 1 << 62
_ALMOST_SURE: Final = 1 - 1e-12  # its logarithm is finite


def draw_uniform() -> float:
    """Return a random number in [0, 1)."""
    return int.from_bytes(os.urandom(6), "big") / (1 << 48)


class Credit:
    """The number of samples that may still be drawn.

    It grows by `per_day` samples a day. The maximum is the number of samples in six hours, or in a day if
    `is_of_application` is set. Times are those of a monotonic clock.
    """

    __slots__ = ("_grown_s", "_samples", "_size", "per_s")

    def __init__(self, per_day: float, now_s: float, *, is_of_application: bool = False) -> None:
        self.per_s, self._grown_s = per_day / _DAY_S, now_s
        self._size = max(1.0, per_day) if is_of_application else max(_MIN_CREDIT, per_day / 4)
        self._samples = self._size if is_of_application else self._size / 2

    def grow(self, now_s: float) -> None:
        self._samples = min(self._size, self._samples + self.per_s * (now_s - self._grown_s))
        self._grown_s = now_s

    def spend(self, samples: float) -> None:
        self._samples = min(self._size, self._samples - samples)

    @property
    def has_one(self) -> bool:
        return self._samples >= 1

    @property
    def level(self) -> float:
        """The level of the credit: 0 if it is used up, 1 if half of the maximum is left, 2 if it is full."""
        return max(0.0, 2 * self._samples / self._size)


@dataclass(slots=True, eq=False, kw_only=True)
class Line:
    """One trigger of one order.

    Attributes:
        own, of_order: The credits of the trigger and of its order. A sample is subtracted from both.
        has_room: Whether there is disk space for another sample of this trigger.
        probability: The probability that the next request is drawn.
        looks: The number of requests that were checked. Older requests count less.
        fits: The number of these requests that fit the trigger.
        stored: The number of samples that this trigger drew.
    """

    order: SampleOrder
    trigger: SampleTrigger
    own: Credit
    of_order: Credit
    has_room: bool = True
    probability: float = 0.0
    looks: float = 0.0
    fits: float = 0.0
    stored: int = 0

    @property
    def share(self) -> tuple[str, str]:
        return self.order.id, self.trigger.kind

    @property
    def max_bytes(self) -> int:
        """The disk space in bytes that is reserved for the samples of this trigger."""
        return self.order.max_bytes // len(self.order.triggers)

    def spend(self, samples: float) -> None:
        self.own.spend(samples)
        self.of_order.spend(samples)

    def note_look(self, *, is_fit: bool) -> None:
        if self.looks >= _MAX_LOOKS:
            self.looks, self.fits = self.looks / 2, self.fits / 2
        self.looks, self.fits = self.looks + 1, self.fits + is_fit

    def choose_probability(self, requests_per_s: float, now_s: float) -> float:
        """Update the credits and return the probability with which to draw the next request.

        The probability is 0 if there is no disk space or if the kind is `KEPT`. Until a request was checked,
        all requests are assumed to fit the trigger. `now_s` is the time of a monotonic clock.
        """
        self.own.grow(now_s)
        self.of_order.grow(now_s)
        if self.trigger.kind == KEPT or not self.has_room:
            return 0.0
        fitting_per_s = requests_per_s * (self.fits + 1) / (self.looks + 1)
        level = min(self.own.level, self.of_order.level)
        return min(_ALMOST_SURE, self.own.per_s * level / fitting_per_s)


@dataclass(frozen=True, slots=True)
class Draw:
    """A request that was drawn. It becomes a sample only if a trigger fits it.

    Attributes:
        probabilities: The probability of each line when the request arrived.
        hits: For each line, whether it drew the request.
        is_pulled: Whether an application chose the request. Such requests are not counted in `Line.looks`.
    """

    lines: tuple[Line, ...]
    probabilities: tuple[float, ...]
    hits: tuple[bool, ...]
    is_pulled: bool = False

    def select(self, fits: Sequence[bool]) -> "list[Selection]":
        """Return the samples of the request, at most one for each order.

        An order gets a sample if one of its lines drew the request and fits it. `fits` states for each line
        whether its trigger fits the request.
        """
        drawn: dict[str, list[Line]] = {}
        rests: dict[str, float] = {}
        for line, probability, is_hit, is_fit in zip(
            self.lines, self.probabilities, self.hits, fits, strict=True
        ):
            if is_fit:
                rests[line.order.id] = rests.get(line.order.id, 1.0) * (1 - probability)
                if is_hit:
                    drawn.setdefault(line.order.id, []).append(line)
        return [Selection(tuple(lines), 1 - rests[order]) for order, lines in drawn.items()]

    def settle(self, fits: Sequence[bool]) -> None:
        """Update the statistics of the lines. `fits` has the same meaning as in `select`.

        A line that drew the request but does not fit it gets its credit back.
        """
        orders = set()
        for line, is_hit, is_fit in zip(self.lines, self.hits, fits, strict=True):
            if not self.is_pulled:
                line.note_look(is_fit=is_fit)
            if is_hit and not is_fit:
                line.spend(-1)
            elif is_hit and line.order.id in orders:  # one sample, drawn twice
                line.of_order.spend(-1)
            elif is_hit:
                orders.add(line.order.id)


@dataclass(frozen=True, slots=True)
class Selection:
    """A sample for one order, drawn by `lines`. Its disk space is counted for the first line."""

    lines: tuple[Line, ...]
    probability: float


class Draws:
    """Draws the samples of one model. Times are those of a monotonic clock.

    Attributes:
        countdown: The number of requests until the next draw. The caller must subtract 1 for each request.
        lines: The triggers of all orders.
    """

    __slots__ = ("_begin", "_chance", "_looked_s", "_requests", "_seconds", "countdown", "lines")

    def __init__(self, now_s: float, chance: Callable[[], float] = draw_uniform) -> None:
        self.lines: tuple[Line, ...] = ()
        self.countdown = self._begin = _NEVER
        self._requests = self._seconds = 0.0
        self._looked_s, self._chance = now_s, chance

    def set_orders(self, orders: Iterable[SampleOrder], now_s: float) -> None:
        """Replace the orders. Orders that were already set keep their state."""
        before = {(line.order, line.trigger): line for line in self.lines}
        lines = []
        for order in orders:
            of_order = next(
                (line.of_order for line in self.lines if line.order == order), Credit(order.per_day, now_s)
            )
            for trigger in order.triggers:
                per_day = min(trigger.per_day or order.per_day, order.per_day)
                own = Credit(per_day, now_s, is_of_application=trigger.kind == KEPT)
                line = Line(order=order, trigger=trigger, own=own, of_order=of_order)
                lines.append(before.get((order, trigger), line))
        self.lines = tuple(lines)
        self.refresh(now_s)

    def refresh(self, now_s: float) -> None:
        """Update the probabilities and restart the countdown."""
        elapsed_s = max(0.0, now_s - self._looked_s)
        memory = math.exp(-elapsed_s / _MEMORY_S)
        self._requests = self._requests * memory + self._begin - self.countdown
        self._seconds = self._seconds * memory + elapsed_s
        self._looked_s = now_s
        per_s = (self._requests + 1) / max(self._seconds, 1e-3)
        for line in self.lines:
            line.probability = line.choose_probability(per_s, now_s)
        log_none = self._sum_logs(per_s, 0)
        self.countdown = _NEVER
        if log_none < 0:
            self.countdown = 1 + min(_NEVER, int(math.log(1 - self._chance()) / log_none))
        self._begin = self.countdown

    def draw(self, now_s: float) -> Draw:
        """Draw the request for which `countdown` reached 0, and restart the countdown.

        Each line that drew the request uses one sample of its credit.
        """
        per_s = (self._requests + 1) / max(self._seconds, 1e-3)
        hits: list[bool] = []
        for index, line in enumerate(self.lines):
            probability = line.probability
            if not any(hits):  # at least one of them, or the look, has drawn it
                probability /= -math.expm1(self._sum_logs(per_s, index))
            hits.append(self._chance() < probability)
        draw = Draw(self.lines, tuple(line.probability for line in self.lines), tuple(hits))
        for line, is_hit in zip(self.lines, hits, strict=True):
            if is_hit:
                line.spend(1)
        self.refresh(now_s)
        return draw

    def _sum_logs(self, per_s: float, begin: int) -> float:
        """Return the logarithm of the probability that neither a look nor a line from `begin` on draws."""
        if all(line.trigger.kind == KEPT for line in self.lines):
            return 0.0
        logs = (math.log1p(-line.probability) for line in self.lines[begin:])
        return math.log1p(-min(_ALMOST_SURE, _LOOKS_PER_S / per_s)) + sum(logs)


def pull_kept(lines: Sequence[Line], now_s: float) -> Draw | None:
    """Draw a request that an application asked to keep.

    Each line of the kind `KEPT` that has disk space and credit draws the request, and uses one sample of its
    credit. `now_s` is the time on the clock of the credits.

    Returns:
        The draw, or None if no line drew the request.
    """
    hits = []
    for line in lines:
        line.own.grow(now_s)
        hits.append(line.trigger.kind == KEPT and line.has_room and line.own.has_one)
        if hits[-1]:
            line.spend(1)
    return Draw(tuple(lines), tuple(map(float, hits)), tuple(hits), is_pulled=True) if any(hits) else None
