"""The service that `edgekit offload serve` becomes, as a copy of a process, see `tests.fork_server`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fork_server import runtime_server
from tests.service.serve_parts import environment
from tests.waiting import bounded

from edgekit_cli.cli import cli


@contextlib.contextmanager
def serving(folder: Path, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Run the command in this process until it becomes the service; yield the service.

    Args:
        folder: home of the service.
        arguments: of the command.
    """
    words = [str(argument) for argument in arguments]
    services: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", lambda _path, command: services.append(command))
        CliRunner().invoke(cli, ["offload", "serve", *words], catch_exceptions=False, standalone_mode=False)
    (command,) = services
    config = next(Path(word) for word in command if word.startswith("/proc/self/fd/"))
    descriptor = int(config.name)
    assert os.get_inheritable(descriptor)
    try:
        process = runtime_server().popen(
            [sys.executable, *command[1:]],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(folder),
            pass_fds=[descriptor],
        )
    finally:
        os.close(descriptor)
    with bounded(process):
        yield process
