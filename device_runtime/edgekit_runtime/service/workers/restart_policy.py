"""The restart policy of workers: when the next one starts, and when the version is given up; pure."""

from enum import Enum, auto
from typing import Final

from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.model import Isolation

_FIRST_DELAY_S: Final = 0.25
_MAX_FIRST_CRASHES: Final = 3  # while loading for the first time: the machine may have lacked memory
MAX_FIRST_REFUSALS: Final = 7  # of the system to load it for the first time; with the delays about 8 s


class End(Enum):
    """Why a worker ended, or did not start."""

    CRASH = auto()  # also if it hung or broke the protocol
    REFUSED = auto()  # it reported that the model cannot be loaded
    UNAVAILABLE = auto()  # the system lacks memory, processes or descriptors; this is no fault of the version
    TRAP = auto()  # a request divided integers so that the processor ended it, or a run cannot be stopped
    TRIAL = auto()  # the version on trial is blamed


@dataclass(frozen=True, slots=True)
class Crashes:
    """Crashes of a model's workers in a row.

    Attributes:
        count: number of crashes. A crash after `healthy_s` of service starts at 1 again.
    """

    count: int = 0

    def after(self, lived_s: float, isolation: Isolation) -> "Crashes":
        """Return the count after one more crash, of a worker that had been ready for `lived_s`."""
        return Crashes(1 if lived_s >= isolation.healthy_s else self.count + 1)

    def delay_s(self, isolation: Isolation) -> float:
        """Return the seconds to wait before the next start: 0 after one crash, then longer each time."""
        if self.count <= 1:
            return 0.0
        return min(_FIRST_DELAY_S * 2.0 ** min(self.count - 2, 30), isolation.max_delay_s)

    def is_loop(self, isolation: Isolation) -> bool:
        """Return whether there were so many crashes in a row that the version should be given up."""
        return self.count >= isolation.max_crashes


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The decision after the end of a worker.

    Attributes:
        delay_s: seconds to wait before the next start.
        fails_load: whether there is no next start: the version cannot be loaded.
        is_loop: whether the version keeps crashing and is to be rejected.
    """

    delay_s: float = 0.0
    fails_load: bool = False
    is_loop: bool = False


class RestartPolicy:
    """Decides when a model's workers are restarted, by the reason and the time of their end."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._crashes, self._traps = Crashes(), Crashes()
        self._refusals = 0  # of the system, in a row
        self.has_started = False

    def note_ready(self) -> None:
        """Count a worker that has loaded the model."""
        self.has_started, self._refusals = True, 0

    def decide(self, end: End, lived_s: float = 0.0) -> RestartDecision:
        """Return the decision after the end of a worker that had been ready for `lived_s`."""
        isolation, is_first = self._isolation, not self.has_started
        if end is End.TRIAL:
            return RestartDecision()
        if end is End.TRAP:  # never a loop: any client could get a good version rejected
            self._traps = self._traps.after(lived_s, isolation)
            return RestartDecision(self._traps.delay_s(isolation))
        if end is End.UNAVAILABLE:
            self._refusals += 1
            delay_s = Crashes(self._crashes.count + self._refusals).delay_s(isolation)
            return RestartDecision(delay_s, fails_load=is_first and self._refusals >= MAX_FIRST_REFUSALS)
        self._crashes = self._crashes.after(lived_s, isolation)
        is_final = end is End.REFUSED or self._crashes.count >= _MAX_FIRST_CRASHES
        return RestartDecision(
            self._crashes.delay_s(isolation),
            fails_load=is_first and is_final,
            is_loop=self._crashes.is_loop(isolation),
        )
