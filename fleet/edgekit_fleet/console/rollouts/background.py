"""Work that is too long for a page: a thread does it, and the open page asks for the result again."""

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
    """The result of work that goes on in a `Background`.

    Attributes:
        result: the newest result, or None while there is none.
        is_current: whether `result` is the requested one; otherwise ask again.
    """

    result: Result | None
    is_current: bool


@dataclass(frozen=True, slots=True)
class _Task(Generic[Result]):
    future: Future[Result]
    begun_at: float
    before: Result | None


class Background(Generic[Result]):
    """Does one piece of work after the other; any thread may ask."""

    def __init__(self, closing: ExitStack) -> None:
        """Begin without work; `closing` waits for running work and drops waiting work."""
        self._executor = ThreadPoolExecutor(1, "page")
        closing.callback(self._executor.shutdown, cancel_futures=True)
        self._tasks: OrderedDict[Hashable, _Task[Result]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable, work: Callable[[], Result], *, is_again: bool = False) -> Lookup[Result]:
        """Return the result of some work, or the previous result if the work takes too long for a page.

        Args:
            key: key of the work; if work with this key runs already, the call waits for its result.
            work: work to begin if no work with the key runs.
            is_again: whether the same page asks again; then a recent result is accepted.

        Raises:
            RequestError: too much work is waiting.
            EdgekitError: as from `work`.
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
