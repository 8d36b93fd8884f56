"""One version of a model that accepts calls, with everything that stands before its sessions."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.scheduling.call import DrainingLane, Lane
from edgekit_runtime.service.scheduling.response_cache import CacheLane
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.serving.remote import TrialRunner
from edgekit_runtime.tensors import Array

if TYPE_CHECKING:
    from edgekit_runtime.preprocessing.media import MediaType
    from edgekit_runtime.preprocessing.placement import Placement
    from edgekit_runtime.service.governor.profile import GovernedModel
    from edgekit_runtime.service.scheduling.sequence_lane import SequenceLane


class Sampler(Protocol):
    """Takes requests as samples for the fleet, see `samples.sampler`."""

    def note(
        self,
        served: "Served",
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        request_id: str | None = None,
        file: "tuple[bytes | memoryview, MediaType | None, Placement | None] | None" = None,
        answer: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Take a request before its answer is sent, while its inputs are valid.

        `file`: content, media type and placement of the file that the request had, or None for tensors.
        """

    def to_json(self) -> dict[str, JsonValue]:
        """Return order id -> its counts of stored and dropped samples, and its error."""


@dataclass(slots=True, eq=False, kw_only=True)
class Served:
    """One version of a model that accepts calls.

    Attributes:
        own_lane: the last lane, which passes calls to its sessions or workers; drained before unloading.
        stack: the first lane of the version. The configured lanes for sequences, drift statistics and cache
            pass calls on in this order, and the last of them to `own_lane`.
        lane: the lane where calls enter: `stack`, or the trial's lane in front of `stack`.
        sequences: the lane in `stack` that keeps the states of sequences, or None for a model without states.
        drift: drift statistics of its inputs and outputs, or None.
        cache: the response cache of this version, or None.
        governed: what a governor controls of this version, or None without a governor.
        trial: the trial that this version takes part in, or None.
        sampler: takes samples of its requests, or None where the fleet orders none.
    """

    loaded: Loaded
    codec: Codec
    metrics: LaneMetrics
    own_lane: DrainingLane
    stack: Lane
    lane: Lane
    sequences: "SequenceLane | None" = None
    drift: Drift | None = None
    cache: CacheLane | None = None
    governed: "GovernedModel | None" = None
    trial: "Trial | None" = None
    sampler: Sampler | None = None

    @property
    def version(self) -> str:
        return self.loaded.manifest.version

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of this version in bytes, for the number of sessions that its worker reports.

        At most one session per processor counts, as `tune` opens no more. A faulty worker could otherwise
        push out all other models.
        """
        loaded = self.loaded
        reported = None if loaded.remote is None else loaded.remote.to_json().get("sessions")
        if not isinstance(reported, int):
            return loaded.memory_bytes
        most = max(loaded.sessions_counted, os.cpu_count() or 1)
        sessions = max(loaded.sessions_counted, min(reported, most))
        return loaded.memory_bytes * sessions // loaded.sessions_counted

    def to_json(self) -> dict[str, JsonValue]:
        """Return `variant`, `sessions`, and the statistics of the parts that it has.

        The parts are `governor`, `drift`, `cache`, `sequences`, `samples` and `rollout`.
        """
        loaded = self.loaded
        stated: dict[str, JsonValue] = {"variant": loaded.variant, "sessions": loaded.session_count}
        if loaded.remote is not None:
            stated |= loaded.remote.to_json()
        if self.governed is not None:
            lane = self.governed.lane
            stated |= {"variant": lane.setting.variant, "governor": lane.to_json()}
        if self.drift is not None:
            stated["drift"] = self.drift.to_json()
        if self.cache is not None:
            stated["cache"] = self.cache.to_json()
        if self.sequences is not None:
            stated["sequences"] = self.sequences.to_json()
        if self.sampler is not None:
            stated["samples"] = self.sampler.to_json()
        if self.trial is not None:
            stated["rollout"] = self.trial.to_json()
        return stated


@dataclass(slots=True, eq=False)
class Trial:
    """A new version beside the one in use, until its gates decide which of the two stays.

    Attributes:
        current: the version in use; its calls go through the trial until `end`.
        options: options of the model, the options of the trial included.
        runner: compares the versions, in this process or in a worker.
    """

    current: Served
    candidate: Served
    options: ModelOptions
    runner: TrialRunner

    def end(self) -> None:
        """Send the candidate no more calls; calls under way are still answered."""
        self.runner.end()
        self.current.trial = self.candidate.trial = None

    def describe(self) -> str:
        """Return one line for the index of models."""
        share = self.options.trial.share
        status = self.to_json()
        candidate, comparison = status["candidate"], status.get("comparison")
        answers = candidate["answers"] if isinstance(candidate, Mapping) else 0
        line = f"{self.options.rollout} with {share:.0%} of the calls, {answers} answers so far"
        if not isinstance(comparison, Mapping):  # a worker has not reported yet
            return line
        how = "a guess: " if comparison["guessed"] else ""
        return f"{line}, compared by {comparison['name']} ({how}{comparison['reason']})"

    @property
    def is_guessing(self) -> bool:
        """Whether only the shape of an output decided how answers are compared."""
        comparison = self.to_json().get("comparison")
        return isinstance(comparison, Mapping) and comparison["guessed"] is True

    def to_json(self) -> dict[str, JsonValue]:
        """Return the figures of `runner`, the `kind` of trial and both versions."""
        return {
            **self.runner.to_json(),
            "kind": self.options.rollout,
            "current_version": self.current.version,
            "candidate_version": self.candidate.version,
        }
