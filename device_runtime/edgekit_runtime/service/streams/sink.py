"""A sink for the answers of a stream, with a queue.

A sink never slows down its stream. Answers wait in a queue of limited length, and a thread writes them to the
sink. If the sink fails, the thread retries after increasing delays. If the queue is full, the oldest answers
are dropped.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from edgekit_runtime.protocol.streams import hide_password
from edgekit_runtime.service.streams.source import find_pause_s

_IDLE_S: Final = 5.0
_END_S: Final = 1.0  # for answers that wait when a stream ends
_MAX_PAUSE_S: Final = 4.0
_MAX_ERROR: Final = 300

_logger = logging.getLogger(__name__)


class UndeliverableError(Exception):
    """A sink refused an answer, and would refuse it again."""


class Sink:
    """A receiver of answers. It is used by one thread and may block for a few seconds.

    Attributes:
        max_batch: The maximum number of answers per `write`. If `write` fails, all of them are retried.
    """

    max_batch = 16

    def write(self, lines: Sequence[bytes]) -> None:
        """Write answers. Each answer is a line of JSON.

        Raises:
            OSError: The answers were not written, and the caller should retry later.
            UndeliverableError: The answers can never be written.
        """
        raise NotImplementedError

    def rest(self) -> None:
        """Keep the connection alive. Called every few seconds while there are no answers.

        Raises:
            OSError: The connection has failed.
        """

    def close(self) -> None:
        """Free all resources. The sink cannot be used afterwards."""


class QueuedSink:
    """A sink with a queue and a thread.

    Attributes:
        written: The number of answers that were written to the sink.
        dropped: The number of answers that were dropped.
        error: The error of the last attempt, or empty.
    """

    def __init__(self, text: str, sink: Sink, max_queued: int) -> None:
        self.written = self.dropped = 0
        self.error = ""
        self._text, self._sink = hide_password(text), sink
        self._queued: deque[bytes] = deque()
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="edgekit-sink", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue an answer, which is a line of JSON. If the queue is full, the oldest answer is dropped."""
        with self._changed:
            if len(self._queued) >= self._max_queued:
                self._queued.popleft()
                self.dropped += 1
            self._queued.append(line)
            self._changed.notify()

    def stop(self) -> None:
        """Tell the thread to end when all queued answers are written or a write fails.

        This method does not wait.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def join(self) -> None:
        """Wait up to 1 s for the thread to end. Call `stop` first."""
        self._thread.join(_END_S)

    def to_json(self) -> dict[str, Any]:
        return {
            "sink": self._text,
            "written": self.written,
            "waiting": len(self._queued),
            "dropped": self.dropped,
            "error": self.error,
        }

    def _run(self) -> None:
        failures, pause_s = 0, 0.0
        while True:
            with self._changed:
                if pause_s:
                    self._changed.wait_for(lambda: self._is_stopping, pause_s)
                else:
                    self._changed.wait_for(lambda: self._queued or self._is_stopping, _IDLE_S)
                lines = [self._queued.popleft() for _ in range(min(self._sink.max_batch, len(self._queued)))]
                is_last = self._is_stopping and not lines
            if is_last:
                break
            try:
                if lines:
                    self._sink.write(lines)
                else:
                    self._sink.rest()
            except UndeliverableError as cause:
                self.dropped += len(lines)
                self.error, failures, pause_s = str(cause)[:_MAX_ERROR], 0, 0.0
            except Exception as cause:  # OSError, or what a library raises
                self._put_back(lines)
                error = f"{cause or type(cause).__name__}"[:_MAX_ERROR]
                if not self.error:
                    _logger.warning("sink %s: %s", self._text, error)
                self.error = error
                failures += 1
                pause_s = find_pause_s(failures, _MAX_PAUSE_S)
                if self._is_stopping:
                    break
            else:
                self.written += len(lines)
                if lines or failures:
                    self.error, failures, pause_s = "", 0, 0.0
        with self._changed:
            self.dropped += len(self._queued)
            self._queued.clear()
        with contextlib.suppress(Exception):
            self._sink.close()

    def _put_back(self, lines: Sequence[bytes]) -> None:
        with self._changed:
            self._queued.extendleft(reversed(lines))
            while len(self._queued) > self._max_queued:
                self._queued.popleft()
                self.dropped += 1
