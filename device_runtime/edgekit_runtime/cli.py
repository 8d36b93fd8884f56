"""The `edgekit-device` command line.

The module uses only the standard library. The exit codes are the same as those of `edgekit`, see
docs/reference/exit-codes.md.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Final

from edgekit_runtime import __version__
from edgekit_runtime.commands.command import Command, Outcome
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.system.own_process import end_now, open_standard_descriptors
from edgekit_runtime.system.shown_text import clean, log_lines

_COMMANDS: Final = (
    "keys",
    "install",
    "serve",
    "stream",
    "status",
    "rollback",
    "pin",
    "tournament",
    "tune",
    "metrics",
    "sensors",
    "offload",
    "enroll",
    "agent",
    "fleet",
    "samples",
)  # modules of `commands`
_INTERRUPTED_EXIT_CODE: Final = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, or end the process with it if threads are still running.

    `argv` are the arguments after the program's name, by default those of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    arguments = _make_parser(words).parse_args(words)
    open_standard_descriptors()
    log_lines("edgekit-device: ")
    try:
        outcome: Outcome = arguments.run(arguments)
    except EdgekitError as error:
        message = " ".join(clean(str(error)).split())
        print(f"edgekit-device: {message}", file=sys.stderr)
        if arguments.json:
            body = {"type": type(error).__name__, "message": message, "exit_code": error.exit_code}
            print(json.dumps({"error": body}))
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED_EXIT_CODE
    print(json.dumps(outcome.document, indent=2) if arguments.json else clean("\n".join(outcome.lines)))
    if not outcome.has_ended:
        end_now(outcome.exit_code)
    return outcome.exit_code


def _make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that `words` begin with, or of all where that is none.

    Each command imports what it needs, and other commands must not delay the start of the service.
    """
    parser = argparse.ArgumentParser("edgekit-device", description="What a device does with packages.")
    parser.add_argument("--version", action="version", version=f"edgekit-device {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in [words[0]] if words and words[0] in _COMMANDS else _COMMANDS:
        command: Command = importlib.import_module(f"edgekit_runtime.commands.{name}")
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
