"""The `edgekit-device` command line: what a device does with a package on its own.

It uses nothing but the standard library, since a device has no more. Exit codes are those of `edgekit`, see
docs/exit-codes.md.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from edgekit_runtime import __version__
from edgekit_runtime.archive import read_package
from edgekit_runtime.errors import BackendError, EdgekitError, OutputError
from edgekit_runtime.sessions.preference import keep_winner
from edgekit_runtime.sessions.tournament import Entrant, Tournament, hold_tournament
from edgekit_runtime.signing import TrustStore, find_keys_folder

_INTERRUPTED_EXIT_CODE: Final = 130  # 128 + SIGINT, as shells report it

_logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; None takes those of the process.
    """
    arguments = _make_parser().parse_args(argv)
    logging.basicConfig(format="edgekit-device: %(message)s", level=logging.WARNING)
    try:
        document, lines = _hold(arguments.package, arguments.keys, arguments.threads)
    except EdgekitError as error:
        message = " ".join(str(error).split())
        print(f"edgekit-device: {message}", file=sys.stderr)
        if arguments.json:
            body = {"type": type(error).__name__, "message": message, "exit_code": error.exit_code}
            print(json.dumps({"error": body}))
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED_EXIT_CODE
    print(json.dumps(document, indent=2) if arguments.json else "\n".join(lines))
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("edgekit-device", description="What a device does with a package.")
    parser.add_argument("--version", action="version", version=f"edgekit-device {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tournament = commands.add_parser(
        "tournament",
        help="measure every engine of a package here and keep the fastest",
        description="Run the golden inputs of a package on each engine that it names and that is installed"
        " here, in turn and in random order, print the latencies, and keep the fastest for this package: from"
        " then on it is opened first. An engine that fails the self-test does not take part.",
    )
    tournament.add_argument("package", type=Path, metavar="PACKAGE")
    tournament.add_argument("--keys", type=Path, help="folder of trusted keys (default: your own)")
    tournament.add_argument("--threads", type=_count, help="of one inference (default: as the package says)")
    tournament.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return int(text)


def _hold(path: Path, keys: Path | None, threads: int | None) -> tuple[dict[str, Any], list[str]]:
    trust = TrustStore.from_folder(find_keys_folder() if keys is None else keys)
    with read_package(path, trust) as package:
        result = hold_tournament(package, threads=threads)
        winner = result.winner
        if winner is None:
            reasons = "; ".join(f"{entrant.name}: {entrant.reason}" for entrant in result.entrants)
            raise BackendError(f"{path}: no engine of the package runs it here: {reasons}")
        try:
            kept = str(keep_winner(package.manifest, winner))
        except OutputError as cause:  # what was measured is worth printing all the same
            _logger.warning("the winner is not kept: %s", cause)
            kept = None
    return _document(path, result, kept), list(_lines(result, kept))


def _document(path: Path, result: Tournament, kept: str | None) -> dict[str, Any]:
    return {
        "package": str(path),
        "label": "measured",
        "on": "this machine",
        "engines": [_describe(entrant) for entrant in result.entrants],
        "winner": None if result.verdict is None else result.verdict.winner,
        "as_fast": [] if result.verdict is None else list(result.verdict.tied),
        "kept_in": kept,
    }


def _describe(entrant: Entrant) -> dict[str, Any]:
    latency = entrant.latency
    lower_s, upper_s = (None, None) if latency is None else latency.quartiles_s
    return {
        "name": entrant.name,
        "backend": entrant.choice.name,
        "artifact": entrant.choice.artifact,
        "reason": entrant.reason,
        "rounds": 0 if latency is None else len(latency.seconds),
        "median_ms": None if latency is None else latency.median_s * 1e3,
        "lower_quartile_ms": None if lower_s is None else lower_s * 1e3,
        "upper_quartile_ms": None if upper_s is None else upper_s * 1e3,
    }


def _lines(result: Tournament, kept: str | None) -> Iterator[str]:
    width = max(len(entrant.name) for entrant in result.entrants)
    yield f"  {'engine':{width}}  median ms  quartiles ms"
    for entrant in result.entrants:
        if entrant.latency is None:
            yield f"  {entrant.name:{width}}  {entrant.reason}"
            continue
        lower_s, upper_s = entrant.latency.quartiles_s
        median_ms = entrant.latency.median_s * 1e3
        yield f"  {entrant.name:{width}}  {median_ms:9.3f}  {lower_s * 1e3:.3f} to {upper_s * 1e3:.3f}"
    if result.verdict is not None:
        others = [name for name in result.verdict.tied if name != result.verdict.winner]
        alike = f"; {', '.join(others)} cannot be told from it" if others else ""
        yield f"  {'not kept' if kept is None else 'kept'}: {result.verdict.winner}{alike}"


if __name__ == "__main__":
    sys.exit(main())
