"""Log records as lines of JSON, for what collects them.

A request is not logged when it succeeds: the metrics count it, and a line would cost more than a short model.
"""

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final

_FIELDS: Final = ("request_id", "model", "version")


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, logger, message, and what the record is about.

    A record names its subject by `extra={"model": ..., "version": ..., "request_id": ...}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for field in _FIELDS:
            value = getattr(record, field, None)
            if value is not None:
                entry[field] = str(value)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
