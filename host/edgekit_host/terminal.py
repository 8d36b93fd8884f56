"""Prints text on a terminal, where untrusted text is never interpreted as markup or commands.

The output is also readable without colour and in a narrow window. Text that does not fit is wrapped, not cut.
"""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from edgekit_runtime.system.shown_text import clean

# Replacements of characters that a console may lack.
_ASCII = str.maketrans({"…": "~", "→": "->", "±": "+-"})
_INDENT = 2
_GAP = 2  # between columns


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the command line handle a closed pipe, because it has an exit code for that."""
        raise  # noqa: PLE0704 - rich calls this while it handles the BrokenPipeError


def open_console(*, stderr: bool = False) -> Console:
    """Return the console of standard output or standard error, without markup."""
    return _Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def is_ascii_only(console: Console) -> bool:
    """Return whether a console may not support characters beyond ASCII."""
    return not console.encoding.lower().startswith("utf")


def plain(value: object, console: Console) -> str:
    """Return untrusted text on one line, without control characters and unsupported characters."""
    text = " ".join(clean(str(value)).split())
    if is_ascii_only(console):
        text = text.translate(_ASCII)
    return text.encode(console.encoding, "replace").decode(console.encoding)


def print_line(
    console: Console, *parts: object | tuple[object, str] | Text, first_indent: int = 0, indent: int = 0
) -> None:
    """Print parts separated by spaces.

    Args:
        console: The console.
        parts: Untrusted texts, pairs of an untrusted text and its style, or trusted `Text`.
        first_indent: The indent of the first line, in cells.
        indent: The indent of the other lines, in cells.
    """
    pairs = [part if isinstance(part, (tuple, Text)) else (part, "") for part in parts]
    texts = [pair if isinstance(pair, Text) else Text(plain(pair[0], console), pair[1]) for pair in pairs]
    _print_wrapped(console, Text(" ").join(texts), first_indent, indent)


def print_section(console: Console, title: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Print a title above rows of untrusted texts in columns. Without rows nothing is printed.

    A row that is too long for the columns is printed as a line without columns. If this line is also too
    long, each text of the row is printed on a separate line, to avoid line breaks within a digest.
    """
    texts = [tuple(plain(value, console) for value in row) for row in rows]
    if not texts:
        return
    console.print()
    console.print(Text(title, "bold"))
    widths = _fit_columns(texts, console.width - _INDENT)
    for row in texts:
        cells = [
            set_cell_size(text, max(width, cell_len(text))) for text, width in zip(row, widths, strict=True)
        ]
        for line in ((" " * _GAP).join(cells).rstrip(), " ".join(row)):
            if _INDENT + cell_len(line) <= console.width:
                console.print(Text(" " * _INDENT + line), soft_wrap=True)
                break
        else:
            for depth, text in enumerate(row):
                indent = _INDENT * (1 + min(depth, 1))
                _print_wrapped(console, Text(text), indent, 2 * _INDENT)


def _fit_columns(rows: Sequence[tuple[str, ...]], width: int) -> list[int]:
    """Return column widths with which as many rows as possible fit on one line, shortest first."""
    widths = [0] * len(rows[0])
    for row in sorted(rows, key=lambda row: sum(map(cell_len, row))):
        wider = [max(width, cell_len(text)) for width, text in zip(widths, row, strict=True)]
        if sum(wider) + _GAP * (len(wider) - 1) > width:
            break
        widths = wider
    return widths


def _print_wrapped(console: Console, text: Text, first_indent: int, indent: int) -> None:
    width = console.width - max(first_indent, indent)
    for number, line in enumerate(text.wrap(console, max(1, width), overflow="fold")):
        line.rstrip()
        console.print(Text(" " * (indent if number else first_indent)) + line, soft_wrap=True)
