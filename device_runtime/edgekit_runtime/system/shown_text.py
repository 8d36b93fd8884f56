"""Foreign text in a form for a terminal, a log or a page."""

import logging
import unicodedata
from typing import Any, Final

_MAX_LOG_CHARS: Final = 4000


def clean(text: str) -> str:
    """Return the text with U+FFFD for each character that acts on a terminal; line breaks and tabs stay.

    Control characters would reach a terminal as commands, bidirectional overrides would reorder what the
    reader sees, and lone surrogates (undecodable file names) cannot be written as UTF-8.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if _acts(char) else char for char in text)


def clean_line(text: str, max_chars: int = 500) -> str:
    """Return up to `max_chars` of a foreign text, cleaned by `clean`, and without line breaks and tabs."""
    return clean(text[:max_chars]).translate({ord("\n"): "\ufffd", ord("\t"): " "})


class LineFormatter(logging.Formatter):
    """Formats each record as one line, whatever foreign text it holds; its traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in `logging`
        return clean_line(super().formatMessage(record), _MAX_LOG_CHARS)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return clean(super().formatException(ei))


def log_lines(prefix: str = "") -> None:
    """Unless logging is set up, write warnings of all loggers to standard error behind `prefix`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"{prefix}%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _acts(char: str) -> bool:
    # The two joiners of U+200C and U+200D are part of words and of emoji.
    return unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and char not in "\n\t\u200c\u200d"
