"""Inference requests: from a body to a call, and from the outputs to an answer."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.service.answers import make_error
from edgekit_runtime.service.call import Answer, Call
from edgekit_runtime.service.catalogue import Catalogue
from edgekit_runtime.service.connection import Connection
from edgekit_runtime.service.heads import Head
from edgekit_runtime.service.model import EvictedError
from edgekit_runtime.service.oip import Codec, Held
from edgekit_runtime.service.plan import Plan
from edgekit_runtime.service.served import Served
from edgekit_runtime.sessions.session import Array

WhenLoaded: TypeAlias = Callable[[str, Connection, Callable[[], None]], None]

_NONE_HELD: Final[Held] = {}

_logger = logging.getLogger(__name__)


class InferRoutes:
    """Answers inference requests with what serves their models."""

    __slots__ = ("_models", "_when_loaded")

    def __init__(self, models: Catalogue, when_loaded: WhenLoaded) -> None:
        """Make it.

        Args:
            models: that may be asked.
            when_loaded: takes the name of a model that was unloaded for others, whose request it is, and what
                to do once the model is loaded again.
        """
        self._models = models
        self._when_loaded = when_loaded

    def take(
        self, name: str, version: str | None, connection: Connection, head: Head, body: memoryview
    ) -> None:
        """Answer a request to a model, now or later.

        Raises:
            EdgekitError: the answer is this error.
        """
        try:
            served = self._models.find(name, version)
        except EvictedError:
            again = functools.partial(self.take, name, version, connection, head, body)
            self._when_loaded(name, connection, again)
            return
        codec = served.codec
        plan, inputs = codec.decode(body, head.json_bytes, is_local=connection.is_local)
        held = codec.hold(plan, is_local=connection.is_local) if plan.shares_outputs else _NONE_HELD
        answer = served.lane.attempt(inputs)
        if answer is None:
            _submit(served, plan, inputs, held, connection)
        else:
            _reply(connection, codec, plan, held, answer)


def _submit(
    served: Served, plan: Plan, inputs: Mapping[str, Array], held: Held, connection: Connection
) -> None:
    deadline_s = None if plan.timeout_us is None else time.monotonic() + plan.timeout_us / 1e6
    reply = functools.partial(_reply, connection, served.codec, plan, held)
    served.lane.submit(Call(inputs, reply, plan.priority, deadline_s))


def _reply(connection: Connection, codec: Codec, plan: Plan, held: Held, answer: Answer) -> None:
    if isinstance(answer, EdgekitError):
        connection.answer(*make_error(answer))
        return
    try:
        parts = codec.encode(plan, answer, held)
    except EdgekitError as error:
        parts = make_error(error)
    except Exception:  # of a third party's backend that returned what is no tensor
        _logger.exception("the outputs of %s are not what its package says", codec.name)
        parts = make_error(RequestError(500, "the model's outputs cannot be sent"))
    connection.answer(*parts)
