"""Stores requests of one model as samples.

The event loop calls `ModelSampler.note` for each request. This method copies randomly selected requests.
The thread of `Writer` evaluates the triggers of each copy, and encrypts and stores the matching ones. Then it
reports the result to the event loop, which adjusts the selection.
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
from typing import Any, Final

from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import DataError, EdgekitError, RequestError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.protocol.samples import MAX_SEALED_BYTES, TRIGGERS, SampleOrder
from edgekit_runtime.samples.draws import KEPT, Draw, Draws, Line, Selection, pull_kept
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
    """A thread that stores samples. Its queue holds up to 8 jobs and 32 MiB. Further jobs are dropped."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[int, Callable[[], None]] | None] = queue.Queue(_MAX_QUEUED)
        self._lock, self._queued_bytes = threading.Lock(), 0
        self._thread: threading.Thread | None = None

    def put(self, size_bytes: int, job: Callable[[], None]) -> bool:
        """Queue a job that needs `size_bytes` of memory. Return False if the job is dropped."""
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
        """Finish the queued jobs and end the thread. Return False if it has not ended after 4 s."""
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
    """Collects samples of one model. Use it on the event loop. Only its jobs for `Writer` run on a thread."""

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
        """Replace the orders to follow."""
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
            if line.trigger.kind not in TRIGGERS:
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
        """Count a request, and copy it if it is selected as a sample. See `served_version.Sampler`."""
        draws = self.draws
        draws.countdown -= 1
        if draws.countdown > 0 and self._recent is None:
            return
        draw = draws.draw(self._clock()) if draws.countdown <= 0 else None
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
        """Store a recent request as a sample, and return the id of the sample.

        Args:
            request_id: The id of the request, or None for the latest request.

        Raises:
            RequestError: No order accepts samples from applications (409), the request is not among the last
                ones (404), the orders have enough samples or no space (429), or the writer's queue is full
                (503).
        """
        if self._recent is None:
            raise RequestError(409, f"the fleet has no order for kept samples of {self._model}")
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
        self.draws.refresh(self._clock())

    def note_sizes(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Set the sizes in bytes of all unsent samples, by order and kind of trigger."""
        self._sizes = sizes
        self._note_room()

    def to_json(self) -> dict[str, JsonValue]:
        """Return a dict from the id of each order to its progress.

        `triggers` is a dict from the kind of a trigger to the number of stored samples, `dropped` is the
        number of dropped samples, and `error` is a message or empty.
        """
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
        """Queue a request for its triggers and storage. Return the sample's id, or None if it is dropped."""
        sample_id = os.urandom(16).hex()
        if self._writer.put(request.size_bytes, lambda: self._store(request, draw, sample_id)):
            return sample_id
        self._drop(draw)
        return None

    def _drop(self, draw: Draw) -> None:
        for line, is_hit in zip(draw.lines, draw.hits, strict=True):
            if is_hit:
                self._dropped[line.order.id] += 1
                line.spend(-1)

    # On the thread of the writer

    def _store(self, request: ServedRequest, draw: Draw, first_id: str) -> None:
        fits, problems = draw.hits, dict[tuple[str, str], str]()
        if not draw.is_pulled:
            observation = request.observe()
            looks = [_judge(observation, line) for line in draw.lines]
            fits = tuple(map(bool, looks))
            problems = {
                line.share: "" if look is not None else f"{line.trigger.kind}: nobody can tell, or not now"
                for line, look in zip(draw.lines, looks, strict=True)
                if line.trigger.kind in JUDGES
            }
        stored: list[Line] = []
        for number, selection in enumerate(draw.select(fits)):
            sample_id = f"{number:x}{first_id[1:]}" if number else first_id
            try:
                self._write(selection, sample_id, request.seal(selection, sample_id))
            except (EdgekitError, ValueError) as error:
                self._dropped[selection.lines[0].order.id] += 1
                _logger.warning("a sample of %s is not stored: %s", self._model, error)
            else:
                stored.append(selection.lines[0])
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, draw, fits, stored, problems)

    def _write(self, selection: Selection, sample_id: str, sealed: bytes) -> None:
        line = selection.lines[0]
        self._largest_bytes = max(self._largest_bytes, len(sealed))
        size_bytes = self._sizes.get(line.share, 0) + len(sealed)
        if len(sealed) > MAX_SEALED_BYTES or size_bytes > line.max_bytes:
            raise DataError("it is too large, or its share of the disk is full")
        self._folder.write(self._model, line.share, sample_id, sealed)
        self._sizes = {**self._sizes, line.share: size_bytes}

    # On the thread of the loop again

    def _settle(
        self, draw: Draw, fits: tuple[bool, ...], stored: list[Line], problems: Mapping[tuple[str, str], str]
    ) -> None:
        draw.settle(fits)
        self._problems |= problems
        for line in stored:
            line.stored += 1
        self._note_room()

    def _note_room(self) -> None:
        """Enable triggers only if there is room for two more samples of the largest size so far."""
        sizes, spare_bytes = self._sizes, 2 * self._largest_bytes
        has_room = sum(sizes.values()) + spare_bytes <= self._options.max_bytes
        for line in self.draws.lines:
            size_bytes = sizes.get(line.share, 0) + spare_bytes
            is_known = line.trigger.kind in TRIGGERS
            line.has_room = is_known and has_room and size_bytes <= line.max_bytes


def _judge(observation: Observation, line: Line) -> bool | None:
    judge = JUDGES.get(line.trigger.kind)
    return None if judge is None else judge(observation, line.trigger)


def copy_borrowed(arrays: Mapping[str, Array], own: str | None) -> Mapping[str, Array]:
    """Copy the arrays that do not own their memory. The array with the name `own` is not copied."""
    return {
        name: array if name == own or array.flags.owndata else array.copy() for name, array in arrays.items()
    }
