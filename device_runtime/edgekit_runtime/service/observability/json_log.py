"""Writes log records as JSON, one object per line, for log collectors.

Successful requests are not logged. They are counted in the metrics, and writing a log record would take
longer than running a small model.
"""

import json
import logging
from datetime import datetime, timezone
from typing import Any, Final

_FIELDS: Final = ("request_id", "model", "version")


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object with its time, level, logger, message and subject.

    The subject is passed as `extra={"model": ..., "version": ..., "request_id": ...}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
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
