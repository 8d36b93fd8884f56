"""When a crashed worker is restarted, and when its version is rejected instead; only decisions."""

from dataclasses import dataclass
from typing import Final

from edgekit_runtime.service.options.model import Isolation

_FIRST_DELAY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Crashes:
    """How often in a row a worker has crashed.

    Attributes:
        count: of crashes with less than `healthy_s` from each start to the crash.
    """

    count: int = 0

    def after(self, lived_s: float, isolation: Isolation) -> "Crashes":
        """Return what a further crash makes of it, of a worker that had been ready for `lived_s`."""
        return Crashes(1 if lived_s >= isolation.healthy_s else self.count + 1)

    def delay_s(self, isolation: Isolation) -> float:
        """Return how long to wait before the next start: first not at all, then ever longer."""
        if self.count <= 1:
            return 0.0
        return min(_FIRST_DELAY_S * 2.0 ** min(self.count - 2, 30), isolation.max_delay_s)

    def is_loop(self, isolation: Isolation) -> bool:
        """Whether the version should be given up."""
        return self.count >= isolation.max_crashes
