"""Background tasks on an event loop. Tasks are referenced until they end, and failures are reported."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self, work: Coroutine[Any, Any, None], on_error: Callable[[BaseException], None]
    ) -> "asyncio.Task[None]":
        """Start `work` as a task. If it fails, `on_error` is called with the exception."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._finish, on_error))
        return task

    def cancel(self) -> "asyncio.Future[Any]":
        """Cancel all tasks. Return a future that is done when they have ended."""
        for task in self._tasks:
            task.cancel()
        return asyncio.gather(*self._tasks, return_exceptions=True)

    def _finish(self, on_error: Callable[[BaseException], None], task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            on_error(error)
