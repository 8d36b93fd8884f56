"""Printing text on a terminal, much of it foreign: it is shown as it is, never as markup or commands.

The output reads the same without colour and in a narrow window: what does not fit is folded, not cut.
"""

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from edgekit_toolkit.report.figures import clean

_INDENT = 2


def open_console() -> Console:
    """Return the console of the standard output, which takes nothing for markup."""
    return Console(markup=False, highlight=False, emoji=False)


def plain(value: object, console: Console) -> str:
    """Return foreign text on one line, without characters that act or that the console cannot show."""
    text = " ".join(clean(str(value)).split())
    return text.encode(console.encoding, "replace").decode(console.encoding)


def print_line(console: Console, *parts: object | tuple[object, str], indent: int = 0) -> None:
    """Print parts with blanks between them, each a foreign text or a pair of it and a style.

    Args:
        console: where to print.
        parts: what to print.
        indent: of the lines after the first, in cells.
    """
    pairs = [part if isinstance(part, tuple) else (part, "") for part in parts]
    text = Text(" ").join(Text(plain(value, console), style) for value, style in pairs)
    _print_wrapped(console, text, 0, indent)


def print_section(console: Console, title: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Print a title over rows of foreign texts: in columns where these fit, else each text on its own line.

    Nothing is printed when there are no rows.
    """
    texts = [[plain(value, console) for value in row] for row in rows]
    if not texts:
        return
    console.print()
    console.print(Text(title, "bold"))
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    for gap in (2, 1):
        if _INDENT + gap * (len(widths) - 1) + sum(widths) <= console.width:
            for row in texts:
                cells = [set_cell_size(text, width) for text, width in zip(row, widths, strict=True)]
                console.print(Text(" " * _INDENT + (" " * gap).join(cells).rstrip()), soft_wrap=True)
            return
    for first, *others in texts:  # so that a digest stays in one piece
        _print_wrapped(console, Text(first), _INDENT, 2 * _INDENT)
        for text in others:
            _print_wrapped(console, Text(text), 2 * _INDENT, 2 * _INDENT)


def _print_wrapped(console: Console, text: Text, first_indent: int, indent: int) -> None:
    width = console.width - max(first_indent, indent)
    for number, line in enumerate(text.wrap(console, max(1, width), overflow="fold")):
        line.rstrip()
        console.print(Text(" " * (indent if number else first_indent)) + line, soft_wrap=True)
