"""Answers and refusals of calls by a lane; each refusal is counted."""

import logging

from edgekit_runtime.errors import DeadlineError, EdgekitError, OverloadedError, UnavailableError
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Answer, Call

_logger = logging.getLogger(__name__)


def reply(call: Call, answer: Answer) -> None:
    """Answer a call; an error of `call.reply` is logged."""
    try:
        call.reply(answer)
    except Exception:  # a fault in writing one answer must not keep back the others
        _logger.exception("an answer could not be delivered")


def refuse(call: Call, error: EdgekitError, metrics: LaneMetrics) -> None:
    """Reply with `error` to a call that has not run."""
    metrics.refused += 1
    reply(call, error)


def miss(call: Call, metrics: LaneMetrics) -> None:
    """Refuse a call whose deadline has passed."""
    metrics.late += 1
    reply(call, DeadlineError(f"{metrics.model}: the call had not begun by its deadline; give it more time"))


def shed(call: Call, metrics: LaneMetrics, waiting: int, wait_s: float) -> None:
    """Refuse a call since `waiting` calls already wait; the client may retry after `wait_s`."""
    metrics.shed += 1
    message = f"{metrics.model}: {waiting} calls wait already; try again in {wait_s:.3g} s"
    reply(call, OverloadedError(message, wait_s))


def cancel(call: Call, metrics: LaneMetrics) -> None:
    """Reply with an error to a call whose client has gone: the lanes that passed it on need a reply."""
    metrics.cancelled += 1
    reply(call, UnavailableError(f"{metrics.model}: the client went before the call had begun"))
