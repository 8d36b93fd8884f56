"""The last lines of a log, from memory or from the journal, with secrets masked.

A unit of systemd writes to the journal, which survives a restart. Without a journal, each process stores its
last lines and returns them over the Unix socket of the service.
"""

import contextlib
import logging
import os
import re
import subprocess
from collections import deque
from collections.abc import Sequence
from typing import Final

from edgekit_runtime.system.shown_text import LineFormatter, clean_line

MAX_LINES: Final = 1000
_MAX_CHARS: Final = 500
_JOURNAL_S: Final = 5.0
_UNITS: Final = ("edgekit.service", "edgekit-agent.service")
_MASKS: Final = (
    # User and password of an address; tokens; values after words that name a secret; keys; random text.
    (re.compile(r"(?<=://)[^\s/@'\"]+@"), "***@"),
    (re.compile(r"\b(ekt_|whsec_|sk-|gh[a-z]_|AKIA|xox[a-z]-)[A-Za-z0-9_+/=-]+"), r"\1***"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (
        re.compile(
            r"(?i)((?:password|passwd|passphrase|secret|token|api[_-]?key|authorization|credential|cookie"
            r"|signature|[?&]sig|private[_-]?key)[A-Za-z0-9_-]{0,40}[\"']?\s{0,4}[:=]\s{0,4})"
            r"(?!bearer \*|basic \*)(\"[^\"]*\"?|'[^']*'?|[^\s,;&]+)"
        ),
        r"\1***",
    ),
    (re.compile(r"(?<=/)([0-9a-f]{64})/[A-Za-z0-9_-]{16,}"), r"\1/***"),  # a code of enrolment
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"), "*** key ***"),
    (re.compile(r"\b(?=[A-Za-z0-9+/_-]*[A-Z])(?=[A-Za-z0-9+/_-]*[a-z])[A-Za-z0-9+/_-]{40,}={0,2}"), "***"),
)
_MAX_KEY_LINES: Final = 120  # an RSA key of 8192 bits has 100. A begin without an end hides no more
_KEY_BEGIN, _KEY_END = "-----BEGIN ", "-----END "


class RecentLines(logging.Handler):
    """Stores the last `MAX_LINES` lines of the log, each truncated to 500 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Store a record. Each line of its traceback is stored as a separate line."""
        with contextlib.suppress(Exception):  # a malformed record must not end what it reports
            self.lines.extend(line[:_MAX_CHARS] for line in self.format(record).split("\n"))


def keep_lines() -> None:
    """Store the last lines of all loggers of this process from now on."""
    logging.getLogger().addHandler(RecentLines())


def read_recent(count: int) -> list[str]:
    """Return the last `count` lines, oldest first, or no lines if `keep_lines` was not called."""
    handlers = logging.getLogger().handlers
    lines = [line for handler in handlers if isinstance(handler, RecentLines) for line in handler.lines]
    return lines[-count:] if count else []


def read_journal(count: int) -> list[str]:
    """Return the last `count` journal lines of the service and the agent, or none without a journal."""
    if "JOURNAL_STREAM" not in os.environ:
        return []
    units = [f"--unit={unit}" for unit in _UNITS]
    command = ["journalctl", *units, f"--lines={count}", "--output=short-iso", "--no-pager", "--quiet"]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_JOURNAL_S, check=True)  # no shell
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.decode(errors="replace").splitlines()[-count:]


def mask_secrets(lines: Sequence[str]) -> list[str]:
    """Mask passwords, tokens, keys and control characters in lines, and truncate each to 500 characters."""
    masked, key_lines = [], 0
    for line in lines:
        if _KEY_BEGIN in line and "PRIVATE KEY" in line:
            key_lines = _MAX_KEY_LINES
        if key_lines:
            key_lines = 0 if _KEY_END in line else key_lines - 1
            masked.append("*** key ***")
            continue
        text = line[:_MAX_CHARS]
        for pattern, replacement in _MASKS:
            text = pattern.sub(replacement, text)
        masked.append(clean_line(text, _MAX_CHARS))
    return masked
