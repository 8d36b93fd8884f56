"""`edgekit-device offload`: what the offload planner asks of a device."""

import argparse
import sys

from edgekit_runtime.commands.command import Outcome


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of this group."""
    parser = commands.add_parser("offload", help="run models on this device, on a server, or split")
    parts = parser.add_subparsers(required=True, metavar="COMMAND")
    measuring = parts.add_parser(
        "measure",
        help="measure a model for `edgekit offload profile`",
        description="Read one job from the standard input, measure it here, and print the result as JSON.",
    )
    measuring.set_defaults(run=run_measure, json=True)


def run_measure(_: argparse.Namespace) -> Outcome:
    """Measure the job on the standard input."""
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.remote.measure import measure, read_job

    job, blobs = read_job(sys.stdin.buffer)
    return Outcome(to_plain(measure(job, blobs)), ())
