"""Which requests of a model become samples: drawn with probabilities that are fixed before the request.

A trigger of an order has a credit of samples, which grows evenly, up to that of a quarter of a day. Its
probability for the next request follows from its credit and from past requests alone:

    probability = samples a second / (requests a second * share of them that fits) * credit / half of its size

    20 a day of the uncertain ones, 10 requests a second, 1 % of them uncertain: 1 of 430 uncertain ones

A request is drawn first, and only then does anybody look whether the trigger fits it: nearly all requests
cost one subtraction. A sample states 1 - (1 - p1)(1 - p2)... over the triggers that fit, whichever drew it:
its inverse is the number of requests for which it stands. Where there is no credit, or no room on the disk,
a trigger draws nothing. So it never draws more than its credit and one.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger
from edgekit_runtime.records import dataclass

KEPT: Final = "kept"
"""Kind of the trigger that applications pull, which draws nothing."""

_DAY_S: Final = 86_400.0
_MIN_CREDIT: Final = 4.0
_MEMORY_S: Final = 6 * 3600.0  # older requests count less in their rate
_MAX_LOOKS: Final = 256.0  # then all looks so far count half
_LOOKS_PER_S: Final = 1 / 20  # at requests that may draw nothing: they show how many of them fit
_NEVER: Final = 1 << 62
_ALMOST_SURE: Final = 1 - 1e-12  # its logarithm is finite


def draw_uniform() -> float:
    """Return a random number, 0 to less than 1. The module `random` would take a megabyte of memory."""
    return int.from_bytes(os.urandom(6), "big") / (1 << 48)


class Credit:
    """How many samples may still be drawn.

    It holds up to a quarter of a day's samples; with `is_of_application`, a whole day's. Times are on a
    monotonic clock.
    """

    __slots__ = ("_grown_s", "_samples", "_size", "per_s")

    def __init__(self, per_day: float, now_s: float, *, is_of_application: bool = False) -> None:
        """Begin half full, or full with `is_of_application`."""
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
        """The level of the credit: 2 if it is full, 1 at half, 0 once it is used up."""
        return max(0.0, 2 * self._samples / self._size)


@dataclass(slots=True, eq=False, kw_only=True)
class Line:
    """One trigger of one order.

    Attributes:
        own, of_order: credit of the trigger, and of its order; a sample costs both.
        has_room: whether its share of the disk can take another sample.
        probability: probability that the next request is drawn.
        looks, fits: numbers of judged requests, and of those that fit the trigger; older requests count less.
        stored: samples that it drew.
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
        """Size limit in bytes of its samples on the disk: a share that no other trigger may use."""
        return self.order.max_bytes // len(self.order.triggers)

    def spend(self, samples: float) -> None:
        self.own.spend(samples)
        self.of_order.spend(samples)

    def note_look(self, *, is_fit: bool) -> None:
        if self.looks >= _MAX_LOOKS:
            self.looks, self.fits = self.looks / 2, self.fits / 2
        self.looks, self.fits = self.looks + 1, self.fits + is_fit

    def choose_probability(self, requests_per_s: float, now_s: float) -> float:
        """Return the probability to draw the next request; 0 without room, and for the kind `KEPT`.

        It brings the credits up to `now_s`, on a monotonic clock. Before the first request was judged, all
        count as fitting the trigger.
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
    """A request that was drawn; it becomes a sample only if a trigger fits it.

    Attributes:
        probabilities: probability of each line when the request came.
        hits: whether each line drew it.
        is_pulled: whether an application chose it; it then says nothing about other requests.
    """

    lines: tuple[Line, ...]
    probabilities: tuple[float, ...]
    hits: tuple[bool, ...]
    is_pulled: bool = False

    def select(self, fits: Sequence[bool]) -> "list[Selection]":
        """Return a sample for each order with a line that drew the request and fits it.

        `fits`: for each of `lines`, whether its trigger fits the request.
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
        """Count the lines that fit a request; a line that drew it without fitting gets its credit back.

        A request that an application chose is not counted. `fits`: see `select`.
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
    """A sample for one order, drawn by `lines`; its bytes count in the first line's share of the disk."""

    lines: tuple[Line, ...]
    probability: float


class Draws:
    """The draws of one model; times are on a monotonic clock.

    Attributes:
        countdown: number of requests until the next draw; the caller subtracts 1 for each request.
        lines: the triggers of all orders.
    """

    __slots__ = ("_begin", "_chance", "_looked_s", "_requests", "_seconds", "countdown", "lines")

    def __init__(self, now_s: float, chance: Callable[[], float] = draw_uniform) -> None:
        self.lines: tuple[Line, ...] = ()
        self.countdown = self._begin = _NEVER
        self._requests = self._seconds = 0.0
        self._looked_s, self._chance = now_s, chance

    def set_orders(self, orders: Iterable[SampleOrder], now_s: float) -> None:
        """Draw for these orders from now on; orders that are set already continue."""
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
        """Set the probabilities that hold until the next call, and start a new countdown with them."""
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
        """Draw the request at which `countdown` reached 0, and start the next countdown.

        Each line that drew the request pays one sample.
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
    """Draw a request because an application asked to keep it; return the draw, or None if no line drew it.

    A line of the kind `KEPT` draws it if the line has room on the disk and credit for one sample. The line
    pays that sample.

    `now_s`: on the clock of the lines' credit.
    """
    hits = []
    for line in lines:
        line.own.grow(now_s)
        hits.append(line.trigger.kind == KEPT and line.has_room and line.own.has_one)
        if hits[-1]:
            line.spend(1)
    return Draw(tuple(lines), tuple(map(float, hits)), tuple(hits), is_pulled=True) if any(hits) else None
