"""A lane that collects drift statistics. It samples only as many calls as its time budget allows."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.errors import EdgekitError, ManifestError
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.service.options.resources import DriftLimits
from edgekit_runtime.service.scheduling.call import Answer, Call, Lane
from edgekit_runtime.service.scheduling.golden_ratio import GOLDEN
from edgekit_runtime.tensors import Array, TensorSpec

_MOST_SKIPPED: Final = 10_000
_FIRST_COST_S: Final = 50e-6

_logger = logging.getLogger(__name__)


def make_drift(
    manifest: Manifest, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], limits: DriftLimits
) -> Drift | None:
    """Return the drift statistics of a version. If its manifest is wrong, log a warning and return None."""
    try:
        return Drift(inputs, outputs, manifest.figures, limits.window)
    except ManifestError as error:
        # Only the description of the model's data is unusable, not the model.
        _logger.warning("%s %s is not watched for drift: %s", manifest.name, manifest.version, error)
        return None


class DriftLane(Lane):
    """Collects statistics of some calls. Place it before the cache, so that repeated inputs count too."""

    __slots__ = ("_budget_s", "_clock", "_cost_s", "_countdown", "_drift", "_lane", "_phase")

    def __init__(
        self,
        drift: Drift,
        lane: Lane,
        *,
        budget_s: float = DriftLimits().budget_s,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create a lane that collects statistics of calls for `lane`.

        Args:
            drift: The drift statistics of the version behind this lane.
            lane: The next lane.
            budget_s: The mean time per call in seconds that the statistics may take.
            clock: Returns the time in seconds.
        """
        self._budget_s = budget_s
        self._cost_s = _FIRST_COST_S  # smoothed time of a look
        self._phase = 0.0
        self._drift = drift
        self._lane = lane
        self._clock = clock
        self._countdown = 1

    def attempt(self, inputs: Mapping[str, Array]) -> "Answer | None":
        """Return the answer of the next lane.

        Return None if the next lane returns None, or if `submit` should sample the call.
        """
        if self._countdown <= 1:
            return None
        answer = self._lane.attempt(inputs)
        if answer is not None:
            self._countdown -= 1
        return answer

    def takes_work(self, inputs: Mapping[str, Array]) -> bool:
        return self._countdown > 1 and self._lane.takes_work(inputs)

    def submit(self, call: Call) -> None:
        """Pass `call` to the next lane, and sample it if the next sample is due. This does not raise."""
        self._countdown -= 1
        if self._countdown > 0:
            self._lane.submit(call)
            return
        self._countdown = 1
        drift, clock = self._drift, self._clock
        begin_s = clock()
        # Wrong inputs must not fail here: the session says what is wrong with them.
        try:
            picked = drift.pick_inputs(call.inputs, self._phase)
        except (KeyError, ValueError, TypeError):
            self._lane.submit(call)
            return
        picked_s = clock() - begin_s

        def take(answer: Answer) -> None:
            if isinstance(answer, EdgekitError):
                call.reply(answer)
                return
            answered_s = clock()
            drift.judge(call.inputs, answer)  # they are valid until the reply
            judged_s = clock() - answered_s
            call.reply(answer)
            again_s = clock()
            drift.add(picked, answer, self._phase)
            self._countdown = self._count_skipped(picked_s + judged_s + clock() - again_s)

        self._lane.submit(call.answered_by(take))

    def _count_skipped(self, seconds: float) -> int:
        """Record the time that the statistics took. Return the number of calls until the next sample."""
        # A pause of the whole process is not the cost of counting.
        self._cost_s += 0.25 * (min(seconds, 4 * self._cost_s) - self._cost_s)
        self._phase = (self._phase + GOLDEN) % 1.0
        # Not every k-th call: two clients that take turns would be seen unequally often.
        skipped = self._cost_s / self._budget_s * (0.5 + self._phase)
        return min(math.ceil(skipped), _MOST_SKIPPED)
