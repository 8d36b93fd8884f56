"""`edgekit-device tournament PACKAGE`, for a package file or an installed model."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit_runtime.commands.command import Outcome, count, report
from edgekit_runtime.commands.installed import find_keys
from edgekit_runtime.commands.measuring import add_arguments, keep, open_package
from edgekit_runtime.errors import BackendError

if TYPE_CHECKING:
    from edgekit_runtime.autotune.tournament import Entrant, Tournament


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tournament",
        help="measure every engine of a package here and keep the fastest",
        description="Run the golden inputs of a package on each installed engine of the package and its"
        " variants, in random order and in several processes. Print the latencies, and keep the fastest for"
        " this package, so that it is opened first. An engine that fails the self-test does not take part.",
    )
    parser.add_argument(
        "--threads", type=count, help="threads of one inference (default: as the package says)"
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    from edgekit_runtime.autotune.tournament import hold_tournament
    from edgekit_runtime.sessions.local_results import keep_winner

    with open_package(arguments) as package:
        result = hold_tournament(
            package,
            find_keys(arguments),
            threads=arguments.threads,
            seconds=arguments.seconds,
            report=report,
        )
        winner = result.winner
        if winner is None:
            reasons = "; ".join(f"{entrant.name}: {entrant.reason}" for entrant in result.entrants)
            raise BackendError(f"{package.path}: no engine of the package runs it here: {reasons}")
        setting = winner.setting
        saved_in = keep(lambda: keep_winner(package.manifest, setting.variant, setting.chain_index))
    return Outcome(_document(package.path, result, saved_in), _lines(result, saved_in))


def _document(path: Path, result: "Tournament", saved_in: str | None) -> dict[str, Any]:
    return {
        "package": str(path),
        "label": "measured",
        "on": "this machine",
        "engines": [_describe(entrant) for entrant in result.entrants],
        "winner": None if result.winner is None else result.winner.name,
        "as_fast": list(result.as_fast),
        "kept_in": saved_in,
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


def _lines(result: "Tournament", saved_in: str | None) -> Iterator[str]:
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
        yield f"  {'not kept' if saved_in is None else 'kept'}: {result.winner.name}{alike}"
