"""Functions that answer or refuse calls. Each refusal is counted in the metrics."""

import logging

from edgekit_runtime.errors import DeadlineError, EdgekitError, OverloadedError, UnavailableError
from edgekit_runtime.service.observability.metrics import LaneMetrics
from edgekit_runtime.service.scheduling.call import Answer, Call

_logger = logging.getLogger(__name__)


def reply(call: Call, answer: Answer) -> None:
    """Answer a call. If `call.reply` raises, the error is logged."""
    try:
        call.reply(answer)
    except Exception:  # a fault in writing one answer must not keep back the others
        _logger.exception("an answer could not be delivered")


def refuse(call: Call, error: EdgekitError, metrics: LaneMetrics) -> None:
    """Answer a call with `error` without running it."""
    metrics.refused += 1
    reply(call, error)


def miss(call: Call, metrics: LaneMetrics) -> None:
    """Refuse a call whose deadline has passed."""
    metrics.late += 1
    reply(call, DeadlineError(f"{metrics.model}: the call had not begun by its deadline; give it more time"))


def shed(call: Call, metrics: LaneMetrics, waiting: int, wait_s: float) -> None:
    """Refuse a call because `waiting` calls already wait. The client may retry after `wait_s`."""
    metrics.shed += 1
    message = f"{metrics.model}: {waiting} calls wait already; try again in {wait_s:.3g} s"
    reply(call, OverloadedError(message, wait_s))


def cancel(call: Call, metrics: LaneMetrics) -> None:
    """Answer a call with an error, because its client has disconnected."""
    metrics.cancelled += 1
    reply(call, UnavailableError(f"{metrics.model}: the client went before the call had begun"))
