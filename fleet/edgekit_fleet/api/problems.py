"""Maps errors to HTTP responses with problem details.

Source: RFC 9457.
"""

import http
import json
import logging
from typing import Any, Final

from sqlalchemy.exc import IntegrityError
from starlette.responses import Response

from edgekit_runtime.errors import (
    ConfigError,
    FleetError,
    NotFoundError,
    OutputError,
    PackageError,
    RequestError,
    UnavailableError,
)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_S: Final = 5
_log = logging.getLogger(__name__)

# The first class that fits counts.
_STATUSES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (NotFoundError, 404),
    (FleetError, 409),
    (ConfigError, 409),
    (PackageError, 422),
    (UnavailableError, 503),
    (OutputError, 503),
)
REFUSALS: Final[tuple[type[Exception], ...]] = (
    RequestError,
    IntegrityError,
    *(kind for kind, _ in _STATUSES),
)


def describe_problem(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status, body and headers of the response to a failed request.

    An error that is not one of `REFUSALS` has the status 500.
    """
    headers = {}
    if isinstance(error, RequestError):
        status, detail = error.status, str(error)
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, IntegrityError):
        status, detail = 409, "somebody changed the same thing at the same time; look, and try again"
    else:
        status = next((number for kind, number in _STATUSES if isinstance(error, kind)), 500)
        detail = str(error) if status < 500 else "the fleet cannot do this now; see the manager's log"
    if status >= 500:
        _log.error("%s: %s", type(error).__name__, error, exc_info=error if status == 500 else None)
    if status == 503:
        headers["retry-after"] = str(RETRY_S)
    if status == 401:
        headers["www-authenticate"] = 'Bearer realm="edgekit fleet"'
    phrase = http.HTTPStatus(status).phrase
    return status, {"type": "about:blank", "title": phrase, "status": status, "detail": detail}, headers


def problem_response(error: Exception) -> Response:
    """Return the HTTP response to a request that failed with `error` (see `describe_problem`)."""
    status, body, headers = describe_problem(error)
    return Response(json.dumps(body), status, headers, MEDIA_TYPE)
