"""Foreign text in a form for a terminal or a page."""

import unicodedata


def clean(text: str) -> str:
    """Return the text without characters that act instead of being displayed.

    Control characters would reach a terminal as commands, bidirectional overrides would reorder what the
    reader sees, and lone surrogates (undecodable file names) cannot be written as UTF-8.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if _acts(char) else char for char in text)


def _acts(char: str) -> bool:
    # The two joiners of U+200C and U+200D are part of words and of emoji.
    return unicodedata.category(char) in {"Cc", "Cf", "Cs"} and char not in "\n\t\u200c\u200d"
