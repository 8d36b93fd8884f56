"""The models that are served. Requests look them up here, and only `Registry` and its parts modify them.

Everything in this module runs on the event loop's thread.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final

from edgekit_runtime.errors import EdgekitError, RequestError, UnavailableError
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.serving.served_version import Served, Trial

SWAP_RETRY_S: Final = 1


class EvictedError(UnavailableError):
    """The model is not in memory. It is loaded on demand, see `Registry.wait_for`."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}' is not loaded: {reason}", 1.0)
        self.model = model


class ModelEntry:
    """One model, with all versions that accept calls.

    Attributes:
        versions: A dict from version names to the loaded versions. `default` answers requests without a
            version.
        state, reason: The state and reason in the repository index.
        failed: A dict from versions to the reason why they were rolled back.
        is_evicted: Whether the next request loads the model. True if it was unloaded for other models, or if
            there was too little memory or no file descriptor to load it.
        loading: The task that loads the model for waiting requests, or None.
        waiting: The number of requests that wait for `loading`.
        loaded_s: When `versions` was set, in the time of `time.monotonic`.
        lock: A lock that is held while any of these attributes are changed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
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

    def publish(self, fresh: Sequence[Served]) -> None:
        """Replace the versions that answer requests. The first one becomes the default."""
        self.versions = {served.version: served for served in fresh}
        self.default = fresh[0]
        self.is_evicted = False
        self.loaded_s = time.monotonic()
        for version in self.versions:
            self.failed.pop(version, None)

    def withdraw(self) -> list[Served]:
        """Remove all versions and return them. A running trial ends without a verdict."""
        if self.trial is not None:
            self.trial.end()
            self.trial = None
        old = list(self.versions.values())
        self.versions, self.default = {}, None
        return old

    def end_trial(self, trial: Trial) -> Served:
        """End a trial, so that all calls go to the current version, and return the candidate."""
        trial.end()
        self.trial = None
        self.versions.pop(trial.candidate.version, None)
        return trial.candidate


@dataclass(frozen=True, slots=True)
class Status:
    """An entry of the repository index.

    Attributes:
        version: The version of the model, or empty for an entry about the whole model.
        state: `READY`, `LOADING`, `UNLOADED` or `UNAVAILABLE`.
        reason: Why the model is not ready, or a note such as the state of its trial. May be empty.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Catalogue:
    """All models by name and version.

    Attributes:
        by_name: A dict from names to models, including models that failed to load or were unloaded.
        is_listed: Whether the installed models were listed, so that each has an entry.
    """

    __slots__ = ("by_name", "is_listed")

    def __init__(self) -> None:
        self.by_name: dict[str, ModelEntry] = {}
        self.is_listed = False

    def find(self, name: str, version: str | None) -> Served:
        """Return a version of a model, or its default version if `version` is None.

        Raises:
            EvictedError: The model is not in memory, see `Registry.wait_for`.
            RequestError: The model or version does not exist or is not ready.
        """
        model = self.by_name.get(name)
        if model is not None:
            served = model.default if version is None else model.versions.get(version)
            if served is not None:
                return served
        raise self._explain(name, version)

    def served(self) -> list[Served]:
        """Return all versions that are ready. The default version of each model comes first."""
        versions = []
        for model in self.by_name.values():
            first = [model.default] if model.default is not None else []
            versions += [
                *first,
                *(served for served in model.versions.values() if served is not model.default),
            ]
        return versions

    def versions_of(self, name: str) -> list[str]:
        """Return the versions of `name` that are ready."""
        model = self.by_name.get(name)
        return [] if model is None else list(model.versions)

    def describe(self, installed: Iterable[str]) -> list[Status]:
        """Return the index entries of all models in `installed` and in this catalogue.

        Each version that is ready or was rolled back has an entry. The model itself has an entry if no
        version is ready, or if there is a reason for its state.
        """
        lines = []
        for name in sorted({*installed, *self.by_name}):
            model = self.by_name.get(name) or ModelEntry(name)
            for version, served in model.versions.items():
                is_candidate = model.trial is not None and served is model.trial.candidate
                trial = model.trial.describe() if model.trial is not None and is_candidate else ""
                lines.append(Status(name, version, "READY", trial))
            lines += [Status(name, version, "UNAVAILABLE", why) for version, why in model.failed.items()]
            if not model.versions or model.reason:
                lines.append(Status(name, "", model.state, model.reason))
        return lines

    def is_ready(self) -> bool:
        """Return whether the models are listed, and none is unavailable or loading for the first time."""
        return self.is_listed and all(
            model.default is not None or model.is_evicted or model.state == "UNLOADED"
            for model in self.by_name.values()
        )

    def judge_trials(self) -> None:
        """Judge all trials. Called every second, since a verdict may depend on time alone."""
        for model in self.by_name.values():
            if model.trial is not None:
                model.trial.runner.look()

    def _explain(self, name: str, version: str | None) -> EdgekitError:
        model = self.by_name.get(name)
        if model is None and not self.is_listed:
            return RequestError(503, "the models are being looked up", retry_after_s=SWAP_RETRY_S)
        if model is None:
            names = ", ".join(sorted(self.by_name)[:20]) or "none"
            return RequestError(404, f"model '{name[:80]}' is unknown, there are: {names}")
        if model.versions:
            names = ", ".join(model.versions)
            return RequestError(
                404, f"model '{name}' has no version '{str(version)[:80]}', there are: {names}"
            )
        if model.is_evicted:
            return EvictedError(name, model.reason)
        if model.state == "LOADING":
            return RequestError(503, f"model '{name}' is being loaded", retry_after_s=SWAP_RETRY_S)
        return RequestError(503, f"model '{name}' is not ready: {model.reason}")
