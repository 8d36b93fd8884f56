"""Loads a model on its own thread with a time limit.

If the load takes too long, sessions that have a method `interrupt` are interrupted. If this does not end the
thread, the error states that the thread is still running.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, Generic, TypeVar

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.session import Session

Result = TypeVar("Result")

_STOPPING_S: Final = 2.0  # for an engine to stop after `interrupt`
_NAME: Final = "edgekit-load"
_HUNG_NAME: Final = "edgekit-hung-load"


class LoadAttempt(Generic[Result]):
    """A load that is abandoned after a time limit."""

    def __init__(
        self,
        description: str,
        work: "Callable[[LoadAttempt[Result]], Result]",
        discard: Callable[[Result], None],
    ) -> None:
        """Create a load. `result_within` starts it.

        Args:
            description: A description of the load for messages.
            work: Loads the model and returns the result. It calls `note` with each session that it opens.
            discard: Frees a result that is too late.
        """
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._description, self._work, self._discard = description, work, discard
        self._lock = threading.Lock()
        self._sessions: list[Session] = []
        self._future: Future[Result] = Future()  # cancelled when the load is abandoned

    def result_within(self, limit_s: float) -> Result:
        """Start the load and return its result. This can be called only once.

        Raises:
            BackendError: The load took longer than `limit_s`.
            BaseException: Any exception of the load.
        """
        self._thread.start()
        wait([self._future], limit_s)
        with self._lock:
            is_late = self._future.cancel()
            opened = tuple(self._sessions)
        if is_late:
            raise BackendError(f"{self._description}: {self._stop(opened, limit_s)}")
        return self._future.result()

    def note(self, session: Session) -> Session:
        """Register a session so that it can be interrupted, and return it.

        Raises:
            BackendError: The load is already abandoned. The session is closed.
        """
        with self._lock:
            if not self._future.cancelled():
                self._sessions.append(session)
                return session
        session.close()
        raise BackendError(f"{self._description}: its load was given up: it took too long")

    def _run(self) -> None:
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = self._work(self)
        except BaseException as cause:  # raised again where the result is waited for
            error = cause
        with self._lock:
            self._sessions.clear()
            is_late = not self._future.set_running_or_notify_cancel()
        if error is not None:
            if not is_late:
                self._future.set_exception(error)
        elif result is not None:
            deliver = self._discard if is_late else self._future.set_result
            deliver(result)

    def _stop(self, opened: tuple[Session, ...], limit_s: float) -> str:
        self._thread.name = _HUNG_NAME
        for session in opened:
            interrupt = getattr(session, "interrupt", None)
            if interrupt is not None:
                interrupt()
        self._thread.join(_STOPPING_S)
        message = f"opening, self-test and first runs took longer than {limit_s:g} s (load_timeout_s)"
        if not self._thread.is_alive():
            return message
        return (
            f"{message}; its engine cannot be stopped, so it keeps a thread and its memory until this process"
            " ends: restart the service, or set isolated = true for this model"
        )


def count_hung() -> int:
    """Return the number of abandoned loads that are still running in this process."""
    return sum(thread.name == _HUNG_NAME for thread in threading.enumerate())
