"""The state of this device's models, read from the slots and from the service."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from edgekit_runtime.agent.conditions import ModelView
from edgekit_runtime.agent.documents import ModelFigures, ReportedStream
from edgekit_runtime.agent.execution.install import Installer, ServiceIndex, describe_service
from edgekit_runtime.agent.figures import read_figures
from edgekit_runtime.client.control import read_fleet_streams, read_metrics, read_samples
from edgekit_runtime.dataclass_json import from_plain
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.protocol.streams import StreamOptions

_SERVICE_S: Final = 3.0  # between reads of the service's index, or 1 s during an execution
_FIGURES_S: Final = 10.0
_QUIET_FIGURES_S: Final = 300.0
_MAX_ERROR: Final = 200
_YOUNG_S: Final = 3600.0  # figures are sent often for this time after an execution


class DeviceObserver:
    """Reads the slots, the index of the service and the figures of the service.

    It reads the slots after each change, the index every few seconds, and the figures less often.
    Each `now_s` is the time of the monotonic clock.

    Attributes:
        views: a dict from the name of each model to its state.
    """

    def __init__(self, installer: Installer, now_s: float) -> None:
        self._installer = installer
        self.views: dict[str, ModelView] = {}
        self._fingerprint: dict[str, tuple[int, ...]] = {}
        self._service: tuple[bool, ServiceIndex | None] = (False, None)
        self._service_s = self._figures_s = 0.0
        self._busy_s = now_s  # when an execution was last under way
        self._figures: tuple[ModelFigures, ...] = ()
        self._streams: Mapping[str, Any] = {}
        self._streams_s = self._samples_s = 0.0
        self._samples: Mapping[str, Any] = {}

    def forget(self) -> None:
        """Make the next `look` read the slots and the service. Call this after a step has ended."""
        self._fingerprint, self._service_s = {}, 0.0

    def look(self, now_s: float, *, is_step_running: bool, is_under_way: bool) -> None:
        """Update `views`.

        Args:
            now_s: time of the monotonic clock.
            is_step_running: whether a step is running. If not, each change of the slots causes an
                additional request to the service.
            is_under_way: whether an update is under way. If so, the service is asked every second,
                otherwise every 3 s.
        """
        fingerprint = dict(self._installer.fingerprint())
        if fingerprint == self._fingerprint and now_s < self._service_s:
            return
        if not is_step_running or now_s >= self._service_s:
            runs, index = self._installer.read_service()
            self._service = runs, self._service[1] if runs and index is None else index
            self._service_s = now_s + (1.0 if is_under_way else _SERVICE_S)
        views = {}
        for model, state in fingerprint.items():
            if not state and is_step_running:  # its first package is being written: nothing to rebuild
                continue
            with contextlib.suppress(EdgekitError):
                view = self._installer.view(model)
                if view.version or view.previous or view.rejected:  # otherwise it was removed
                    views[model] = self._add_service(view)
        self.views, self._fingerprint = views, fingerprint

    def read_figures(self, now_s: float, *, is_under_way: bool) -> tuple[ModelFigures, ...]:
        """Return the latest figures of all versions, or an empty tuple before the first reading.

        The service is asked every 10 s during an execution and for an hour after it, otherwise every 5 min.
        """
        if is_under_way:
            self._busy_s = now_s
        period_s = _FIGURES_S if now_s - self._busy_s < _YOUNG_S else _QUIET_FIGURES_S
        socket_path = self._installer.find_service()
        if self._service[0] and socket_path is not None and now_s - self._figures_s > period_s:
            self._figures_s = now_s
            with contextlib.suppress(EdgekitError):
                self._figures = read_figures(read_metrics(socket_path), self._figures)
        return self._figures

    def read_streams(
        self, now_s: float, desired: Mapping[str, StreamOptions]
    ) -> Mapping[str, ReportedStream]:
        """Return the state of each desired stream. It is `missing` if no service runs the stream."""
        if desired and now_s >= self._streams_s:
            self._streams_s = now_s + _SERVICE_S
            socket_path = self._installer.find_service() if self._service[0] else None
            self._streams = {} if socket_path is None else read_fleet_streams(socket_path)
        return {name: _read_stream(settings, self._streams.get(name)) for name, settings in desired.items()}

    def read_samples(self, now_s: float, *, is_needed: bool) -> Mapping[str, Any]:
        """Return a recent result of `control.read_samples`, or an empty dict if it is not needed."""
        if not is_needed:
            return {}
        if now_s >= self._samples_s:
            self._samples_s = now_s + _SERVICE_S
            socket_path = self._installer.find_service() if self._service[0] else None
            self._samples = {} if socket_path is None else read_samples(socket_path)
        return self._samples

    def _add_service(self, view: ModelView) -> ModelView:
        runs, index = self._service
        if not runs:
            return view
        served, on_trial, remark = describe_service(index or {}, view.model)
        key = view.model, view.version
        not_finite = sum(
            figures.not_finite for figures in self._figures if (figures.model, figures.version) == key
        )
        return replace(view, served=served, on_trial=on_trial, remark=remark, not_finite=not_finite)


def _read_stream(settings: StreamOptions, stated: object) -> ReportedStream:
    with contextlib.suppress(ConfigError):
        stream = from_plain(ReportedStream, stated)
        return replace(stream, error=stream.error[:_MAX_ERROR])
    return ReportedStream(model=settings.model, state="missing", error="no service runs it")
