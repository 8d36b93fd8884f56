"""Shortens the measurements listed in `$EDGEKIT_BRIEF`, such as `times,memory,races`.

Tests set this variable to save time. Child processes inherit it. The figures of packages that are made with
it are meaningless.
"""

import os
from dataclasses import replace
from typing import Final, Literal

from edgekit_runtime.sessions.latency import LatencyLimits

VARIABLE: Final = "EDGEKIT_BRIEF"
_BATCH_S: Final = 0.0001
_HOST_S: Final = 0.1


def is_brief(kind: Literal["times", "memory", "races"]) -> bool:
    """Return whether `$EDGEKIT_BRIEF` contains this kind of measurements.

    If it contains `races`, measurements that compare forms with similar predicted latencies are skipped.
    """
    return kind in os.environ.get(VARIABLE, "").split(",")


def shorten_limits(limits: LatencyLimits) -> LatencyLimits:
    """Return the limits, with fewer rounds and shorter batches if `$EDGEKIT_BRIEF` contains `times`."""
    if not is_brief("times"):
        return limits
    return replace(limits, max_rounds=limits.min_rounds, batch_s=shorten_batch_s(limits.batch_s))


def shorten_batch_s(batch_s: float) -> float:
    """Return the duration of a batch of runs in seconds. It is shorter if `$EDGEKIT_BRIEF` has `times`."""
    return min(batch_s, _BATCH_S) if is_brief("times") else batch_s


def shorten_s(duration_s: float) -> float:
    """Return the duration of a measurement in seconds. It is shorter if `$EDGEKIT_BRIEF` has `times`."""
    return min(duration_s, _HOST_S) if is_brief("times") else duration_s
