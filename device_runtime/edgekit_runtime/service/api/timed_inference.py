"""Inference with response headers that state the duration of the call and the load of the service."""

import os
from collections.abc import Iterator, Mapping

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.protocol.infer_request import InferRequest
from edgekit_runtime.service.answers.answer_path import AnswerPath
from edgekit_runtime.service.api.inference import InferenceHandler, Responder, WhenLoaded
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.send_buffer import Buffer
from edgekit_runtime.service.models.catalogue import Catalogue
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.observability.server_timing import RunTimes, UtilizationMeter, format_fields
from edgekit_runtime.service.oip.codec import RegionMap
from edgekit_runtime.service.oip.time_slices import Slicer
from edgekit_runtime.service.scheduling.call import Answer
from edgekit_runtime.service.serving.served_version import Served


def make_inference_handler(
    models: Catalogue, when_loaded: WhenLoaded, slicer: Slicer, answers: AnswerPath, times: RunTimes | None
) -> InferenceHandler:
    """Return a `TimedInferenceHandler`, or an `InferenceHandler` if `times` is None."""
    if times is None:
        return InferenceHandler(models, when_loaded, slicer, answers)
    return TimedInferenceHandler(models, when_loaded, slicer, answers, times)


class TimedInferenceHandler(InferenceHandler):
    """Handles inference requests, and adds times and load to the response headers."""

    __slots__ = ("_machine", "_meters", "_times")

    def __init__(
        self,
        models: Catalogue,
        when_loaded: WhenLoaded,
        slicer: Slicer,
        answers: AnswerPath,
        times: RunTimes,
    ) -> None:
        """Store what `InferenceHandler` stores, and `times`, where lanes record the times of their calls."""
        super().__init__(models, when_loaded, slicer, answers)
        self._times = times
        self._machine = UtilizationMeter(os.cpu_count() or 1)
        self._meters: dict[tuple[str, str], UtilizationMeter] = {}

    def handle_request(
        self, name: str, version: str | None, connection: Connection, head: RequestHead, body: memoryview
    ) -> None:
        """Handle an inference request. The response may be sent later. Errors also state the load.

        Devices measure the network latency with requests for unknown versions. If the unknown version is the
        name of a model, the error states the load of that model.
        """
        try:
            super().handle_request(name, version, connection, head, body)
        except EdgekitError as error:
            candidates = [
                served_version
                for served_version in self._models.served()
                if served_version.metrics.model in (name, version)
            ]
            asker = id(connection)
            machine = self._machine.measure(self._list_lanes, asker)
            load = max((self._measure_load(served, asker) for served in candidates), default=machine)
            connection.respond_error(error, format_fields(None, load))

    def _respond(
        self, connection: Responder, served: Served, request: InferRequest, regions: RegionMap, answer: Answer
    ) -> None:
        times = self._times.take()
        asker = id(connection)
        for meter in (self._meter(served), self._machine):
            meter.note(asker, times[1])
        is_run_here = not isinstance(answer, EdgekitError) and served.loaded.remote is None
        fields = format_fields(times if is_run_here else None, self._measure_load(served, asker))
        super()._respond(_StatingResponder(connection, fields), served, request, regions, answer)

    def _meter(self, served: Served) -> UtilizationMeter:
        key = (served.metrics.model, served.metrics.version)
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = UtilizationMeter(max(1, len(served.loaded.instances)))
        return meter

    def _measure_load(self, served: Served, asker: int) -> float:
        """Return the share of the model's slots or of the processors that others use, plus waiting calls."""
        metrics, loaded = served.metrics, served.loaded
        share = max(
            self._meter(served).measure(lambda: iter((metrics,)), asker),
            self._machine.measure(self._list_lanes, asker),
        )
        return share + metrics.waiting / (max(1, len(loaded.instances)) * loaded.scheduling.max_batch)

    def _list_lanes(self) -> Iterator[LaneMetrics]:
        return (served.metrics for served in self._models.served())


class _StatingResponder:
    """Sends a response with further headers; cached heads of responses are not changed."""

    __slots__ = ("_connection", "_fields")

    def __init__(self, connection: Responder, fields: Mapping[str, str]) -> None:
        self._connection, self._fields = connection, fields

    @property
    def is_open(self) -> bool:
        return self._connection.is_open

    def respond(self, *parts: Buffer) -> None:
        stated = "".join(f"\r\n{name}: {value}" for name, value in self._fields.items()) + "\r\n"
        status, _, remainder = bytes(parts[0]).partition(b"\r\n")
        self._connection.respond(status + stated.encode("ascii") + remainder, *parts[1:])

    def respond_error(self, error: BaseException, fields: Mapping[str, str] | None = None) -> None:
        self._connection.respond_error(error, {**self._fields, **(fields or {})})
