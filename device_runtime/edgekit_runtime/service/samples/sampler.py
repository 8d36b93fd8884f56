"""Samples of one model: `note` takes each request; a thread looks at those that were drawn, and stores them.

loop      note -> draw, 1 of very many: copy -> Writer.put          ... -> settle: learn from the look
thread                                         triggers -> select -> seal -> folder
"""

import contextlib
import logging
import os
import queue
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DataError, EdgekitError, RequestError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.samples import MAX_SEALED_BYTES, SampleOrder
from edgekit_runtime.records import dataclass
from edgekit_runtime.samples.draws import KEPT, Draw, Draws, Line, pull_kept
from edgekit_runtime.samples.folder import SampleFolder
from edgekit_runtime.samples.triggers import JUDGES, Observation
from edgekit_runtime.service.options.config import SampleOptions
from edgekit_runtime.service.samples.served_request import ServedRequest
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.tensors import Array

_MAX_QUEUED: Final = 8
_MAX_QUEUED_BYTES: Final = 32 << 20
_MAX_RECENT: Final = 16
_MAX_RECENT_BYTES: Final = 8 << 20  # the last request stays in any case
_CLOSE_S: Final = 2.0

_logger = logging.getLogger(__name__)


class Writer:
    """A thread for all models of a process; what does not fit into its queue is dropped."""

    def __init__(self) -> None:
        """Begin without a thread."""
        self._jobs: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue(_MAX_QUEUED)
        self._lock, self._queued_bytes = threading.Lock(), 0
        self._thread: threading.Thread | None = None

    def put(self, size_bytes: int, job: Callable[[], None]) -> bool:
        """Have a job done that holds so many bytes; return False if there is too much to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="edgekit-samples", daemon=True)
            self._thread.start()
        with self._lock:
            if self._queued_bytes and self._queued_bytes + size_bytes > _MAX_QUEUED_BYTES:
                return False
            try:
                self._jobs.put_nowait((size_bytes, job))
            except queue.Full:
                return False
            self._queued_bytes += size_bytes
        return True

    def close(self) -> bool:
        """Do what is queued; return whether that has ended in time."""
        if self._thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            size_bytes, job = item
            try:
                job()
            except Exception:
                _logger.exception("a sample is not stored")
            with self._lock:
                self._queued_bytes -= size_bytes
            item = job = None  # type: ignore[assignment]  # else the last request stays in memory


class ModelSampler:
    """Samples of one model, on the thread of the loop but for what `Writer` does."""

    __slots__ = (
        *("_clock", "_dropped", "_folder", "_largest_bytes", "_loop", "_max_bytes", "_model", "_options"),
        *("_orders", "_problems", "_recent", "_recent_bytes", "_sizes", "_writer", "draws"),
    )

    def __init__(
        self,
        model: str,
        folder: SampleFolder,
        options: SampleOptions,
        writer: Writer,
        loop: AbstractEventLoop,
        *,
        draws: Draws | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without orders."""
        self._model, self._folder, self._options, self._writer = model, folder, options, writer
        self._loop, self._clock = loop, clock
        self.draws = draws or Draws(clock())
        self._recent: deque[ServedRequest] | None = None
        self._recent_bytes = self._max_bytes = 0
        self._largest_bytes = 0  # of its samples so far, for which there must be room
        self._sizes: Mapping[tuple[str, str], int] = {}
        self._dropped: Counter[str] = Counter()
        self._problems: dict[tuple[str, str], str] = {}
        self._orders: tuple[SampleOrder, ...] = ()

    def set_orders(self, orders: tuple[SampleOrder, ...]) -> None:
        """Follow these orders from now on."""
        if orders == self._orders:
            return
        self._orders, self._problems = orders, {}
        self.draws.set_orders(orders, self._clock())
        lines = self.draws.lines
        self._max_bytes = max((line.order.max_sample_bytes for line in lines), default=0)
        if not any(line.trigger.kind == KEPT for line in lines):
            self._recent = None
        elif self._recent is None:
            self._recent, self._recent_bytes = deque(), 0
        for line in lines:
            if line.trigger.kind not in (*JUDGES, KEPT):
                line.has_room = False
                self._problems[line.share] = f"this edgekit knows no trigger {line.trigger.kind[:40]!r}"

    def note(
        self,
        served: Served,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        *,
        request_id: str | None = None,
        file: "tuple[bytes | memoryview, MediaType | None, Any] | None" = None,
        answer: Mapping[str, JsonValue] | None = None,
    ) -> None:
        """Take a request before its answer is sent, while its inputs are valid.

        Args:
            served: version that answered.
            inputs: of the model.
            outputs: of the model.
            request_id: identifier that the client gave it.
            file: bytes, media type and placement of a photograph or sound; None for tensors.
            answer: of the task, or None.
        """
        draws = self.draws
        draws.left -= 1
        if draws.left > 0 and self._recent is None:
            return
        draw = draws.draw(self._clock()) if draws.left <= 0 else None
        size_bytes = len(file[0]) if file is not None else sum(array.nbytes for array in inputs.values())
        if size_bytes > self._max_bytes:
            if draw is not None:
                self._drop(draw)
            return
        answerer = served.loaded.answerer
        own = answerer.media_input if file is not None and answerer is not None else None
        request = ServedRequest(
            served=served,
            inputs=copy_borrowed(inputs, own),
            outputs=outputs,
            id=request_id,
            answer=answer or None,
        )
        if file is not None:
            request.data, request.media_type, request.placement = bytes(file[0]), *file[1:]
        if self._recent is not None:
            self._remember(request)
        if draw is not None:
            self._put(request, draw)

    def keep(self, request_id: str | None) -> str:
        """Store a recent request for the application, the last one by default; return the sample's id.

        Raises:
            RequestError: no order lets applications keep requests, or none now, or the request is forgotten.
        """
        if self._recent is None:
            raise RequestError(409, f"the fleet asks for no samples of {self._model} that applications keep")
        matching = (request for request in reversed(self._recent) if request_id in (None, request.id))
        request = next(matching, None)
        if request is None:
            raise RequestError(404, f"this request of {self._model} is not remembered; the last few are")
        draw = pull_kept(self.draws.lines, self._clock())
        if draw is None:
            raise RequestError(429, "the order has enough samples that applications kept, or no room")
        sample_id = self._put(request, draw)
        if sample_id is None:
            raise RequestError(503, "too many samples are being stored; try again", retry_after_s=1)
        return sample_id

    def refresh(self) -> None:
        """Fix the probabilities of the next requests."""
        self.draws.refresh(self._clock())

    def note_sizes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Take the bytes of all samples that wait, by order and kind."""
        self._sizes = sizes
        self._note_room()

    def to_json(self) -> dict[str, JsonValue]:
        """Return what came of each order, for the statistics."""
        orders: dict[str, JsonValue] = {}
        for order in self._orders:
            lines = [line for line in self.draws.lines if line.order.id == order.id]
            problems = {self._problems.get(line.share, "") for line in lines} - {""}
            orders[order.id] = {
                "triggers": {line.trigger.kind: line.stored for line in lines},
                "dropped": self._dropped[order.id],
                "error": "; ".join(sorted(problems)),
            }
        return orders

    def _remember(self, request: ServedRequest) -> None:
        assert self._recent is not None  # noqa: S101  # for the type checker
        self._recent.append(request)
        self._recent_bytes += request.size_bytes
        while len(self._recent) > 1 and (
            len(self._recent) > _MAX_RECENT or self._recent_bytes > _MAX_RECENT_BYTES
        ):
            self._recent_bytes -= self._recent.popleft().size_bytes

    def _put(self, request: ServedRequest, draw: Draw) -> str | None:
        """Have a request looked at and stored; return the sample's identifier, or None if it is dropped."""
        sample_id = os.urandom(16).hex()
        if self._writer.put(request.size_bytes, lambda: self._store(request, draw, sample_id)):
            return sample_id
        self._drop(draw)
        return None

    def _drop(self, draw: Draw) -> None:
        """Count samples that are not stored, as orders state them; nothing is learned of the request."""
        for line, is_hit in zip(draw.lines, draw.hits, strict=True):
            if is_hit:
                self._dropped[line.order.id] += 1
                line.spend(-1)

    # On the thread of the writer

    def _store(self, request: ServedRequest, draw: Draw, first_id: str) -> None:
        """Look at a request, and store it for the orders that drew it."""
        result = _Result(draw, tuple(draw.hits))
        if not draw.is_pulled:
            observation = request.observe()
            fits = [self._judge(observation, line, result) for line in draw.lines]
            result.fits = tuple(fits)
        for number, selection in enumerate(draw.select(result.fits)):
            line = selection.lines[0]
            sample_id = f"{number:x}{first_id[1:]}" if number else first_id
            try:
                sealed = request.seal(selection, sample_id)
                result.largest_bytes = max(result.largest_bytes, len(sealed))
                size_bytes = self._sizes.get(line.share, 0) + len(sealed)
                if len(sealed) > MAX_SEALED_BYTES or size_bytes > line.max_bytes:
                    raise DataError("it is too large, or its share of the disk is full")
                self._folder.write(self._model, line.share, sample_id, sealed)
                self._sizes = {**self._sizes, line.share: size_bytes}
                result.stored.append(line)
            except (EdgekitError, ValueError) as error:
                result.dropped.append(line.order.id)
                _logger.warning("a sample of %s is not stored: %s", self._model, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, result)

    def _judge(self, observation: Observation, line: Line, result: "_Result") -> bool:
        judge = JUDGES.get(line.trigger.kind)
        if judge is None:
            return False
        is_fit = judge(observation, line.trigger)
        problem = f"{line.trigger.kind}: this package does not let anybody tell, or not now"
        result.problems[line.share] = problem if is_fit is None else ""
        return bool(is_fit)

    # On the thread of the loop again

    def _settle(self, result: "_Result") -> None:
        result.draw.settle(result.fits)
        self._dropped.update(result.dropped)
        self._largest_bytes = max(self._largest_bytes, result.largest_bytes)
        self._problems |= result.problems
        for line in result.stored:
            line.stored += 1
        self._note_room()

    def _note_room(self) -> None:
        """Let triggers draw only while there is room for two more samples of the largest size so far."""
        sizes, spare_bytes = self._sizes, 2 * self._largest_bytes
        has_room = sum(sizes.values()) + spare_bytes <= self._options.max_bytes
        for line in self.draws.lines:
            is_known = line.trigger.kind in (*JUDGES, KEPT)
            size_bytes = sizes.get(line.share, 0) + spare_bytes
            line.has_room = is_known and has_room and size_bytes <= line.max_bytes


@dataclass(slots=True, eq=False)
class _Result:
    """What came of a request that was drawn.

    Attributes:
        stored: lines whose samples are stored.
        dropped: orders whose samples are not.
        problems: order and kind -> why nobody can tell whether it fits, or empty.
    """

    draw: Draw
    fits: tuple[bool, ...]
    stored: list[Line] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    largest_bytes: int = 0
    problems: dict[tuple[str, str], str] = field(default_factory=dict)


def copy_borrowed(arrays: Mapping[str, Array], own: str | None) -> Mapping[str, Array]:
    """Return arrays that stay valid: those whose memory others write to are copied, but for the one `own`."""
    return {
        name: array if name == own or array.flags.owndata else array.copy() for name, array in arrays.items()
    }
