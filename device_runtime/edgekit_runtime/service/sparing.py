"""Few of the tracebacks that come again and again."""

import logging
import time
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Final

_PERIOD_S: Final = 60.0
_MAX_SAID: Final = 64  # a client may have a say in what messages are about


class SparingTracebacks(logging.Filter):
    """Lets the traceback of one fault through once a minute, with how often it came meanwhile.

    Faults are the same where the same message is about the same things and the error was raised at the same
    line; a model whose engine fails would else write some pages for each request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Let everything through once.

        Args:
            clock: seconds since any moment.
        """
        super().__init__()
        self._clock = clock
        self._said: dict[Hashable, tuple[float, int]] = {}  # fault -> when it was said, how often not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is to be written; records without a traceback are."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        now_s = self._clock()
        fault: Hashable = (record.getMessage(), type(error), _find_line(error.__traceback__))
        if fault not in self._said and len(self._said) >= _MAX_SAID:
            self._said = {key: said for key, said in self._said.items() if now_s - said[0] < _PERIOD_S}
            if len(self._said) >= _MAX_SAID:
                fault = None  # all others together
        at_s, left_out = self._said.get(fault, (-_PERIOD_S, 0))
        if now_s - at_s < _PERIOD_S:
            self._said[fault] = (at_s, left_out + 1)
            return False
        self._said[fault] = (now_s, 0)
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} times more since it was last said)"
            record.args = ()
        return True


def _find_line(trace: TracebackType | None) -> tuple[str, int] | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
