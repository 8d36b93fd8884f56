"""Inference requests: from a body to a call, and from the outputs to an answer."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.infer_request import InferRequest
from edgekit_runtime.protocol.json_tensors import Result, Sliced
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.request_head import RequestHead
from edgekit_runtime.service.http.send_buffer import Buffer
from edgekit_runtime.service.models.catalogue import Catalogue
from edgekit_runtime.service.models.entry import EvictedError
from edgekit_runtime.service.oip.codec import Codec, Held, is_long
from edgekit_runtime.service.oip.time_slices import Slicer
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tensors import Array

WhenLoaded: TypeAlias = Callable[[str, Connection, Callable[[], None]], None]

_NONE_HELD: Final[Held] = {}
_TIMES_JSON: Final = 4  # as much memory as a body the tensors in it may take: FP64 in the place of `1,`

_logger = logging.getLogger(__name__)


class InferRoutes:
    """Answers inference requests with what serves their models."""

    __slots__ = ("_models", "_slicer", "_when_loaded")

    def __init__(self, models: Catalogue, when_loaded: WhenLoaded, slicer: Slicer) -> None:
        """Make it.

        Args:
            models: that may be asked.
            when_loaded: takes the name of a model that was unloaded for others, whose request it is, and what
                to do once the model is loaded again.
            slicer: reads and writes long JSON.
        """
        self._models = models
        self._when_loaded = when_loaded
        self._slicer = slicer

    def take(
        self, name: str, version: str | None, connection: Connection, head: RequestHead, body: memoryview
    ) -> None:
        """Answer a request to a model, now or later.

        Raises:
            EdgekitError: the answer is this error.
        """
        try:
            served = self._models.find(name, version)
        except EvictedError:
            again = functools.partial(self.take, name, version, connection, head, body)
            self._when_loaded(name, connection, again)
            return
        try:
            if is_long(body, head.json_bytes):
                work = self._take_long(served, (name, version), connection, head, body)
                self._slicer.start(_answering_failures(work, connection), len(body) * _TIMES_JSON)
                return
            request, inputs = served.codec.decode(body, head.json_bytes, is_local=connection.is_local)
            self._run(served, request, inputs, connection)
        except EdgekitError:
            served.metrics.refused += 1
            raise

    def _take_long(
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
            decoded = yield from _while_open(connection, decoding)
            if decoded is None:
                return
            if self._is_current(served, *target):
                self._run(served, *decoded, connection)
                return
        except EdgekitError:
            served.metrics.refused += 1
            raise
        self.take(*target, connection, head, body)

    def _is_current(self, served: Served, name: str, version: str | None) -> bool:
        try:
            return self._models.find(name, version) is served
        except EdgekitError:  # `take` says so, or loads it again
            return False

    def _run(
        self, served: Served, request: InferRequest, inputs: Mapping[str, Array], connection: Connection
    ) -> None:
        codec = served.codec
        held = codec.hold(request, is_local=connection.is_local) if request.shares_outputs else _NONE_HELD
        answer = served.lane.attempt(inputs)
        if answer is None:
            deadline_s = None if request.timeout_us is None else time.monotonic() + request.timeout_us / 1e6
            reply = functools.partial(self._reply, connection, codec, request, held)
            served.lane.submit(Call(inputs, reply, request.priority, deadline_s, lambda: connection.has_left))
        else:
            self._reply(connection, codec, request, held, answer)

    def _reply(
        self, connection: Connection, codec: Codec, request: InferRequest, held: Held, answer: Answer
    ) -> None:
        if isinstance(answer, EdgekitError):
            connection.respond_error(answer)
            return
        try:
            held_bytes = codec.measure_json(request, answer) if request.has_json_outputs else None
            if held_bytes is not None:
                encoding = codec.encode_in_slices(request, answer, held)
                work = _answering_failures(_send_encoded(encoding, connection), connection)
                self._slicer.start(work, held_bytes)
                return
            parts = codec.encode(request, answer, held)
        except EdgekitError as error:
            connection.respond_error(error)
        except Exception:  # of a third party's backend that returned what is no tensor
            _logger.exception("the outputs of %s are not what its package says", codec.name)
            connection.respond_error(RequestError(500, "the model's outputs cannot be sent"))
        else:
            connection.respond(*parts)


def _send_encoded(encoding: Sliced[tuple[Buffer, ...]], connection: Connection) -> Sliced[None]:
    parts = yield from _while_open(connection, encoding)
    if parts is not None:
        connection.respond(*parts)


def _while_open(connection: Connection, work: Sliced[Result]) -> Sliced[Result | None]:
    """Return the result of `work`, or None where the client went before the end."""
    while connection.is_open:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        yield
    return None


def _answering_failures(work: Sliced[None], connection: Connection) -> Sliced[None]:
    """Do `work`; what it raises becomes the answer."""
    try:
        yield from work
    except EdgekitError as error:
        connection.respond_error(error)
    except Exception:
        _logger.exception("a request with long JSON failed inside the service")
        connection.respond_error(RequestError(500, "the service failed; its log says why"))
