"""How long two versions take with the same inputs, for `canary.judge`."""

from dataclasses import dataclass, field
from typing import Final

from edgekit_runtime.service.rollout.confidence_sequences import LogHistogram

_LEAST_FOR_P99: Final = 100  # pairs before one in a hundred is known


@dataclass(slots=True)
class PairedLatency:
    """Latencies of pairs: both versions with the same inputs, at about the same time, in random order.

    Whatever slows both down, however long it lasts, is as likely to strike the one as the other. So a pair
    speaks against a candidate that is alike with a chance of one half, whatever came before; the tests of
    `judge` need no more.

    Attributes:
        ratio: of the candidate's to the current version's.
        current: of the current version, in seconds.
        candidate_slow: pairs of which the candidate alone took longer than the limit for one in a hundred.
        current_slow: pairs of which the current version alone took longer than one in a hundred did so far.
    """

    ratio: LogHistogram = field(default_factory=LogHistogram)
    current: LogHistogram = field(default_factory=LogHistogram)
    candidate_slow: int = 0
    current_slow: int = 0

    def add(self, current_s: float, candidate_s: float, max_p99_ratio: float) -> None:
        """Count a pair.

        Args:
            current_s: latency of the current version.
            candidate_s: latency of the candidate.
            max_p99_ratio: see `Gates`.
        """
        # By the pairs before this one: what decides must not know what it decides about.
        slow_s = self.current.quantile(0.99) if self.current.count >= _LEAST_FOR_P99 else None
        if slow_s is not None and max_p99_ratio:
            is_candidate, is_current = candidate_s > max_p99_ratio * slow_s, current_s > slow_s
            self.candidate_slow += is_candidate and not is_current
            self.current_slow += is_current and not is_candidate
        self.current.add(current_s)
        self.ratio.add(candidate_s / max(current_s, 1e-9))
