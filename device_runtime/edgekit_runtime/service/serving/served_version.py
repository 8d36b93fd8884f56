"""A version of a model that accepts calls, with all its lanes."""

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
    """Collects requests as samples for the fleet, see `samples.sampler`."""

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
        """Process a request before its answer is sent, while its inputs are valid.

        `file` contains the content, media type and placement of the request's file. None for tensors.
        """

    def to_json(self) -> dict[str, JsonValue]:
        """Return the progress of the orders, see `ModelSampler.to_json`."""


@dataclass(slots=True, eq=False, kw_only=True)
class Served:
    """A version of a model that accepts calls.

    Attributes:
        own_lane: The last lane, which passes calls to sessions or workers. It is drained before unloading.
        stack: The first lane of the version. The configured lanes for sequences, drift statistics and the
            cache lie between `stack` and `own_lane`.
        lane: The lane that receives new calls. During a trial, it is the lane of the trial, else `stack`.
        sequences: The lane that keeps the states of sequences, or None for a model without states.
        drift: The drift statistics of inputs and outputs, or None.
        cache: The response cache of this version, or None.
        governed: The parts of this version that a governor controls, or None without a governor.
        trial: The trial in which this version takes part, or None.
        sampler: Collects samples of the requests, or None if the fleet orders none.
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
        """The estimated memory of this version in bytes.

        For a version in worker processes, it depends on the number of sessions that a worker reports. At most
        one session per processor is counted, because a faulty worker could report too many.
        """
        loaded = self.loaded
        reported = None if loaded.remote is None else loaded.remote.to_json().get("sessions")
        if not isinstance(reported, int):
            return loaded.memory_bytes
        most = max(loaded.sessions_counted, os.cpu_count() or 1)
        sessions = max(loaded.sessions_counted, min(reported, most))
        return loaded.memory_bytes * sessions // loaded.sessions_counted

    def to_json(self) -> dict[str, JsonValue]:
        """Return `variant`, `sessions` and the statistics of the existing parts.

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
    """A trial of a new version beside the version in use, until the gates decide which version stays.

    Attributes:
        current: The version in use. The trial receives its calls until `end`.
        options: The options of the model, including those of the trial.
        runner: Compares the versions, in this process or in a worker.
    """

    current: Served
    candidate: Served
    options: ModelOptions
    runner: TrialRunner

    def end(self) -> None:
        """Stop sending calls to the candidate. Running calls are still answered."""
        self.runner.end()
        self.current.trial = self.candidate.trial = None

    def describe(self) -> str:
        """Return a one-line description for the index of models."""
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
        """Whether the method of comparison was guessed from the shape of an output."""
        comparison = self.to_json().get("comparison")
        return isinstance(comparison, Mapping) and comparison["guessed"] is True

    def to_json(self) -> dict[str, JsonValue]:
        """Return the observations of `runner`, the `kind` of the trial and both versions."""
        return {
            **self.runner.to_json(),
            "kind": self.options.rollout,
            "current_version": self.current.version,
            "candidate_version": self.candidate.version,
        }
