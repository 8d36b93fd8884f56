"""The interface of a command of `edgekit-device`, and checks of arguments for several commands."""

import argparse
import sys
from collections.abc import Iterable
from typing import Any, Final, Protocol

from edgekit_runtime.records import dataclass
from edgekit_runtime.system.shown_text import clean_line

_MAX_NUMBER: Final = 1e12  # products of such numbers are finite, too


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a command.

    Attributes:
        document: the result as one object, for `--json`.
        lines: the result as text.
        has_ended: whether all threads have ended. If not, the process ends without waiting for them.
    """

    document: dict[str, Any]
    lines: Iterable[str]
    exit_code: int = 0
    has_ended: bool = True


class Command(Protocol):
    def add_parser(self, commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
        """Add the parser of the command, and set its default `run` to the function that runs the command.

        That function returns an `Outcome`, or raises an `EdgekitError`.
        """


def count(text: str) -> int:
    """Parse a whole number of at least 1, for `type=` of an argument."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Parse a number of seconds, more than 0 and at most a day, for `type=` of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r}, expected seconds over 0, at most 86400")
    return number


def positive(text: str) -> float:
    """Parse a number, more than 0 and at most 10^12, for `type=` of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number over 0, at most {_MAX_NUMBER:g}")
    return number


def report(line: str) -> None:
    """Print a line about the progress of a command to standard error."""
    print(f"edgekit-device: {clean_line(line)}", file=sys.stderr, flush=True)
