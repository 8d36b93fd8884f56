"""From a frame to the answer of the model that serves now; a swap between two frames changes nothing here.

An isolated model gets its frames by `POST /v2/models/NAME/answer` over a socket pair, one end of which is a
connection of the service: it is lent to the model's process as that of any client.
"""

import asyncio
import dataclasses
import functools
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

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
_Pair: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ModelCalls:
    """Submits frames and sound to models."""

    def __init__(self, answers: AnswerPath, registry: Registry, http: HttpServer) -> None:
        self._answers, self._registry, self._http = answers, registry, http
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: list[_Pair] = []

    def close(self) -> None:
        """Give up what is under way, and close the connections to isolated models."""
        for task in self._tasks:
            task.cancel()
        for _, writer in self._idle:
            writer.transport.abort()

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
        model, media_type, data = call.model, _media_type(call), call.array.data.cast("B")
        self._idle = [pair for pair in self._idle if not pair[0].at_eof()]  # the service closes idle ones
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        parameters = "".join(f"; {name}={value}" for name, value in media_type.parameters.items())
        query = ""
        if step is not None:
            query = f"?sequence_id={step.id}&sequence_start={json.dumps(step.start)}"
        head = (
            f"POST {model_path(model, call.version)}/answer{query} HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {media_type.name}{parameters}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        try:
            status, body = await asyncio.wait_for(_exchange(reader, writer, head, data), _TIMEOUT_S)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError) as cause:
            writer.transport.abort()
            raise TransportError(
                f"{model}: its process gave no answer: {cause or type(cause).__name__}"
            ) from cause
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append((reader, writer))
        if status != _OK:
            retry_s = 1 if status == _UNAVAILABLE else None  # as while its process is started again
            text = decode_error(body) or f"{model}: status {status}"
            raise RequestError(status, text, retry_after_s=retry_s)
        call.reply(json.loads(body))

    async def _connect(self) -> _Pair:
        outer, inner = socket.socketpair()
        Connection(self._http, inner, is_local=True)
        return await asyncio.open_connection(sock=outer)


def _media_type(call: FrameCall) -> MediaType:
    if call.rate:
        return MediaType("audio/x-raw", {"format": "F32LE", "rate": str(call.rate)})
    height, width = map(str, call.array.shape[:2])
    return MediaType("video/x-raw", {"format": "RGB", "height": height, "width": width})


def _may_be_unknown(answered: BaseException) -> bool:
    """Return whether the sequence may be unknown to the version: after a swap, a new worker, or too long."""
    return isinstance(answered, RequestError) and answered.status == _MALFORMED


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str, data: memoryview
) -> tuple[int, bytes]:
    """Return status and body of the response.

    Raises:
        OSError, EOFError, ValueError: there is none.
    """
    writer.write(head.encode("ascii"))
    writer.write(data)
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    return int(lines[0].split(" ")[1]), await reader.readexactly(int(fields["content-length"]))
