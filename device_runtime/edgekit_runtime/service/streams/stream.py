"""A stream, which passes the newest frame of a source to a model, and the answers to sinks and viewers.

The model processes one frame at a time. A new frame waits, and replaces a frame that is already waiting. So
the model always gets the newest frame, and no queue grows.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

from numpy.typing import NDArray

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.infer_request import SequenceStep
from edgekit_runtime.protocol.streams import StreamOptions, hide_password
from edgekit_runtime.records import dataclass
from edgekit_runtime.service.options.http import LiveOptions
from edgekit_runtime.service.streams.sink import QueuedSink
from edgekit_runtime.service.streams.source import Frame, FrameSource
from edgekit_runtime.service.streams.source_kinds import SOURCES, find_kind
from edgekit_runtime.service.streams.viewers import Viewer, write_part

Answer: TypeAlias = "Mapping[str, Any] | EdgekitError"
View: TypeAlias = Literal["lines", "pictures", "trial"]
"""What a client gets: answers and states, pictures with answers, or also the answers of a trial."""

State: TypeAlias = Literal["opening", "running", "waiting", "failed", "ended", "stopped"]

_FINAL: Final = ("ended", "failed", "stopped")
_RECENT: Final = 64  # answers that give the frame rate and mean times
_RECENT_S: Final = 5.0
_MAX_ERROR: Final = 500
_RETRY_S: Final = 0.5
_LOG_S: Final = 10.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FrameCall:
    """A call of a model with a frame or a window of sound.

    Attributes:
        version: The version to call, or None for the version in use.
        array: The frame as uint8 [height, width, 3] in RGB, or the sound as float32 [samples].
        rate: The number of sound samples per second, or 0 for a frame.
        sequence: The position in the stream, for models that keep states.
        reply: Called once with the answer, possibly before `Calls.submit` returns.
    """

    model: str
    version: str | None = None
    array: NDArray[Any]
    rate: int
    sequence: SequenceStep
    reply: Callable[[Answer], None]


class Calls(Protocol):
    """The interface through which streams call models. It is implemented by `ModelCalls`."""

    def has_states(self, model: str) -> bool | None: ...

    def find_trial(self, model: str) -> str | None: ...

    def submit(self, call: FrameCall) -> None: ...

    def close(self) -> None: ...


class Stream:
    """A stream. It runs on the event loop.

    Attributes:
        state: `opening`, `running`, `waiting` (a failed source will be reopened), `failed` (it will not be
            reopened), `ended` or `stopped`.
        error: The current error of the source or the model, or empty.
        last_error: The last error, even if it is resolved, or empty.
        counts: The numbers of frames `read`, `answered`, `replaced` by newer frames and `failed`, and the
            number of `restarts` of the source.
    """

    def __init__(
        self,
        name: str,
        options: StreamOptions,
        *,
        loop: asyncio.AbstractEventLoop,
        calls: Calls,
        sinks: Sequence[QueuedSink],
        live: LiveOptions,
    ) -> None:
        self.name, self.options = name, options
        self.state: State = "opening"
        self.error = self.last_error = ""
        self.counts: Counter[str] = Counter()
        self._loop, self._calls, self._sinks, self._live = loop, calls, sinks, live
        self._source = FrameSource(loop, options, self)
        self._sequence_id = f"stream-{secrets.token_hex(8)}"
        self._last_number = self._opened_after = 0
        """Of the last answered frame, 0 after an error; and of the last frame of an earlier opening."""
        self._waiting: Frame | None = None
        self._is_busy = False
        self._read_before = 0  # by earlier capture processes
        self._read_now = 0
        self._picture_due_s = self._log_due_s = 0.0
        self._keeps_all = find_kind(SOURCES, options.source).keeps_all(options)
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_RECENT)
        self._finishing: asyncio.Task[None] | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._viewers: dict[Viewer, View] = {}
        self._is_trying = False  # a frame is in the version on trial
        self._tried_number = 0  # of the last that it got

    def start(self) -> None:
        """Open the source."""
        with contextlib.suppress(RequestError):  # of the model, which each frame states
            self._source.options = fit_windows(self.options, self._calls) or self.options
        self._source.start()
        if self.options.seconds is not None:
            self._end_timer = self._loop.call_later(self.options.seconds, self._end)

    def _end(self) -> None:
        if self.state not in _FINAL:
            self._source.end()
            self.on_end()

    async def stop(self) -> None:
        """End the source, sinks and viewers, and wait until they have ended."""
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._change("stopped", self.error)
        self._waiting = None
        await self._source.stop()
        await self._finish()

    async def _finish(self) -> None:
        """End the sinks, then the viewers.

        The last line to viewers states what happened to the sinks' answers.
        """
        for sink in self._sinks:
            sink.stop()
        await asyncio.gather(*(self._loop.run_in_executor(None, sink.join) for sink in self._sinks))
        if self._sinks:
            state = {**self._describe_state(), "sinks": [sink.to_json() for sink in self._sinks]}
            self._put(_to_line(state))
        for viewer in list(self._viewers):
            viewer.finish()

    def _put(self, chunk: bytes, view: View = "lines") -> None:
        for viewer in [viewer for viewer, own_view in self._viewers.items() if own_view == view]:
            viewer.put(chunk)

    def add_viewer(self, viewer: Viewer, view: View) -> None:
        """Start to send the stream to a client."""
        self._viewers[viewer] = view
        if view == "lines":
            viewer.put(_to_line(self._describe_state()))
        self._want_pictures()
        if self.state in _FINAL:
            viewer.finish()

    def remove_viewer(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)
        self._want_pictures()

    def _want_pictures(self) -> None:
        self._source.want_pictures(self._live.max_side if {*self._viewers.values()} - {"lines"} else 0)

    # What the source reports

    def on_opened(self) -> None:
        self._opened_after = self.counts["read"]
        # A file that begins again says nothing about the model.
        self._change("running", self.error if self.state == "running" else "")

    def on_read(self, number: int) -> None:
        self._read_now = number
        self.counts["read"] = self._read_before + number

    def on_frame(self, frame: Frame) -> None:
        self.on_read(frame.number)
        if self._waiting is not None:
            self._waiting.release()
            self.counts["replaced"] += 1
        self._waiting = dataclasses.replace(frame, number=self.counts["read"])
        self._submit_next()

    def on_failure(self, reason: str, retry_s: float | None) -> None:
        self._read_before += self._read_now  # the next process counts from 1
        self._read_now = 0
        self.counts["restarts"] += retry_s is not None
        self._change("failed" if retry_s is None else "waiting", reason)

    def on_end(self) -> None:
        self._change("ended", self.error)

    # Answers

    def _submit_next(self) -> None:
        if self._is_busy or self._waiting is None or self.state == "stopped":
            return
        frame, self._waiting = self._waiting, None
        try:
            fitting = fit_windows(self.options, self._calls) if frame.rate else None
            if fitting is not None and fitting != self._source.options:
                frame.release()
                self._source.options = fitting
                self._source.fail(f"{fitting.model} takes windows with {fitting.hop_s} s of new sound")
                return
        except EdgekitError as error:
            self._take(frame, error)
            return
        self._is_busy = True
        step = SequenceStep(self._sequence_id, start=not self._continues(frame, self._last_number))
        self._submit(frame, frame.array, step, lambda answer: self._take(frame, answer))

    def _submit(
        self,
        frame: Frame,
        array: NDArray[Any],
        sequence: SequenceStep,
        reply: Callable[[Answer], None],
        *,
        version: str | None = None,
    ) -> None:
        call = FrameCall(
            model=self.options.model,
            version=version,
            array=array,
            rate=frame.rate,
            sequence=sequence,
            reply=reply,
        )
        try:
            self._calls.submit(call)
        except EdgekitError as error:
            reply(error)

    def _continues(self, frame: Frame, last_number: int) -> bool:
        """Return whether the model's states are still valid: no error, no restart and no skipped sound."""
        return last_number > self._opened_after and (not frame.rate or frame.number == last_number + 1)

    def _take(self, frame: Frame, answer: Answer) -> None:
        self._is_busy = False
        if self.state == "stopped":
            return
        if isinstance(answer, EdgekitError):
            self._change(self.state, str(answer))
            is_later = getattr(answer, "retry_after_s", None) is not None  # as while the model is loaded
            if is_later and self._keeps_all and self._waiting is None:
                self._waiting = frame
                self._loop.call_later(_RETRY_S, self._submit_next)
                return
            self.counts["failed"] += 1
            self._last_number = 0
        else:
            self._last_number = frame.number
            self._publish(frame, answer)
        frame.release()
        if self._waiting is not None:
            self._loop.call_soon(self._submit_next)
        elif self.state in ("ended", "failed"):
            self._finish_later()

    def _publish(self, frame: Frame, answer: Mapping[str, Any]) -> None:
        stages = answer.get("times_ms")
        times_ms = dict(stages) if isinstance(stages, Mapping) else {}
        times_ms["total"] = round(1000 * (time.time() - frame.captured_at), 3)
        shape = frame.array.shape
        size = {"rate": frame.rate} if frame.rate else {"width": shape[1], "height": shape[0]}
        record = {
            "stream": self.name,
            "frame": frame.number,
            "captured_at": round(frame.captured_at, 3),
            **size,
            **drop_low_scores(answer, self.options.min_score),
            "times_ms": times_ms,
        }
        try:
            line = _to_line(record)
        except (TypeError, ValueError) as cause:  # NaN, or no JSON at all
            self.counts["failed"] += 1
            self._change(self.state, f"the answer is no JSON: {cause}")
            return
        self._recent.append((self._loop.time(), times_ms))
        self.counts["answered"] += 1
        if self.error and self.state == "running":
            self._change("running", "")
        for sink in self._sinks:
            sink.put(line)
        self._put(line)
        if (frame.picture or frame.rate) and self._loop.time() >= self._picture_due_s:
            self._picture_due_s = self._loop.time() + 0.9 / self._live.max_fps
            self._put(write_part(frame.picture, line.rstrip()), "pictures")
            if "trial" in self._viewers.values() and not self._is_trying:
                self._try(frame, record)

    def _try(self, frame: Frame, record: Mapping[str, Any]) -> None:
        """Let the version on trial answer a copy of the frame, for viewers of the trial."""
        version = self._calls.find_trial(self.options.model)

        def take(answer: Answer) -> None:
            self._is_trying = False
            if isinstance(answer, EdgekitError):
                self._tried_number = 0
                answer = {"error": str(answer)[:_MAX_ERROR]}
            trial = {"model_version": version, **drop_low_scores(answer, self.options.min_score)}
            with contextlib.suppress(ValueError):  # NaN
                line = _to_line({**record, "trial": trial} if version else record)
                self._put(write_part(frame.picture, line.rstrip()), "trial")

        if version is None:
            take({})
            return
        self._is_trying = True
        is_start = not self._continues(frame, self._tried_number)
        step = SequenceStep(f"{self._sequence_id}-{version}", start=is_start)
        self._tried_number = frame.number
        self._submit(frame, frame.array.copy(), step, take, version=version)

    def _change(self, state: State, error: str) -> None:
        error = hide_password(error)[:_MAX_ERROR]
        if (state, error) == (self.state, self.error):
            return
        now_s = self._loop.time()
        if state != self.state or now_s >= self._log_due_s:  # a model may fail at each second frame
            self._log_due_s = now_s + _LOG_S if error else 0.0
            level = logging.WARNING if error and error != self.last_error else logging.INFO
            _logger.log(level, "stream %s: %s%s", self.name, state, f": {error}" if error else "")
        self.state, self.error, self.last_error = state, error, error or self.last_error
        self._put(_to_line(self._describe_state()))
        if state in ("ended", "failed") and not self._is_busy and self._waiting is None:
            self._finish_later()

    def _finish_later(self) -> None:
        self._finishing = self._finishing or self._loop.create_task(self._finish())

    def _describe_state(self) -> dict[str, str]:
        return {"stream": self.name, "state": self.state, **({"error": self.error} if self.error else {})}

    @property
    def fps(self) -> float:
        """The number of answers per second, over the last 5 s and at most 64 answers."""
        now_s = self._loop.time()
        recent = [at_s for at_s, _ in self._recent if at_s > now_s - _RECENT_S]
        return (len(recent) - 1) / max(recent[-1] - recent[0], 1e-3) if recent else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the entry for the list of streams. `times_ms` contains means over the last 64 answers."""
        times: dict[str, list[float]] = {}
        for _, times_ms in self._recent:
            for stage, value in times_ms.items():
                with contextlib.suppress(TypeError, ValueError):
                    times.setdefault(stage, []).append(float(value))
        return {
            "name": self.name,
            "model": self.options.model,
            "source": hide_password(self.options.source),
            "state": self.state,
            "error": self.error,
            "last_error": self.last_error,
            "fps": round(self.fps, 2),
            "frames": {name: self.counts[name] for name in ("read", "answered", "replaced", "failed")},
            "restarts": self.counts["restarts"],
            "times_ms": {stage: round(sum(values) / len(values), 3) for stage, values in times.items()},
            "sinks": [sink.to_json() for sink in self._sinks],
            "trial": self._calls.find_trial(self.options.model),
            "viewers": len(self._viewers),
            "capture_pid": self._source.pid,
        }


def fit_windows(options: StreamOptions, calls: Calls) -> StreamOptions | None:
    """Return the options with a `hop_s` that suits the model, or None if the model is not loaded.

    If the model keeps states, windows of sound must not overlap. A `hop_s` of None is set to `window_s`.

    Raises:
        RequestError: The model does not exist, or it keeps states and `hop_s` differs from `window_s`.
    """
    has_states = calls.has_states(options.model)
    if not has_states:
        return None if has_states is None else options
    if options.hop_s not in (None, options.window_s):
        raise RequestError(
            400,
            f"{options.model} keeps states between windows, which must not overlap: hop_s is"
            f" {options.hop_s:g}, expected window_s, {options.window_s:g}",
        )
    return dataclasses.replace(options, hop_s=options.window_s)


def drop_low_scores(answer: Mapping[str, Any], min_score: float | None) -> dict[str, Any]:
    """Return the answer without list entries whose score is below `min_score`. None keeps all entries."""

    def keep(entry: Any) -> bool:
        score = entry.get("score") if isinstance(entry, Mapping) else None
        return min_score is None or not isinstance(score, int | float) or score >= min_score

    return {
        name: [entry for entry in value if keep(entry)] if isinstance(value, list) else value
        for name, value in answer.items()
    }


def _to_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
