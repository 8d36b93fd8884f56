"""Decides when workers are restarted, and when a version is rejected."""

from enum import Enum, auto
from typing import Final

from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.model import Isolation

_FIRST_DELAY_S: Final = 0.25
_MAX_FIRST_CRASHES: Final = 3  # while loading for the first time: the machine may have lacked memory
MAX_FIRST_REFUSALS: Final = 7  # of the system to load it for the first time, about 8 s with the delays


class End(Enum):
    """The reason why a worker ended or did not start."""

    CRASH = auto()  # also if it hung or broke the protocol
    REFUSED = auto()  # it reported that the model cannot be loaded
    UNAVAILABLE = auto()  # the system lacks memory, processes or descriptors. This is no fault of the version
    TRAP = auto()  # an integer division of a request crashed it, or a run cannot be stopped
    TRIAL = auto()  # the version on trial is blamed


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The decision after a worker has ended.

    Attributes:
        delay_s: The seconds to wait before the next start.
        fails_load: Whether the version cannot be loaded, so that there is no next start.
        is_loop: Whether the version keeps crashing and must be rejected.
    """

    delay_s: float = 0.0
    fails_load: bool = False
    is_loop: bool = False


class RestartPolicy:
    """Decides when the workers of a model are restarted, based on how earlier workers ended."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._crashes = self._traps = self._refusals = 0  # in a row; refusals are the system's
        self.has_started = False

    def note_ready(self) -> None:
        """Record that a worker has loaded the model."""
        self.has_started, self._refusals = True, 0

    def decide(self, end: End, lived_s: float = 0.0) -> RestartDecision:
        """Return the decision after a worker has ended. `lived_s` is how long it was ready, in seconds."""
        isolation, is_first = self._isolation, not self.has_started
        if end is End.TRIAL:
            return RestartDecision()
        if end is End.TRAP:  # never a loop: any client could get a good version rejected
            self._traps = 1 if lived_s >= isolation.healthy_s else self._traps + 1
            return RestartDecision(self._find_delay_s(self._traps))
        if end is End.UNAVAILABLE:
            self._refusals += 1
            delay_s = self._find_delay_s(self._crashes + self._refusals)
            return RestartDecision(delay_s, fails_load=is_first and self._refusals >= MAX_FIRST_REFUSALS)
        self._crashes = 1 if lived_s >= isolation.healthy_s else self._crashes + 1
        is_final = end is End.REFUSED or self._crashes >= _MAX_FIRST_CRASHES
        return RestartDecision(
            self._find_delay_s(self._crashes),
            fails_load=is_first and is_final,
            is_loop=self._crashes >= isolation.max_crashes,
        )

    def _find_delay_s(self, count: int) -> float:
        """Return the seconds to wait before the next start.

        It is 0 after one failure, and grows with `count`.
        """
        if count <= 1:
            return 0.0
        return min(_FIRST_DELAY_S * 2.0 ** min(count - 2, 30), self._isolation.max_delay_s)
