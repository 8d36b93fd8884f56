"""A photograph or sound through the service: prepare on a thread, run the model, decode on a thread.

    bytes of a JPEG -> Answerer.prepare (thread) -> lane of the model -> Answerer.answer (thread) -> reply

Everything else happens on the thread of the event loop. If the version changes while a picture is decoded, it
is prepared again for the new one.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import EdgekitError, OverloadedError, RequestError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.service.options.resources import MediaLimits
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.fair_pool import Threads
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tasks.answerer import Answerer, Prepared
from edgekit_runtime.tasks.task import Decoded, Outputs

Reply: TypeAlias = "Callable[[Decoded | BaseException], None]"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AnswerRequest:
    """One photograph or piece of sound on its way to an answer.

    Attributes:
        find: returns the version that answers; it may raise an EdgekitError.
        data: bytes of the media type; valid until `reply` is called.
        overrides: options of the task for this answer.
        reply: called once on the loop's thread with the answer or the error, maybe before `submit` returns.
        priority: 1 is the highest, 0 the model's default.
        deadline_s: latest start of the run, see `Call`.
        is_unwanted: whether the client has gone.
    """

    find: Callable[[], Served]
    data: "bytes | memoryview"
    media_type: MediaType
    reply: Reply
    overrides: Mapping[str, JsonValue] = field(default_factory=dict)
    priority: int = 0
    deadline_s: float | None = None
    is_unwanted: Callable[[], bool] = _never


class AnswerPath:
    """Answers requests with media; shared by all models and streams."""

    __slots__ = ("_limits", "_loop", "_threads", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: MediaLimits) -> None:
        self._loop, self._limits = loop, limits
        self._threads: Threads | None = None  # made with the first request: most services get none
        self._waiting = 0

    def submit(self, request: AnswerRequest) -> None:
        """Answer `request` through its `reply`.

        Raises:
            EdgekitError: it is refused; `reply` is not called then.
        """
        served = request.find()
        if self._waiting >= self._limits.max_waiting:
            raise OverloadedError(
                f"{self._waiting} pictures wait to be decoded, the limit is max_waiting", 1.0
            )
        self._prepare(request, served, time.monotonic())

    def close(self, timeout_s: float) -> bool:
        """End the threads; return whether they have ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _prepare(self, request: AnswerRequest, served: Served, began_s: float) -> None:
        answerer = served.loaded.answerer
        if answerer is None:
            raise _explain_lack(served)
        if not answerer.has_task:
            raise RequestError(400, f"{served.metrics.model} states no task; package it with --task")
        if self._threads is None:
            self._threads = Threads(self._loop, os.cpu_count() or 1)
        self._waiting += 1
        work = _Work(request, answerer, self._limits.max_pixels, began_s)
        self._threads.start(work.prepare, lambda: self._run(work))

    def _run(self, work: "_Work") -> None:
        self._waiting -= 1
        request = work.request
        try:
            served = request.find()
            if served.loaded.answerer is not work.answerer:  # another version by now
                self._prepare(request, served, work.began_s)
                return
        except EdgekitError as error:
            work.reply(error)
            return
        if work.error is not None:
            served.metrics.refused += 1
            work.reply(work.error)
            return
        work.version = served.version
        inputs = work.prepared.inputs
        answer = None if request.deadline_s is not None else served.lane.attempt(inputs)
        if answer is None:
            finish = functools.partial(self._finish, work)
            served.lane.submit(
                Call(inputs, finish, request.priority, request.deadline_s, request.is_unwanted)
            )
        else:
            self._finish(work, answer)

    def _finish(self, work: "_Work", answer: Answer) -> None:
        if isinstance(answer, EdgekitError):
            work.reply(answer)
            return
        work.outputs = answer
        work.answered_s = time.monotonic()
        assert self._threads is not None  # noqa: S101  # for the type checker: it has prepared the inputs
        self._threads.start(work.decode, work.reply_decoded)


class _Work:
    """A request with what it has come to so far."""

    __slots__ = (
        *("_max_pixels", "answered_s", "answerer", "began_s", "decoded", "error", "outputs", "prepared"),
        *("prepared_s", "request", "version"),
    )

    def __init__(self, request: AnswerRequest, answerer: Answerer, max_pixels: int, began_s: float) -> None:
        self.request, self.answerer, self._max_pixels, self.began_s = request, answerer, max_pixels, began_s
        self.prepared: Prepared
        self.outputs: Outputs
        self.decoded: Decoded
        self.error: BaseException | None = None
        self.version = ""
        self.prepared_s = self.answered_s = began_s

    def prepare(self) -> None:
        """Make the inputs, on a thread; raises nothing."""
        request = self.request
        try:
            self.prepared = self.answerer.prepare(request.data, request.media_type, self._max_pixels)
        except MemoryError:
            self.error = OverloadedError("not enough memory to decode it; try again", 1.0)
        except Exception as error:
            self.error = error
        self.prepared_s = time.monotonic()

    def decode(self) -> None:
        """Decode the outputs, on a thread; raises nothing."""
        try:
            self.decoded = self.answerer.answer(self.outputs, self.prepared.placement, self.request.overrides)
        except Exception as error:
            self.error = error

    def reply_decoded(self) -> None:
        """Answer, on the loop's thread."""
        if self.error is not None:
            self.reply(self.error)
            return
        now_s = time.monotonic()
        times = {
            "prepare": self.prepared_s - self.began_s,
            "infer": self.answered_s - self.prepared_s,
            "answer": now_s - self.answered_s,
        }
        times_ms: JsonValue = {name: round(seconds * 1e3, 3) for name, seconds in times.items()}
        self.reply({**self.decoded, "model_version": self.version, "times_ms": times_ms})

    def reply(self, answer: "Decoded | BaseException") -> None:
        error, self.error = self.error, None  # else each keeps the other through the traceback
        del error
        self.request.reply(answer)


def _explain_lack(served: Served) -> RequestError:
    name = served.metrics.model
    if served.loaded.remote is not None:
        return RequestError(400, f"{name} runs in a process of its own, which only its requests reach")
    return RequestError(400, f"{name} states neither preprocessing nor task; package it with --task")
