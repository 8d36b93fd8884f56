"""`edgekit-device tournament PACKAGE`."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit_runtime.commands.command import Outcome, count, report, seconds
from edgekit_runtime.errors import BackendError, OutputError

if TYPE_CHECKING:
    from edgekit_runtime.sessions.tournament import Entrant, Tournament

_logger = logging.getLogger(__name__)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of this command."""
    parser = commands.add_parser(
        "tournament",
        help="measure every engine of a package here and keep the fastest",
        description="Run the golden inputs of a package on each engine that it names and that is installed"
        " here, those of its variants included, in turn and in random order, in several processes, print the"
        " latencies, and keep the fastest for this package: from then on it is opened first. An engine that"
        " fails the self-test does not take part.",
    )
    parser.add_argument("package", type=Path, metavar="PACKAGE")
    parser.add_argument("--keys", type=Path, help="folder of trusted keys (default: your own)")
    parser.add_argument("--threads", type=count, help="of one inference (default: as the package says)")
    parser.add_argument("--seconds", type=seconds, default=60.0, help="to end within, nearly (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    """Hold the tournament and keep its winner."""
    from edgekit_runtime.archive import read_package
    from edgekit_runtime.sessions.preference import keep_winner
    from edgekit_runtime.sessions.tournament import hold_tournament
    from edgekit_runtime.signing import TrustStore, find_keys_folder

    path: Path = arguments.package
    keys: Path = find_keys_folder() if arguments.keys is None else arguments.keys
    with read_package(path, TrustStore.from_folder(keys)) as package:
        result = hold_tournament(
            package, keys, threads=arguments.threads, seconds=arguments.seconds, report=report
        )
        winner = result.winner
        if winner is None:
            reasons = "; ".join(f"{entrant.name}: {entrant.reason}" for entrant in result.entrants)
            raise BackendError(f"{path}: no engine of the package runs it here: {reasons}")
        try:
            kept = str(keep_winner(package.manifest, winner.setting.variant, winner.setting.place))
        except OutputError as cause:  # what was measured is worth printing all the same
            _logger.warning("the winner is not kept: %s", cause)
            kept = None
    return Outcome(_document(path, result, kept), _lines(result, kept))


def _document(path: Path, result: "Tournament", kept: str | None) -> dict[str, Any]:
    return {
        "package": str(path),
        "label": "measured",
        "on": "this machine",
        "engines": [_describe(entrant) for entrant in result.entrants],
        "winner": None if result.winner is None else result.winner.name,
        "as_fast": list(result.as_fast),
        "kept_in": kept,
    }


def _describe(entrant: "Entrant") -> dict[str, Any]:
    medians_s = () if entrant.latency is None else entrant.latency.seconds
    return {
        "name": entrant.name,
        "variant": entrant.setting.variant,
        "backend": entrant.choice.name,
        "artifact": entrant.choice.artifact,
        "reason": entrant.reason,
        "processes": len(medians_s),
        "median_ms": None if entrant.latency is None else entrant.latency.median_s * 1e3,
        "least_ms": min(medians_s) * 1e3 if medians_s else None,
        "greatest_ms": max(medians_s) * 1e3 if medians_s else None,
    }


def _lines(result: "Tournament", kept: str | None) -> Iterator[str]:
    width = max(len(entrant.name) for entrant in result.entrants)
    yield f"  {'engine':{width}}  median ms  from process to process"
    for entrant in result.entrants:
        if entrant.latency is None:
            yield f"  {entrant.name:{width}}  {entrant.reason}"
            continue
        medians_ms = [median_s * 1e3 for median_s in entrant.latency.seconds]
        median_ms = entrant.latency.median_s * 1e3
        spread = f"{min(medians_ms):.3f} to {max(medians_ms):.3f} in {len(medians_ms)}"
        yield f"  {entrant.name:{width}}  {median_ms:9.3f}  {spread}"
    if result.winner is not None:
        others = [name for name in result.as_fast if name != result.winner.name]
        alike = f"; {', '.join(others)} cannot be told from it" if others else ""
        yield f"  {'not kept' if kept is None else 'kept'}: {result.winner.name}{alike}"
