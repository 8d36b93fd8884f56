"""The models that are served, as requests find them; only `Registry` changes what is in here.

All of it happens on the thread of the event loop.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.models.entry import EvictedError, Model
from edgekit_runtime.service.serving.served_version import Served

SWAP_RETRY_S: Final = 1


@dataclass(frozen=True, slots=True)
class Status:
    """A line of the repository's index.

    Attributes:
        name, version: of the model; the version is empty where none was ever loaded.
        state: `READY`, `LOADING`, `UNLOADED` or `UNAVAILABLE`.
        reason: why it is not ready, or what is special about it, or empty.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Catalogue:
    """All models by name and version.

    Attributes:
        by_name: the models; one that failed to load or was unloaded stays.
        is_listed: whether what is installed was looked up, so that all that shall serve is in here.
    """

    __slots__ = ("by_name", "is_listed")

    def __init__(self) -> None:
        """Make one without models."""
        self.by_name: dict[str, Model] = {}
        self.is_listed = False

    def find(self, name: str, version: str | None) -> Served:
        """Return what serves `name`, of the given version or of the default one.

        Raises:
            EvictedError: it was unloaded for others; see `wait_for`.
            RequestError: there is no such model, no such version, or it is not ready.
        """
        model = self.by_name.get(name)
        if model is not None:
            served = model.default if version is None else model.versions.get(version)
            if served is not None:
                return served
        raise self._explain(name, version)

    def served(self) -> list[Served]:
        """Return all that is ready, the default version of each name first."""
        found = []
        for model in self.by_name.values():
            first = [model.default] if model.default is not None else []
            found += [*first, *(served for served in model.versions.values() if served is not model.default)]
        return found

    def versions_of(self, name: str) -> list[str]:
        """Return the versions of `name` that are ready."""
        model = self.by_name.get(name)
        return [] if model is None else list(model.versions)

    def describe(self, installed: Iterable[str]) -> list[Status]:
        """Return the state of all models, those that are `installed` and those that were loaded."""
        lines = []
        for name in sorted({*installed, *self.by_name}):
            model = self.by_name.get(name) or Model()
            for version, served in model.versions.items():
                is_candidate = model.trial is not None and served is model.trial.candidate
                said = model.trial.describe() if model.trial is not None and is_candidate else ""
                lines.append(Status(name, version, "READY", said))
            lines += [Status(name, version, "UNAVAILABLE", said) for version, said in model.failed.items()]
            if not model.versions or model.reason:
                lines.append(Status(name, "", model.state, model.reason))
        return lines

    def is_ready(self) -> bool:
        """Whether every model that was asked for serves, or will at its next request."""
        return self.is_listed and all(
            model.default is not None or model.is_evicted or model.state == "UNLOADED"
            for model in self.by_name.values()
        )

    def look(self) -> None:
        """Judge what is on trial; to be called every second or so, as a verdict may fall by time alone."""
        for model in self.by_name.values():
            if model.trial is not None:
                model.trial.look()

    def _explain(self, name: str, version: str | None) -> EdgekitError:
        model = self.by_name.get(name)
        if model is None and not self.is_listed:
            return RequestError(503, "the models are being looked up", retry_after_s=SWAP_RETRY_S)
        if model is None:
            known = ", ".join(sorted(self.by_name)[:20]) or "none"
            return RequestError(404, f"model '{name[:80]}' is unknown, there are: {known}")
        if model.versions:
            known = ", ".join(model.versions)
            return RequestError(
                404, f"model '{name}' has no version '{str(version)[:80]}', there are: {known}"
            )
        if model.is_evicted:
            return EvictedError(name, model.reason)
        if model.state == "LOADING":
            return RequestError(503, f"model '{name}' is being loaded", retry_after_s=SWAP_RETRY_S)
        return RequestError(503, f"model '{name}' is not ready: {model.reason}")
