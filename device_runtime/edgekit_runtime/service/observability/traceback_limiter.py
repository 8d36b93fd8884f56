"""Limits how often the same traceback is logged."""

import copy
import logging
import threading
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Final

from edgekit_runtime.system.shown_text import log_lines

_PERIOD_S: Final = 60.0
_MAX_LOGGED: Final = 64  # clients may influence the messages


def log_limited(prefix: str) -> None:
    """Log warnings to standard error with `prefix`, and limit equal tracebacks to one a minute."""
    log_lines(prefix)
    for handler in logging.getLogger().handlers:
        handler.addFilter(TracebackLimiter(handler))


class TracebackLimiter(logging.Filter):
    """Limits equal tracebacks in the log to one a minute, and logs how many were suppressed.

    Two records are equal if they have the same message, error type and line. Without this filter, a failing
    engine would log a traceback for each request. Other handlers still get every record.
    """

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a filter that has logged nothing yet.

        Args:
            handler: The handler to filter. It also writes the records that state a number of repeats.
            clock: Returns the time in seconds.
        """
        super().__init__()
        self._handler, self._clock = handler, clock
        self._lock = threading.Lock()  # filters run outside the lock of their handler
        self._logged: dict[Hashable, tuple[float, int]] = {}  # fault -> when it was said, how often not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the handler should write the record. Records without a traceback are always written.

        If equal records were suppressed before, this method itself writes the record, with the number of
        suppressed records, and returns False.
        """
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        fault = (record.getMessage(), type(error), _find_line(error.__traceback__))
        with self._lock:
            left_out = self._count(fault)
        if left_out:
            counted = copy.copy(record)
            counted.msg = f"{record.getMessage()} ({left_out} times more since it was last said)"
            counted.args = ()
            self._write(counted)  # Python < 3.12 has no filters that return another record
        return left_out == 0

    def _count(self, fault: Hashable) -> int | None:
        """Return how often a fault was suppressed since it was last logged. None means not to log it now.

        The caller holds the lock.
        """
        now_s = self._clock()
        if fault not in self._logged and len(self._logged) >= _MAX_LOGGED:
            self._logged = {
                key: report for key, report in self._logged.items() if now_s - report[0] < _PERIOD_S
            }
            if len(self._logged) >= _MAX_LOGGED:
                fault = None  # all others together
        at_s, left_out = self._logged.get(fault, (-_PERIOD_S, 0))
        if now_s - at_s < _PERIOD_S:
            self._logged[fault] = (at_s, left_out + 1)
            return None
        self._logged[fault] = (now_s, 0)
        return left_out

    def _write(self, record: logging.LogRecord) -> None:
        """Write a record as `Handler.handle` does after its filters."""
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()


def _find_line(trace: TracebackType | None) -> tuple[str, int] | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
