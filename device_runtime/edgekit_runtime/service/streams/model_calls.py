"""From a frame to the answer of the model that serves now; a swap between two frames changes nothing here.

An isolated model gets a frame by `POST /v2/models/NAME/answer` over a socket pair, one end of which is a
connection of the service: it is lent to the model's process as that of any client.
"""

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

from edgekit_runtime.errors import BackendError, EdgekitError, RequestError, TransportError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.protocol.rest import decode_error, model_path
from edgekit_runtime.service.answers.answer_path import Answered, AnswerPath, AnswerRequest
from edgekit_runtime.service.http.connection import Connection
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.models.catalogue import EvictedError
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.streams.stream import FrameCall

_TIMEOUT_S: Final = 60.0
_OK: Final = 200
_MALFORMED: Final = 400
_NOT_FOUND: Final = 404
_UNAVAILABLE: Final = 503


class ModelCalls:
    """Submits frames and sound to models."""

    def __init__(self, answers: AnswerPath, registry: Registry, http: HttpServer) -> None:
        self._answers, self._registry, self._http = answers, registry, http
        self._tasks: set[asyncio.Task[None]] = set()
        self._connected: set[socket.socket] = set()  # to isolated models

    def close(self) -> None:
        """Give up what is under way."""
        for connected in self._connected:
            with contextlib.suppress(OSError):  # its other end has gone
                connected.shutdown(socket.SHUT_RDWR)
        for task in self._tasks:
            task.cancel()

    def has_states(self, model: str) -> bool | None:
        """Return whether a model keeps states between frames; None while it is not loaded.

        Raises:
            RequestError: there is no such model.
        """
        try:
            return bool(self._registry.models.find(model, None).codec.states)
        except RequestError as error:
            if error.status == _NOT_FOUND:
                raise
        except EdgekitError:
            pass
        return None

    def find_trial(self, model: str) -> str | None:
        """Return the version of a model that is on trial; None without any."""
        entry = self._registry.models.by_name.get(model)
        return None if entry is None or entry.trial is None else entry.trial.candidate.version

    def submit(self, call: FrameCall) -> None:
        """Submit one frame or window; load the model first if it was unloaded for others.

        Raises:
            EdgekitError: it is refused.
        """
        model, reply = call.model, call.reply

        def finish(answered: Answered | BaseException) -> None:
            if isinstance(answered, Answered):
                reply(answered.to_json())
            elif _may_be_unknown(answered) and step is not None and not step.start:
                restarted = dataclasses.replace(call, sequence=step._replace(start=True))
                self._start(self._load(restarted), fail)
            else:
                fail(answered)

        def fail(error: BaseException) -> None:
            if not isinstance(error, EdgekitError):
                error = BackendError(f"{model}: {type(error).__name__}: {error}")
            reply(error)

        step = None
        find = functools.partial(self._registry.models.find, model, call.version)
        try:
            served = find()
            step = call.sequence if served.codec.states else None
            if served.loaded.remote is None:
                self._answers.submit(
                    AnswerRequest(
                        find=find,
                        reply=finish,
                        data=call.array.data.cast("B"),
                        media_type=_media_type(call),
                        sequence=step,
                    )
                )
            else:
                self._start(self._post(call, step), finish)
        except EvictedError:
            self._start(self._load(call), finish)

    def _start(self, work: Coroutine[Any, Any, None], reply: Callable[[BaseException], None]) -> None:
        """Do `work`, which replies unless it raises."""

        def finish(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                reply(error)

        task = self._http.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(finish)

    async def _load(self, call: FrameCall) -> None:
        await self._registry.wait_for(call.model)
        self.submit(call)

    async def _post(self, call: FrameCall, step: SequenceStep | None) -> None:
        media_type, model = _media_type(call), call.model
        parameters = "".join(f"; {name}={value}" for name, value in media_type.parameters.items())
        query = "" if step is None else f"?sequence_id={step.id}&sequence_start={json.dumps(step.start)}"
        outer, inner = socket.socketpair()
        Connection(self._http, inner, is_local=True)
        connection = http.client.HTTPConnection("localhost")
        connection.sock = outer
        outer.settimeout(_TIMEOUT_S)

        def exchange() -> tuple[int, bytes]:
            fields = {"Content-Type": f"{media_type.name}{parameters}"}
            data = call.array.data.cast("B")
            connection.request("POST", f"{model_path(model, call.version)}/answer{query}", data, fields)
            response = connection.getresponse()
            return response.status, response.read()

        self._connected.add(outer)
        try:
            status, body = await self._http.loop.run_in_executor(None, exchange)
        except (OSError, http.client.HTTPException) as cause:
            text = f"{model}: its process gave no answer: {cause or type(cause).__name__}"
            raise TransportError(text) from cause
        finally:
            self._connected.discard(outer)
            connection.close()
        if status != _OK:
            retry_s = 1 if status == _UNAVAILABLE else None  # as while its process is started again
            text = decode_error(body) or f"{model}: status {status}"
            raise RequestError(status, text, retry_after_s=retry_s)
        call.reply(json.loads(body))


def _media_type(call: FrameCall) -> MediaType:
    if call.rate:
        return MediaType("audio/x-raw", {"format": "F32LE", "rate": str(call.rate)})
    height, width = map(str, call.array.shape[:2])
    return MediaType("video/x-raw", {"format": "RGB", "height": height, "width": width})


def _may_be_unknown(answered: BaseException) -> bool:
    """Return whether the sequence may be unknown to the version: after a swap, a new worker, or too long."""
    return isinstance(answered, RequestError) and answered.status == _MALFORMED
