"""`edgekit-device rollback MODEL`."""

import argparse

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import add_arguments, open_slots, switch


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "rollback",
        help="go back to the previous version of a model",
        description="Make the previous version of a model the active one, else its factory package. A"
        " running service switches to it. The version that was active counts as rejected, and comes back"
        " only with 'install --retry'.",
    )
    parser.add_argument("model", metavar="MODEL")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Roll the model back, and make a running service switch."""
    slots = open_slots(arguments)
    state = slots.rollback(arguments.model)
    version = None if state.current is None else state.current.version
    switched = switch(arguments, slots, arguments.model)
    lines = [f"{arguments.model} is back at {version}"]
    if not switched:
        lines.append("  no service is running; it is opened at the next start")
    return Outcome({"model": arguments.model, "version": version, "switched": switched}, lines)
