"""Runs one command of the command line, for the tests of it."""

from collections.abc import Callable

import click
from click.testing import CliRunner, Result


def invoker(command: click.Command) -> Callable[..., Result]:
    """Return a function that runs `command`; errors of ours are raised, and arguments may be of any type."""

    def invoke(*arguments: object, charset: str = "utf-8") -> Result:
        texts = [str(argument) for argument in arguments]
        return CliRunner(charset=charset).invoke(command, texts, catch_exceptions=False)

    return invoke
