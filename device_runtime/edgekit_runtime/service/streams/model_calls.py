"""Passes frames to the served version of a model, even if the version changes between two frames.

Frames for isolated models are sent with `POST /v2/models/NAME/answer`, see `Loopback`.
"""

import asyncio
import dataclasses
import functools
import json
from typing import Final

from edgekit_runtime.errors import BackendError, EdgekitError, RequestError, TransportError, UnavailableError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.protocol.rest import model_path
from edgekit_runtime.service.answers.answer_path import Answered, AnswerPath, AnswerRequest
from edgekit_runtime.service.http.loopback import Loopback
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.models.catalogue import EvictedError
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.streams.stream import FrameCall
from edgekit_runtime.system.tasks import Tasks

_TIMEOUT_S: Final = 60.0
_MALFORMED: Final = 400
_NOT_FOUND: Final = 404


class ModelCalls:
    def __init__(self, answers: AnswerPath, registry: Registry, http: HttpServer) -> None:
        self._answers, self._registry, self._http = answers, registry, http
        self._tasks = Tasks()
        self._loopback = Loopback(http)

    def close(self) -> None:
        """Cancel running calls, and close the connections to isolated models."""
        self._tasks.cancel()
        self._loopback.close()

    def has_states(self, model: str) -> bool | None:
        """Return whether a model keeps states between frames, or None if it is not loaded.

        Raises:
            RequestError: The model does not exist.
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
        """Return the version of a model that is on trial, or None."""
        entry = self._registry.models.by_name.get(model)
        return None if entry is None or entry.trial is None else entry.trial.candidate.version

    def submit(self, call: FrameCall) -> None:
        """Submit a frame or window of sound. If the model was unloaded to make room, it is loaded first.

        If the version does not know the sequence, for example after a swap, a new sequence is started.

        Raises:
            EdgekitError: The call is refused. Its `reply` is not called.
        """
        model, reply = call.model, call.reply

        def finish(answered: Answered | BaseException) -> None:
            if isinstance(answered, Answered):
                reply(answered.to_json())
            elif _may_be_unknown(answered) and step is not None and not step.start:
                restarted = dataclasses.replace(call, sequence=step._replace(start=True))
                self._tasks.start(self._load(restarted), fail)
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
                self._tasks.start(self._post(call, step), finish)
        except EvictedError:
            self._tasks.start(self._load(call), finish)

    async def _load(self, call: FrameCall) -> None:
        await self._registry.wait_for(call.model)
        self.submit(call)

    async def _post(self, call: FrameCall, step: SequenceStep | None) -> None:
        media_type, data = _media_type(call), call.array.data.cast("B")
        parameters = "".join(f"; {name}={value}" for name, value in media_type.parameters.items())
        query = ""
        if step is not None:
            query = f"?sequence_id={step.id}&sequence_start={json.dumps(step.start)}"
        fields = {"Content-Type": f"{media_type.name}{parameters}"}
        work = self._loopback.post(f"{model_path(call.model, call.version)}/answer{query}", fields, data)
        try:
            _, body = await asyncio.wait_for(work, _TIMEOUT_S)
        except (UnavailableError, asyncio.TimeoutError) as cause:
            reason = cause or type(cause).__name__
            raise TransportError(f"{call.model}: its process gave no answer: {reason}") from cause
        call.reply(json.loads(body))


def _media_type(call: FrameCall) -> MediaType:
    if call.rate:
        return MediaType("audio/x-raw", {"format": "F32LE", "rate": str(call.rate)})
    height, width = map(str, call.array.shape[:2])
    return MediaType("video/x-raw", {"format": "RGB", "height": height, "width": width})


def _may_be_unknown(answered: BaseException) -> bool:
    """Return whether the version may not know the sequence, for example after a swap or a worker restart."""
    return isinstance(answered, RequestError) and answered.status == _MALFORMED
