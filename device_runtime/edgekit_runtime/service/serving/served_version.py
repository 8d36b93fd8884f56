"""One version of a model that takes calls, with everything that stands before its sessions."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.drift.monitor import Drift
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.oip.codec import Codec
from edgekit_runtime.service.scheduling.call import Lane
from edgekit_runtime.service.scheduling.response_cache import CacheLane
from edgekit_runtime.service.serving.loader import Loaded

if TYPE_CHECKING:
    from edgekit_runtime.service.governor.profile import GovernedModel
    from edgekit_runtime.service.rollout.trial import Trial


class DrainingLane(Lane, Protocol):
    """A lane that can come to its end."""

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, is under way or is being answered."""

    def drain(self, done: Callable[[], None]) -> None:
        """Take no more calls, and call `done` once those that were taken are answered, maybe at once."""


@dataclass(slots=True, eq=False)
class Served:
    """One version of a model.

    Attributes:
        loaded: its sessions.
        codec: for its requests.
        metrics: what its lane counts.
        own_lane: the lane to its sessions.
        stack: `own_lane` with a cache and what watches for drift in front of it.
        lane: where its calls go: `stack`, or a trial in front of that.
        drift: what watches its inputs and outputs, or None.
        cache: of its answers, or None.
        governed: what a governor directs, where one chooses how the model is run, or None.
        trial: that this version takes part in, or None.
        say: returns what the process says in which the model is isolated, or None where it is not.
    """

    loaded: Loaded
    codec: Codec
    metrics: LaneMetrics
    own_lane: DrainingLane
    stack: Lane
    lane: Lane
    drift: Drift | None = None
    cache: CacheLane | None = None
    governed: "GovernedModel | None" = None
    trial: "Trial | None" = None
    say: Callable[[], Mapping[str, JsonValue]] | None = None

    @property
    def version(self) -> str:
        """Of its package."""
        return self.loaded.manifest.version

    @property
    def memory_bytes(self) -> int:
        """About what it takes, also of the sessions that a process says that it has of it.

        Of those, no more count than `tune` may find best, one a processor: else what a process says could
        push all other models out.
        """
        loaded = self.loaded
        said = None if self.say is None else self.say().get("sessions")
        if not isinstance(said, int):
            return loaded.memory_bytes
        most = max(loaded.sessions_counted, os.cpu_count() or 1)
        sessions = max(loaded.sessions_counted, min(said, most))
        return loaded.memory_bytes * sessions // loaded.sessions_counted

    def governor_to_json(self) -> Mapping[str, Any] | None:
        """Return what a governor has set, or None where there is none."""
        if self.governed is not None:
            return self.governed.lane.to_json()
        found: Any = None if self.say is None else self.say().get("governor")
        return found if isinstance(found, dict) else None

    def to_json(self) -> dict[str, JsonValue]:
        """Return what the statistics say beyond the protocol's own figures."""
        sessions = len({id(session) for session in self.loaded.instances})
        stated: dict[str, JsonValue] = {"variant": self.loaded.variant, "sessions": sessions}
        if self.say is not None:
            stated |= self.say()
        if self.governed is not None:
            lane = self.governed.lane
            stated |= {"variant": lane.setting.variant, "governor": lane.to_json()}
        if self.drift is not None:
            stated["drift"] = self.drift.to_json()
        if self.cache is not None:
            stated["cache"] = self.cache.to_json()
        if self.trial is not None:
            stated["rollout"] = self.trial.to_json()
        return stated
