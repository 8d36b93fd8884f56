"""A photograph or sound through the service: prepare on a thread, run the model, decode on a thread.

    bytes of a JPEG -> Answerer.prepare (thread) -> lane of the model -> Answerer.answer (thread) -> reply

Where the model is free, one thread does all three: each change of threads takes 0.1 to 0.5 ms. Otherwise
pictures are prepared while it runs others. Everything else happens on the thread of the event loop. If the
version changes while a picture is prepared for a model that was busy, it is prepared again for the new one.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import BackendError, EdgekitError, OverloadedError, RequestError
from edgekit_runtime.protocol.infer_request import SequenceStep
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
    """What a request came to.

    Attributes:
        served: the version that answered; a canary may have run the call instead.
        outputs: outputs of the model.
        decoded: the answer of the task; empty if it was not asked for.
        times_s: seconds of each step: `prepare`, `infer`, and `answer` if it was decoded.
    """

    served: Served
    outputs: Mapping[str, Array]
    decoded: Mapping[str, JsonValue]
    times_s: Mapping[str, float]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the answer with the version that gave it, and the milliseconds of each step."""
        times_ms: dict[str, JsonValue] = {
            step: round(1e3 * seconds, 3) for step, seconds in self.times_s.items()
        }
        return {"model_version": self.served.version, **self.decoded, "times_ms": times_ms}


@dataclass(slots=True, eq=False, kw_only=True)
class AnswerRequest:
    """One photograph, piece of sound or set of tensors on its way to an answer.

    Attributes:
        find: returns the version that answers; it may raise an EdgekitError.
        reply: called once on the loop's thread, maybe before `submit` returns.
        data: bytes of a file, or None if the inputs are there; valid until `reply` is called.
        media_type: type of the file; None for what the model usually takes.
        inputs: inputs that need no preparation, such as states.
        decodes: whether the answer of the task is wanted, not only the outputs.
        overrides: options of the task for this answer.
        priority: 1 is the highest, 0 the model's default.
        deadline_s: latest start of the run, see `Call`.
        is_unwanted: whether the client has gone.
        sequence: its place in a sequence, or None.
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
            raise OverloadedError(f"{self._waiting} files wait to be decoded, the limit is max_waiting", 1.0)
        self._begin(request, served, time.monotonic())

    def close(self, timeout_s: float) -> bool:
        """End the threads; return whether they have ended."""
        return self._threads is None or self._threads.close(timeout_s)

    def _begin(self, request: AnswerRequest, served: Served, began_s: float) -> None:
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
        work = _Work(request, answerer, self._limits.max_pixels, began_s)
        if request.data is None:
            self._infer(work, served)
        elif answerer.blank and not request.inputs and served.lane.takes_work(answerer.blank):
            served.codec.check_inputs(answerer.blank)
            work.served, work.inputs = served, answerer.blank
            served.lane.submit(self._make_call(work, work.run))
        else:
            self._waiting += 1
            self._threads.start(work.prepare, functools.partial(self._take_prepared, work))

    def _take_prepared(self, work: "_Work") -> None:
        self._waiting -= 1
        try:
            served = work.request.find()
            if served.loaded.answerer is not work.answerer:  # another version by now
                self._begin(work.request, served, work.began_s)
                return
            if work.error is None:
                served.codec.check_inputs(work.inputs)
        except EdgekitError as error:
            work.reply(error)
            return
        if work.error is not None:
            served.metrics.refused += 1
            work.reply(work.error)
            return
        self._infer(work, served)

    def _infer(self, work: "_Work", served: Served) -> None:
        work.served = served
        is_alone = work.request.deadline_s is None and work.request.sequence is None
        answer = served.lane.attempt(work.inputs) if is_alone else None
        if answer is None:
            served.lane.submit(self._make_call(work))
        else:
            self._take_outputs(work, answer)

    def _make_call(self, work: "_Work", run: "Callable[[Run], Answer] | None" = None) -> Call:
        request, finish = work.request, functools.partial(self._take_outputs, work)
        limits = request.priority, request.deadline_s, request.is_unwanted
        return Call(work.inputs, finish, *limits, request.sequence, run)

    def _take_outputs(self, work: "_Work", answer: Answer) -> None:
        if isinstance(answer, EdgekitError):
            work.reply(work.error or answer)
            return
        work.take(answer)
        if work.is_decoded or self._threads is None:
            work.finish()
        else:
            self._threads.start(work.decode, work.finish)


class _Work:
    """A request with what it has come to so far."""

    __slots__ = (
        *("_max_pixels", "_placement", "answerer", "began_s", "decoded", "error", "inferred_s", "inputs"),
        *("is_decoded", "outputs", "prepared_s", "request", "served"),
    )

    def __init__(self, request: AnswerRequest, answerer: "Answerer", max_pixels: int, began_s: float) -> None:
        self.request, self.answerer, self._max_pixels = request, answerer, max_pixels
        self.inputs = request.inputs
        self._placement: Placement | None = None
        self.served: Served
        self.outputs: Mapping[str, Array] = {}
        self.decoded: Mapping[str, JsonValue] = {}
        self.is_decoded = not request.decodes
        self.error: BaseException | None = None
        self.began_s = self.prepared_s = self.inferred_s = began_s

    def run(self, run: Run) -> Answer:
        """Make the inputs, run the model and decode its outputs, on one thread; raises nothing."""
        self.prepare()
        if self.error is not None:
            return self.error if isinstance(self.error, EdgekitError) else BackendError(str(self.error))
        answer = run(self.inputs)
        if not isinstance(answer, EdgekitError):
            self.take(answer)
            self.decode()
        return answer

    def prepare(self) -> None:
        """Make the inputs, on a thread; raises nothing."""
        request = self.request
        assert request.data is not None  # noqa: S101  # for the type checker
        try:
            media_type = request.media_type or self.answerer.file_type
            prepared = self.answerer.prepare(request.data, media_type, self._max_pixels)
            self.inputs, self._placement = {**request.inputs, **prepared.inputs}, prepared.placement
        except MemoryError:
            self.error = OverloadedError("not enough memory to decode it; try again", 1.0)
        except Exception as error:
            self.error = error
        self.prepared_s = time.monotonic()

    def take(self, outputs: Mapping[str, Array]) -> None:
        """Note the outputs of the model, unless they were decoded by now."""
        if not self.outputs:
            self.outputs, self.inferred_s = outputs, time.monotonic()

    def decode(self) -> None:
        """Decode the outputs, on a thread; raises nothing."""
        if self.is_decoded:
            return
        try:
            self.decoded = self.answerer.answer(self.outputs, self._placement, self.request.overrides)
        except Exception as error:
            self.error = error
        self.is_decoded = True

    def finish(self) -> None:
        """Reply, on the loop's thread."""
        if self.error is not None:
            self.reply(self.error)
            return
        times_s = {"prepare": self.prepared_s - self.began_s, "infer": self.inferred_s - self.prepared_s}
        if self.request.decodes:
            times_s["answer"] = time.monotonic() - self.inferred_s
        self.reply(Answered(served=self.served, outputs=self.outputs, decoded=self.decoded, times_s=times_s))

    def reply(self, answered: "Answered | BaseException") -> None:
        self.error = None  # else each keeps the other through the traceback
        self.request.reply(answered)
