"""Runs slow work in a background thread, while the open page polls for the result."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from edgekit_runtime.errors import RequestError

_WAIT_S: Final = 0.03
_FRESH_S: Final = 60.0
_MOST_TASKS: Final = 8

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Lookup(Generic[Result]):
    """The result of work in a `Background`.

    Attributes:
        result: The newest result, or None if there is none.
        is_current: Whether `result` is the requested result. Otherwise, ask again.
    """

    result: Result | None
    is_current: bool


@dataclass(frozen=True, slots=True)
class _Task(Generic[Result]):
    future: Future[Result]
    begun_at: float
    before: Result | None


class Background(Generic[Result]):
    """Runs work in one background thread. Its methods may be called from any thread."""

    def __init__(self, closing: ExitStack) -> None:
        """Prepare the thread. `closing` waits for running work, and discards waiting work."""
        self._executor = ThreadPoolExecutor(1, "page")
        closing.callback(self._executor.shutdown, cancel_futures=True)
        self._tasks: OrderedDict[Hashable, _Task[Result]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, work: Callable[[], Result], *, is_again: bool = False) -> Lookup[Result]:
        """Run a function and return its result, or the previous result if the function takes too long.

        Args:
            key: A key that identifies the work. If work with this key is running, its result is awaited.
            work: The function to run.
            is_again: Whether this call repeats an earlier one. If True, a recent result may be returned.

        Raises:
            RequestError: Too much work is waiting.
            EdgekitError: The function raised this error.
        """
        with self._lock:
            task = self._tasks.pop(key, None)
            is_fresh = is_again and task is not None and time.monotonic() - task.begun_at < _FRESH_S
            if task is None or (task.future.done() and not is_fresh):
                self._make_place()
                before = task.future.result() if task and not task.future.exception() else None
                task = _Task(self._executor.submit(work), time.monotonic(), before)
            self._tasks[key] = task
        wait((task.future,), _WAIT_S)
        if task.future.done():
            return Lookup(task.future.result(), True)
        return Lookup(task.before, False)

    def _make_place(self) -> None:
        if len(self._tasks) < _MOST_TASKS:
            return
        oldest = next((key for key, task in self._tasks.items() if task.future.done()), None)
        if oldest is None:
            raise RequestError(503, "the pages that others have opened take long just now; try again")
        del self._tasks[oldest]
