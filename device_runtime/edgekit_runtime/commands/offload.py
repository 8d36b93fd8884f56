"""`edgekit-device offload`: measures models for the offload planner, and configures the server."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.commands.command import Outcome, seconds
from edgekit_runtime.errors import ConfigError

_MOST_MEGABYTES: Final = 1e6


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("offload", help="run models on this device, on a server, or split")
    parts = parser.add_subparsers(required=True, metavar="COMMAND")
    measuring = parts.add_parser(
        "measure",
        help="measure a model for `edgekit offload profile`",
        description="Read one job from the standard input, measure it here, and print the result as JSON.",
    )
    measuring.set_defaults(run=run_measure, json=True)
    server = parts.add_parser("server", help="set the server that this device may use")
    server.add_argument("url", metavar="URL", help="such as https://edge-box:8443")
    server.add_argument("--token-file", metavar="FILE", help="file with the token of the server")
    server.add_argument("--ca-file", metavar="FILE", help="PEM file of the authority of its certificate")
    server.add_argument(
        "--insecure",
        action="store_true",
        help="allow plain HTTP to another machine. Anybody on the way can read the application's data, and"
        " answer with wrong numbers. A token is never sent over plain HTTP",
    )
    server.add_argument("--prefer", choices=("latency", "energy"), help="(default: as the package says)")
    server.add_argument("--deadline", type=seconds, metavar="S", help="latency that is good enough")
    server.add_argument(
        "--probe-limit",
        type=_megabytes,
        metavar="MB",
        help="limit of probes of a metered link per hour, 0 for no probes (default: no limit)",
    )
    server.add_argument("--plan", metavar="NAME", help="always run this plan, to debug it (default: choose)")
    server.add_argument("--json", action="store_true", help="print one JSON object")
    server.set_defaults(run=run_server)
    off = parts.add_parser("off", help="run everything on this device. Open sessions go on")
    off.add_argument("--json", action="store_true", help="print one JSON object")
    off.set_defaults(run=run_off)
    status = parts.add_parser("status", help="show which plan each session runs, and why")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=run_status)


def run_measure(_: argparse.Namespace) -> Outcome:
    """Measure the job that is read from the standard input."""
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.offload.measurement.job import read_job
    from edgekit_runtime.offload.measurement.job_runner import measure

    job, blobs = read_job(sys.stdin.buffer)
    return Outcome(to_plain(measure(job, blobs)), ())


def run_server(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options

    options = OffloadOptions(
        arguments.url,
        _absolute(arguments.token_file),
        _absolute(arguments.ca_file),
        arguments.prefer,
        arguments.deadline,
        probe_bytes_per_hour=arguments.probe_limit,
        plan=arguments.plan,
        insecure=arguments.insecure,
    )
    options.read_token()
    path = write_offload_options(options)
    document = {"server": options.server, "file": str(path)}
    return Outcome(document, [f"packages with a cut table use {options.server} from their next start"])


def run_off(_: argparse.Namespace) -> Outcome:
    """Remove the server. Models run on this device from their next start."""
    from edgekit_runtime.offload.offload_options import write_offload_options

    path = write_offload_options(None)
    return Outcome({"server": None, "file": str(path)}, ["models run on this device from their next start"])


def run_status(_: argparse.Namespace) -> Outcome:
    """Return the sessions that offload, and the configured server."""
    from edgekit_runtime.offload.offload_options import read_offload_options
    from edgekit_runtime.offload.offload_status import read_statuses

    options, fault = None, ""
    try:
        options = read_offload_options()
        if options is not None:
            options.read_token()
    except ConfigError as cause:
        fault = str(cause)
    sessions = read_statuses()
    server = None if options is None else options.server
    lines = [line for session in sessions for line in _describe(session)]
    lines.append(f"server for packages that this user starts now: {server or 'none'}")
    if fault:
        lines.append(f"  it cannot be used, so they run on this device: {fault}")
    return Outcome({"server": server, "fault": fault, "sessions": sessions}, lines)


def _describe(session: dict[str, Any]) -> Iterator[str]:
    where = (
        "on this device" if session["plan"] == "local" else f"as {session['plan']} with {session['server']}"
    )
    yield f"{session['model']} (process {session['process']}) runs {where}: {session['reason']}"
    if session["up_bits_per_s"] is not None and session["rtt_s"] is not None:
        rates = [f"{session['up_bits_per_s'] / 1e6:.3g} Mbit/s up"]
        if session["down_bits_per_s"] is not None:
            rates.append(f"{session['down_bits_per_s'] / 1e6:.3g} Mbit/s down")
        yield f"  link: {', '.join(rates)}, round trip {session['rtt_s'] * 1e3:.3g} ms"
    counts = session["counts"]
    yield (
        f"  requests: {counts['local']} here, {counts['remote']} with the server; {counts['hedged']} replies"
        f" were late, {counts['failed']} failed"
    )
    if uncoded := counts.get("uncoded"):
        yield f"  {uncoded} requests had values that the plan cannot send, and went another way"
    if session["device"]:
        yield f"  {session['device']}"
    for switch in session["switches"]:
        yield f"  switched to {switch}"


def _megabytes(text: str) -> float:
    """Return the bytes in `text`, which has megabytes, for `type=` of an argument."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MOST_MEGABYTES:
        raise argparse.ArgumentTypeError(f"{text!r}, expected megabytes from 0 to {_MOST_MEGABYTES:g}")
    return number * 1e6


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())
