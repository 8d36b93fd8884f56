"""The `edgekit` command line, which runs a command and turns errors into messages and exit codes.

Each command is a file in this folder that exposes `command`. Help, version and completion import no command,
so they answer at once. The exit codes are listed in `docs/reference/exit-codes.md`.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from edgekit_cli.lazy_commands import OrderedGroup, lazy_commands
from edgekit_runtime import __version__
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.system.shown_text import log_lines

INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it
CLOSED_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE
MAX_MESSAGE_CHARS = 2000  # a tensor's name may be longer
COMPLETION_VARIABLE = "_EDGEKIT_COMPLETE"  # set by the scripts that `edgekit completion` prints

# In the order of a first use. The text is what `edgekit --help` shows.
COMMANDS = {
    "package": "Turn a model into a signed package within a budget.",
    "targets": "List the targets, or show one.",
    "profile": "Measure a device, so that latency on it can be predicted.",
    "inspect": "Show the contents of a package.",
    "verify": "Check a package's format, digests and signature.",
    "run": "Run a verified package on its golden inputs or your own inputs.",
    "export": "Write a package for other tools: ONNX, LiteRT, Olive's model package, OCI.",
    "offload": "Split a model between device and server.",
    "fleet": "Manage devices and what they run.",
    "device": "Install edgekit on a device over ssh.",
    "hil": "Run the tests on a bench with a device, and keep the evidence.",
    "keys": "Make and list the keys that sign packages.",
    "completion": "Print the completion script of a shell.",
}


cli = OrderedGroup(
    "edgekit",
    commands=lazy_commands(COMMANDS, __package__),
    help="Package a trained model for a device, under its budget, with proof.",
    epilog="Exit codes: docs/reference/exit-codes.md. With --json, output and errors are for programs.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            help="Show the version and exit.",
            callback=lambda ctx, _, is_requested: _print_version(ctx) if is_requested else None,
        )
    ],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(ctx: click.Context) -> NoReturn:
    click.echo(f"edgekit {__version__}")
    ctx.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, print its errors, and return its exit code (`docs/reference/exit-codes.md`).

    Args:
        argv: The arguments without the program's name, or None for the arguments of the process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    log_lines()  # what devices and servers send stands in them
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be handled quietly
    except BrokenPipeError:
        # The reader (`| head`) has all it wants. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE_EXIT_CODE
    return code


def _run(arguments: list[str]) -> int:
    # Not `cli.main()`: it turns a closed pipe into exit code 1, which means an error of ours.
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return shell_complete(cli, {}, "edgekit", COMPLETION_VARIABLE, instruction)
    try:
        with cli.make_context("edgekit", arguments) as ctx:
            cli.invoke(ctx)
    except click.exceptions.Exit as request:
        return request.exit_code
    except EdgekitError as error:
        click.echo(f"edgekit: {_one_line(str(error))}", err=True)
        return _report(arguments, error, str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        return _report(arguments, error, error.format_message(), error.exit_code)
    except (KeyboardInterrupt, click.Abort) as error:
        click.echo("\ninterrupted", err=True)  # the line break closes the terminal's ^C
        return _report(arguments, error, "interrupted", INTERRUPTED_EXIT_CODE)
    return 0


def _one_line(message: str) -> str:
    """Return a message on one line, without control characters from untrusted names."""
    from edgekit_runtime.system.shown_text import clean
    from edgekit_toolkit.report.figures import shorten

    return shorten(" ".join(clean(message).split()), MAX_MESSAGE_CHARS)


def _report(arguments: list[str], error: BaseException, message: str, exit_code: int) -> int:
    """Print the error as JSON on stdout if `--json` was given, and return the exit code.

    The option is searched in the raw arguments, so that usage errors are also printed as JSON.
    """
    if "--json" in arguments:
        data = dict(vars(error)) if isinstance(error, EdgekitError) else {}
        data.pop("__notes__", None)
        body = {"type": type(error).__name__, "message": message, "exit_code": exit_code, **data}
        click.echo(json.dumps({"error": body}, default=str))
    return exit_code
