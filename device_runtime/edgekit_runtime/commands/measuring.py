"""Arguments and results of the commands that measure a package: `tournament` and `tune`."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from edgekit_runtime.commands import installed
from edgekit_runtime.commands.command import seconds
from edgekit_runtime.errors import OutputError
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.trust.trust_store import TrustStore

_logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to measure, and for how long."""
    parser.add_argument(
        "package",
        metavar="PACKAGE",
        help="a file, or the name of an installed model, for the version that the service opens next",
    )
    parser.add_argument(
        "--seconds", type=seconds, default=60.0, help="time limit, kept approximately (default: 60)"
    )
    installed.add_arguments(parser, switches=False)


def open_package(arguments: argparse.Namespace) -> OpenedPackage:
    """Return the verified package that the arguments name. The caller closes it.

    Raises:
        PackageError: the file is refused. The subclass states the reason.
        SlotError: there is neither a file nor an installed model with this name.
    """
    named: str = arguments.package
    if Path(named).name != named or named.endswith(".edgepkg") or Path(named).is_file():
        return read_package(Path(named), TrustStore.from_folder(installed.find_keys(arguments)))
    return installed.open_slots(arguments).choose(named).package


def keep(write: Callable[[], Path]) -> str | None:
    """Store a result with `write`, and return its path. After an error, log the error and return None."""
    try:
        return str(write())
    except OutputError as cause:
        _logger.warning("the result is not kept: %s", cause)
        return None
