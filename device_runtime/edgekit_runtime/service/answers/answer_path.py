"""Handles a request with an image or sound: decode the file, run the model, decode the outputs.

    bytes of a JPEG -> Answerer.prepare (thread) -> lane of the model -> Answerer.answer (thread) -> reply

If the model is free, one thread performs all three steps, since each change of threads takes 0.1 to 0.5 ms.
If the model is busy, files are decoded while it runs other requests. If the model's version changes while a
file is being decoded, the file is decoded again.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, OverloadedError, RequestError, UnavailableError
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.resources import MediaLimits
from edgekit_runtime.service.scheduling.call import Answer, Call, Run, never
from edgekit_runtime.service.scheduling.fair_pool import Threads
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tensors import Array

if TYPE_CHECKING:
    from edgekit_runtime.preprocessing.media import MediaType
    from edgekit_runtime.preprocessing.placement import Placement
    from edgekit_runtime.tasks.answerer import Answerer


class Answered(NamedTuple):
    """The result of a request.

    Attributes:
        served: The version that accepted the request. During a canary trial, another version may have run
            it.
        decoded: The answer of the task. Empty if it was not requested.
        times_s: The time of each step in seconds: `prepare`, `infer`, and `answer` if it was decoded.
    """

    served: Served
    outputs: Mapping[str, Array]
    decoded: Mapping[str, JsonValue]
    times_s: Mapping[str, float]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the answer, with `model_version` and a dict `times_ms` of the milliseconds of each step."""
        times_ms: dict[str, JsonValue] = {
            step: round(1e3 * seconds, 3) for step, seconds in self.times_s.items()
        }
        return {"model_version": self.served.version, **self.decoded, "times_ms": times_ms}


@dataclass(slots=True, eq=False, kw_only=True)
class AnswerRequest:
    """A request with an image, a sound or tensors.

    Attributes:
        find: A function that returns the model version to use. It may raise an EdgekitError.
        reply: A function that is called once on the event loop's thread, possibly before `submit` returns.
        data: The bytes of a file, or None if `inputs` holds all inputs. Valid until `reply` is called.
        media_type: The type of the file, or None for the model's default.
        inputs: The inputs that need no decoding, such as states. `prepare` adds the others.
        decodes: Whether the reply needs the answer of the task in addition to the outputs.
        overrides: The task options for this answer.
        priority: The priority. 1 is the highest, 0 is the model's default.
        deadline_s: The latest start of the run, as in `Call`.
        is_unwanted: A function that returns whether the client has disconnected.
        sequence: The position in a sequence, or None.
        request_id: The id that the client chose, or None.
        max_pixels, began_s, served, answerer: Values that `AnswerPath` sets.
        error: Why the request cannot be answered, or None.
    """

    find: Callable[[], Served]
    reply: "Callable[[Answered | BaseException], None]"
    data: "bytes | memoryview | None" = None
    media_type: "MediaType | None" = None
    inputs: Mapping[str, Array] = field(default_factory=dict)
    decodes: bool = True
    overrides: Mapping[str, JsonValue] = field(default_factory=dict)
    priority: int = 0
    deadline_s: float | None = None
    is_unwanted: Callable[[], bool] = never
    sequence: SequenceStep | None = None
    request_id: str | None = None
    max_pixels: int = field(init=False)
    began_s: float = field(init=False)
    served: Served = field(init=False)
    answerer: "Answerer" = field(init=False)
    error: BaseException | None = field(init=False, default=None)
    _placement: "Placement | None" = field(init=False, default=None)
    _outputs: Mapping[str, Array] | None = field(init=False, default=None)
    _decoded: Mapping[str, JsonValue] | None = field(init=False, default=None)
    _times_s: dict[str, float] = field(init=False, default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether everything that the reply needs has been computed."""
        return self._decoded is not None or not self.decodes

    def run(self, run: Run) -> Answer:
        """Decode the file, run the model and decode its outputs. Called on a thread.

        Never raises. If decoding fails, `error` is set.

        Returns:
            The result of `run`, or an error if the file cannot be decoded.
        """
        self.prepare()
        if self.error is not None:
            return self.error if isinstance(self.error, EdgekitError) else BackendError(str(self.error))
        answer = run(self.inputs)
        if not isinstance(answer, EdgekitError):
            self.take(answer)
            self.decode()
        return answer

    def prepare(self) -> None:
        """Decode the file to inputs. Called on a thread. Never raises, but sets `error`."""
        assert self.data is not None  # noqa: S101  # for the type checker
        try:
            if self.is_unwanted():
                raise UnavailableError("the client went before the file was decoded")  # noqa: TRY301
            media_type = self.media_type or self.answerer.file_type
            prepared = self.answerer.prepare(self.data, media_type, self.max_pixels)
            self.inputs, self._placement = {**self.inputs, **prepared.inputs}, prepared.placement
        except MemoryError:
            self.error = OverloadedError("not enough memory to decode it; try again", 1.0)
        except Exception as error:
            self.error = error
        self._note("prepare")

    def take(self, outputs: Mapping[str, Array]) -> None:
        """Store the outputs of the model. Further calls have no effect."""
        if self._outputs is None:
            self._outputs = outputs
            self._note("infer")

    def decode(self) -> None:
        """Decode the outputs if requested. Called on a thread. Never raises, but sets `error`."""
        if self.is_whole or self._outputs is None:
            return
        try:
            self._decoded = self.answerer.answer(self._outputs, self._placement, self.overrides)
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Pass the request to the sampler and reply, or reply with `error`. Called on the loop's thread."""
        if self.error is not None:
            self.refuse(self.error)
            return
        if self.decodes:
            self._note("answer")
        if self.served.sampler is not None:
            self.served.sampler.note(
                self.served,
                self.inputs,
                self._outputs or {},
                request_id=self.request_id,
                file=None if self.data is None else (self.data, self.media_type, self._placement),
                answer=self._decoded,
            )
        times_s = {"prepare": 0.0, **self._times_s}
        answered = Answered(self.served, self._outputs or {}, self._decoded or {}, times_s)
        try:
            self.reply(answered)
        except Exception as error:  # such as of infinity, which JSON cannot hold: the client still waits
            self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Reply with an error. Called on the loop's thread."""
        self.error = None  # else each keeps the other through the traceback
        self.reply(error)

    def _note(self, step: str) -> None:
        """Record the time since the previous step; a step repeated for another version adds all its times."""
        self._times_s.pop(step, None)
        self._times_s[step] = time.monotonic() - self.began_s - sum(self._times_s.values())


class AnswerPath:
    """Answers requests with images or sound. Shared by all models and streams."""

    __slots__ = ("_limits", "_loop", "_threads", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: MediaLimits) -> None:
        self._loop, self._limits = loop, limits
        self._threads: Threads | None = None  # made with the first request: most services get none
        self._waiting = 0

    def submit(self, request: AnswerRequest) -> None:
        """Handle a request, and pass the result to its `reply`.

        Raises:
            EdgekitError: The request is rejected, so `reply` is not called.
        """
        served = request.find()
        if self._waiting >= self._limits.max_waiting:
            served.metrics.shed += 1
            raise OverloadedError(f"{self._waiting} files wait to be decoded, the limit is max_waiting", 1.0)
        request.max_pixels, request.began_s = self._limits.max_pixels, time.monotonic()
        self._begin(request, served)

    def close(self, timeout_s: float) -> bool:
        """Stop the threads, and return whether all of them have ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _begin(self, request: AnswerRequest, served: Served) -> None:
        if served.loaded.remote is not None:
            raise served.loaded.remote.refuse()  # none of its processes took the request
        answerer = served.loaded.answerer
        if answerer is None:
            raise RequestError(
                400,
                f"{served.metrics.model} states neither preprocessing nor task; package it with --task",
            )
        if request.decodes and answerer.task is None:
            raise RequestError(400, f"{served.metrics.model} states no task; package it with --task")
        if request.sequence is not None and not served.codec.states:
            raise RequestError(400, f"{served.metrics.model} keeps no state between requests")
        if self._threads is None:
            self._threads = Threads(self._loop, os.cpu_count() or 1)
        request.served, request.answerer = served, answerer
        if request.data is None:
            self._infer(request)
        elif answerer.blank and not request.inputs and served.lane.takes_work(answerer.blank):
            served.codec.check_inputs(answerer.blank)
            request.inputs = answerer.blank
            served.lane.submit(self._make_call(request, request.run))
        else:
            self._waiting += 1
            self._threads.start(request.prepare, functools.partial(self._take_prepared, request))

    def _take_prepared(self, request: AnswerRequest) -> None:
        self._waiting -= 1
        try:
            served = request.find()
            if served.loaded.answerer is not request.answerer:  # another version by now
                request.error = None
                self._begin(request, served)
                return
            request.served = served
            if request.error is None:
                served.codec.check_inputs(request.inputs)
        except EdgekitError as error:
            request.refuse(error)
            return
        if request.error is not None:
            if request.is_unwanted():
                served.metrics.cancelled += 1
            else:
                served.metrics.refused += 1
            request.finish()
            return
        self._infer(request)

    def _infer(self, request: AnswerRequest) -> None:
        lane = request.served.lane
        is_alone = request.deadline_s is None and request.sequence is None
        answer = lane.attempt(request.inputs) if is_alone else None
        if answer is None:
            lane.submit(self._make_call(request))
        else:
            self._take_outputs(request, answer)

    def _make_call(self, request: AnswerRequest, work: "Callable[[Run], Answer] | None" = None) -> Call:
        finish = functools.partial(self._take_outputs, request)
        limits = request.priority, request.deadline_s, request.is_unwanted
        return Call(request.inputs, finish, *limits, request.sequence, work)

    def _take_outputs(self, request: AnswerRequest, answer: Answer) -> None:
        if isinstance(answer, EdgekitError):
            request.refuse(request.error or answer)
            return
        request.take(answer)
        if request.is_whole or request.error or self._threads is None:
            request.finish()
        else:
            self._threads.start(request.decode, request.finish)
