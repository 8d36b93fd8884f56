"""Which measurements on this machine are brief: those in `$EDGEKIT_BRIEF`, such as `times,memory,races`.

Tests set it, since child processes inherit it: no outcome of theirs depends on the speed of a machine. A
package that was made so has figures that are worth nothing.
"""

import os
from dataclasses import replace
from typing import Final, Literal

from edgekit_runtime.sessions.latency import LatencyLimits

VARIABLE: Final = "EDGEKIT_BRIEF"
_BATCH_S: Final = 0.0001
_HOST_S: Final = 0.1


def is_brief(kind: Literal["times", "memory", "races"]) -> bool:
    """Return whether `$EDGEKIT_BRIEF` asks for short measurements of this kind.

    Brief `races` leave out the race between forms.
    """
    return kind in os.environ.get(VARIABLE, "").split(",")


def shorten_limits(limits: LatencyLimits) -> LatencyLimits:
    """Return the limits, with few rounds and short batches if `$EDGEKIT_BRIEF` keeps times short."""
    if not is_brief("times"):
        return limits
    return replace(limits, max_rounds=limits.min_rounds, batch_s=shorten_batch_s(limits.batch_s))


def shorten_batch_s(batch_s: float) -> float:
    """Return the seconds of one batch of runs: `batch_s`, or less where times are brief."""
    return min(batch_s, _BATCH_S) if is_brief("times") else batch_s


def shorten_s(duration_s: float) -> float:
    """Return for how many seconds to measure models here: `duration_s`, or less where times are brief."""
    return min(duration_s, _HOST_S) if is_brief("times") else duration_s
