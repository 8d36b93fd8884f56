"""`edgekit-device pin MODEL`."""

import argparse

from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.commands.installed import add_arguments, open_slots


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "pin",
        help="keep a model at its active version, or stop that",
        description="Refuse to install other versions of a model until it is unpinned. If a pinned version"
        " fails its trial, the previous version comes back unpinned.",
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--off", action="store_true", help="accept new versions again")
    add_arguments(parser, switches=False)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    state = open_slots(arguments).pin(arguments.model, not arguments.off)
    message = "takes new versions" if state.pinned is None else f"stays at {state.pinned}"
    return Outcome({"model": state.model, "pinned": state.pinned}, [f"{state.model} {message}"])
