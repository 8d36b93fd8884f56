"""What the registry knows of one name."""

import asyncio
import time
from collections.abc import Sequence

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.service.models.lifecycle import Keeper
from edgekit_runtime.service.rollout.trial import Trial
from edgekit_runtime.service.serving.served_version import Served


class EvictedError(UnavailableError):
    """A model was unloaded to make room for others, or cannot be loaded yet; a request loads it.

    Attributes:
        model: its name.
    """

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}' is not loaded: {reason}", 1.0)
        self.model = model


class Model:
    """One model, with all its versions that take calls.

    Attributes:
        versions: by version; of them `default` answers requests that name none.
        state, reason: as the repository's index has them.
        failed: version -> why it was rolled back.
        trial: of a new version, or None.
        is_evicted: whether it was unloaded for others, or could not be loaded for want of what the machine
            has to give, and waits for its next request.
        loading: what loads it for requests that wait, or None.
        waiting: how many requests wait for that.
        loaded_s: when versions were put in, on `time.monotonic`.
        lock: held by who changes any of it.
    """

    __slots__ = (
        *("default", "failed", "is_evicted", "loaded_s", "loading", "lock", "reason", "state", "trial"),
        *("versions", "waiting"),
    )

    def __init__(self) -> None:
        self.versions: dict[str, Served] = {}
        self.default: Served | None = None
        self.state = "UNAVAILABLE"
        self.reason = "not loaded"
        self.failed: dict[str, str] = {}
        self.trial: Trial | None = None
        self.is_evicted = False
        self.loading: asyncio.Task[None] | None = None
        self.waiting = 0
        self.loaded_s = 0.0
        self.lock = asyncio.Lock()

    def put_in(self, fresh: Sequence[Served]) -> None:
        """Let requests find `fresh`, of which the first answers those that name no version."""
        self.versions = {served.version: served for served in fresh}
        self.default = fresh[0]
        self.is_evicted = False
        self.loaded_s = time.monotonic()
        for version in self.versions:
            self.failed.pop(version, None)

    def take_out(self, keeper: Keeper) -> list[Served]:
        """Let requests find nothing, and return what they found; a trial ends without a verdict."""
        if self.trial is not None:
            self.trial.end()
            self.trial = None
        old = list(self.versions.values())
        for served in old:
            keeper.forget(served)
        self.versions, self.default = {}, None
        return old
