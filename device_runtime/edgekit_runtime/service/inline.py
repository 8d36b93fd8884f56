"""A lane that runs each call at once on the loop's thread."""

import logging
from collections.abc import Callable

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.service.call import Answer, Call
from edgekit_runtime.sessions.session import Session

_logger = logging.getLogger(__name__)


class InlineLane:
    """A `Lane` without queue: nothing is ever under way when `submit` has returned."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def submit(self, call: Call) -> None:
        """Run `call` and answer it."""
        answer: Answer
        try:
            answer = self._session.run(call.inputs)
        except EdgekitError as error:
            answer = error
        except Exception:
            _logger.exception("a session failed with an error of its own")
            answer = BackendError("the engine failed; the log of the service says why")
        call.reply(answer)

    def drain(self, done: Callable[[], None]) -> None:
        """Call `done` when the last call is answered: now."""
        done()
