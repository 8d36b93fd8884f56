"""`edgekit-device install PACKAGE`."""

import argparse
from pathlib import Path

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import add_arguments, open_slots, switch
from edgekit_runtime.sessions.backends import check_engines
from edgekit_runtime.slots import UNPROVEN, Permissions


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "install",
        help="verify a package and make it the active version of its model",
        description="Verify a package, write it to the slot that is not in use, and make it the active"
        " version of its model in one step. A running service switches to it. It is on trial until the"
        " service confirms it. If it fails its self-test or is started too often, the previous version comes"
        " back.",
    )
    parser.add_argument("package", type=Path, metavar="PACKAGE")
    parser.add_argument("--pin", action="store_true", help="stay at this version from now on")
    parser.add_argument(
        "--factory",
        action="store_true",
        help="install it as the factory package, which always remains",
    )
    parser.add_argument(
        "--allow-downgrade",
        action="store_true",
        help="install it although it is older than the active version",
    )
    parser.add_argument(
        "--allow-plain",
        action="store_true",
        help="install it although it is not encrypted and an installed version is",
    )
    parser.add_argument(
        "--retry", action="store_true", help="install it although this version was rejected on this device"
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Install the package. If it becomes the active version, make a running service switch to it."""
    slots = open_slots(arguments)
    allowed = Permissions(
        pin=arguments.pin,
        downgrade=arguments.allow_downgrade,
        retry=arguments.retry,
        plain=arguments.allow_plain,
    )
    receipt = slots.install(arguments.package, allowed, factory=arguments.factory, check=check_engines)
    switched = receipt.active and switch(arguments, slots, receipt.model)
    current = slots.load(receipt.model).state.current
    on_trial = receipt.active and current is not None and current.health == UNPROVEN
    document = {
        "model": receipt.model,
        "version": receipt.version,
        "active": receipt.active,
        "on_trial": on_trial,
        "pinned": receipt.state.pinned,
        "switched": switched,
    }
    role = "active" if receipt.active else "installed as the factory package"
    lines = [f"{receipt.model} {receipt.version} is {role}{', on trial' if on_trial else ''}"]
    if receipt.active and not switched:
        lines.append("  no service is running; it is opened at the next start")
    return Outcome(document, lines)
