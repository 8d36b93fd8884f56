"""Read by schemathesis in scripts/fuzz-api."""

import uuid
from typing import Any

import schemathesis


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Give each request a key of its own: one key for two requests is refused, as it should be."""
    key = case.headers.get("Idempotency-Key") if case.headers else None
    if isinstance(key, str) and 0 < len(key) <= 128 and key.isascii() and key.isprintable():
        case.headers["Idempotency-Key"] = str(uuid.uuid4())
