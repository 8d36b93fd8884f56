"""`edgekit-device metrics`."""

import argparse
from pathlib import Path

from edgekit_runtime.client.control import read_metrics
from edgekit_runtime.commands.command import Outcome
from edgekit_runtime.errors import TransportError
from edgekit_runtime.system.paths import find_running_service


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "metrics",
        help="show what the running service has counted",
        description="Print the metrics of the running service in Prometheus' text format, like GET /metrics.",
    )
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="socket of the service (default: the running one)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the metrics of the service.

    Raises:
        TransportError: no service runs, or it does not answer.
    """
    socket_path: Path | None = arguments.socket or find_running_service()
    if socket_path is None:
        raise TransportError("no service is running here; start one, or name its socket with --socket")
    text = read_metrics(socket_path)
    return Outcome({"metrics": text}, text.splitlines())
