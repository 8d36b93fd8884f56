"""Handles inference requests: decodes the body, calls the model and encodes the response."""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

import numpy as np

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.infer_request import ANSWER, InferRequest
from edgekit_runtime.protocol.json_tensors import Sliced
from edgekit_runtime.service.answers.answer_path import Answered, AnswerPath, AnswerRequest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.send_buffer import Buffer
from edgekit_runtime.service.models.catalogue import Catalogue, EvictedError
from edgekit_runtime.service.oip.codec import RegionMap, is_long
from edgekit_runtime.service.oip.time_slices import Slicer
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tensors import Array

WhenLoaded: TypeAlias = Callable[[str, Connection, Callable[[], None]], None]

_NONE_HELD: Final[RegionMap] = {}
_TIMES_JSON: Final = 4  # tensors may take this multiple of the memory of their JSON: `1,` becomes an FP64


class Responder(Protocol):
    """Something that can send a response: a connection, or a wrapper that adds headers."""

    @property
    def is_open(self) -> bool:
        """Whether the client is still connected."""

    def respond(self, *parts: Buffer) -> None:
        """Send the response, as `Connection.respond` does."""

    def respond_error(self, error: BaseException, fields: Mapping[str, str] | None = None) -> None:
        """Respond with `error`. `fields` holds additional headers."""


class InferenceHandler:
    __slots__ = ("_answers", "_models", "_slicer", "_when_loaded")

    def __init__(
        self, models: Catalogue, when_loaded: WhenLoaded, slicer: Slicer, answers: AnswerPath
    ) -> None:
        """Store what all requests need.

        Args:
            models: The models that are served.
            when_loaded: A function that is called if a request needs a model that was unloaded for others. It
                takes the name of the model, the connection, and the call to make once the model is loaded
                again.
            slicer: Reads and writes long JSON.
            answers: Decodes files to inputs, and outputs to answers.
        """
        self._answers = answers
        self._models = models
        self._when_loaded = when_loaded
        self._slicer = slicer

    def handle_request(
        self, name: str, version: str | None, connection: Connection, head: RequestHead, body: memoryview
    ) -> None:
        """Handle an inference request. The response may be sent later.

        Raises:
            EdgekitError: The error to respond with.
        """
        try:
            served = self._models.find(name, version)
        except EvictedError:
            again = functools.partial(self.handle_request, name, version, connection, head, body)
            self._when_loaded(name, connection, again)
            return
        if served.loaded.remote is not None:
            raise served.loaded.remote.refuse()  # none of its processes took the request
        try:
            if is_long(body, head.json_bytes):
                work = self._infer_long(served, (name, version), connection, head, body)
                self._slicer.start(_while_open(connection, work), len(body) * _TIMES_JSON)
                return
            request, inputs = served.codec.decode(body, head.json_bytes, is_local=connection.is_local)
            if request.has_media or request.wants_answer:
                self._answer(served, (name, version), request, inputs, (connection, head, body))
                return
            self._infer(served, request, inputs, connection)
        except EdgekitError:
            served.metrics.refused += 1
            raise

    def _infer_long(
        self,
        served: Served,
        target: tuple[str, str | None],
        connection: Connection,
        head: RequestHead,
        body: memoryview,
    ) -> Sliced[None]:
        """Read long JSON and run the model on it; begin again if another version serves by then."""
        decoding = served.codec.decode_in_slices(body, head.json_bytes, is_local=connection.is_local)
        try:
            decoded = yield from decoding
            if self._is_current(served, *target):
                request, inputs = decoded
                if request.has_media or request.wants_answer:
                    self._answer(served, target, request, inputs, (connection, head, body))
                else:
                    self._infer(served, request, inputs, connection)
                return
        except EdgekitError:
            served.metrics.refused += 1
            raise
        self.handle_request(*target, connection, head, body)

    def _is_current(self, served: Served, name: str, version: str | None) -> bool:
        try:
            return self._models.find(name, version) is served
        except EdgekitError:  # `handle_request` says so, or loads it again
            return False

    def _answer(
        self,
        served: Served,
        target: tuple[str, str | None],
        request: InferRequest,
        inputs: Mapping[str, Array],
        origin: tuple[Connection, RequestHead, memoryview],
    ) -> None:
        """Decode a file before the run, or the answer of the task after it."""
        connection, head, body = origin
        regions = served.codec.hold(request, is_local=connection.is_local) if request.shares_outputs else {}

        def reply(answered: Answered | BaseException) -> None:
            if isinstance(answered, BaseException):
                connection.respond_error(answered)
                return
            parsed = request
            try:
                if answered.served is not served:  # its responses state another version
                    is_local = connection.is_local
                    parsed = answered.served.codec.decode(body, head.json_bytes, is_local=is_local)[0]
            except EdgekitError as error:
                connection.respond_error(error)
                return
            outputs = dict(answered.outputs)
            if request.wants_answer:
                outputs[ANSWER] = np.array([encode_json(answered.decoded)], object)
            InferenceHandler._respond(self, connection, answered.served, parsed, regions, outputs)

        file = next((tensor for tensor in request.inputs if tensor.is_media), None)
        self._answers.submit(
            AnswerRequest(
                find=functools.partial(self._models.find, *target),
                reply=reply,
                data=None if file is None else inputs[file.name].data,
                media_type=MediaType.parse(request.media_type) if request.media_type else None,
                inputs={name: array for name, array in inputs.items() if file is None or name != file.name},
                decodes=request.wants_answer,
                priority=request.priority,
                deadline_s=find_deadline(request, connection),
                is_unwanted=lambda: connection.has_left,
                sequence=request.sequence,
                request_id=request.id,
            )
        )

    def _infer(
        self, served: Served, request: InferRequest, inputs: Mapping[str, Array], connection: Connection
    ) -> None:
        regions = _NONE_HELD
        if request.shares_outputs:
            regions = served.codec.hold(request, is_local=connection.is_local)
        sequence, sampler = request.sequence, served.sampler
        answer = served.lane.attempt(inputs) if sequence is None else None
        if answer is None:
            deadline_s = find_deadline(request, connection)
            reply = functools.partial(self._respond, connection, served, request, regions)
            if sampler is not None:
                reply = functools.partial(_note, served, inputs, request.id, reply)
            served.lane.submit(
                Call(inputs, reply, request.priority, deadline_s, lambda: connection.has_left, sequence)
            )
        else:
            if sampler is not None and not isinstance(answer, EdgekitError):
                sampler.note(served, inputs, answer, request_id=request.id)
            self._respond(connection, served, request, regions, answer)

    def _respond(
        self,
        connection: "Responder",
        served: Served,
        request: InferRequest,
        regions: RegionMap,
        answer: Answer,
    ) -> None:
        if isinstance(answer, EdgekitError):
            connection.respond_error(answer)
            return
        codec = served.codec
        try:
            held_bytes = codec.measure_json(request, answer) if request.has_json_outputs else None
            if held_bytes is not None:
                encoding = codec.encode_in_slices(request, answer, regions)
                work = _send_encoded(encoding, connection)
                self._slicer.start(_while_open(connection, work), held_bytes)
                return
            parts = codec.encode(request, answer, regions)
        except Exception as error:  # also if a third party's backend returned something other than a tensor
            connection.respond_error(error)
        else:
            connection.respond(*parts)


def _note(
    served: Served,
    inputs: Mapping[str, Array],
    request_id: str | None,
    reply: Callable[[Answer], None],
    answer: Answer,
) -> None:
    """Show the request and its answer to the sampler, then pass the answer on."""
    if served.sampler is not None and not isinstance(answer, EdgekitError):
        served.sampler.note(served, inputs, answer, request_id=request_id)
    reply(answer)


def find_deadline(request: InferRequest, connection: Connection) -> float | None:
    """Return the latest time at which the run of a request may start, or None.

    The time is that of `time.monotonic`.
    """
    if request.timeout_us is None:
        return connection.deadline_s
    deadline_s = time.monotonic() + request.timeout_us / 1e6
    return deadline_s if connection.deadline_s is None else min(deadline_s, connection.deadline_s)


def _send_encoded(encoding: Sliced[tuple[Buffer, ...]], connection: Responder) -> Sliced[None]:
    parts = yield from encoding
    connection.respond(*parts)


def _while_open(connection: Responder, work: Sliced[None]) -> Sliced[None]:
    """Run `work` until it ends or the client disconnects; respond with its error."""
    try:
        for _ in work:
            yield
            if not connection.is_open:
                return
    except Exception as error:
        connection.respond_error(error)
