"""Makes untrusted text safe for a terminal, a log or a page."""

import logging
import unicodedata
from typing import Any, Final

_MAX_LOG_CHARS: Final = 4000


def clean(text: str) -> str:
    """Replace characters that control a terminal by U+FFFD. Line breaks and tabs are kept.

    Control characters would act as commands, bidirectional overrides would reorder the text, and lone
    surrogates (undecodable file names) cannot be written as UTF-8.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if _acts(char) else char for char in text)


def clean_line(text: str, max_chars: int = 500) -> str:
    """Return up to `max_chars` of an untrusted text, cleaned by `clean`, without line breaks and tabs."""
    return clean(text[:max_chars]).translate({ord("\n"): "\ufffd", ord("\t"): " "})


class LineFormatter(logging.Formatter):
    """Formats each record as one line, even with untrusted text in it. The traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name in `logging`
        return clean_line(super().formatMessage(record), _MAX_LOG_CHARS)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return clean(super().formatException(ei))


def log_lines(prefix: str = "") -> None:
    """Write warnings of all loggers to standard error after `prefix`, unless logging is configured."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(f"{prefix}%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


def _acts(char: str) -> bool:
    # The two joiners of U+200C and U+200D are part of words and of emoji.
    return unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and char not in "\n\t\u200c\u200d"
