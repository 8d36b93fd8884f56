"""A device is killed, hangs, runs out of memory or loses its power: does the right version serve then?

    scripts/python -m benchmarks.hil_booted_events

On the bench arm64-booted (emulated; make its image first: `./edgekit hil image`). The events of
`edgekit_hil/tests/booted_machine.py` in turn, each from a snapshot; about 15 to 90 s each on two cores. Needs
mosquitto, for the updates by a fleet.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from benchmarks.results import make_parser, write_json

from edgekit_hil.benches.bench_file import find_bench
from edgekit_hil.benches.opening import open_bench
from edgekit_hil.tests.booted_machine import (
    EVENTS,
    FIRST,
    MODEL,
    SECOND,
    UPDATE_EVENTS,
    InterruptedUpdate,
    Outcome,
    ServiceMachine,
    try_event,
)
from edgekit_hil.tests.host_side import Fleet, HostSide
from edgekit_hil.tests.models import PackageMaker
from edgekit_runtime.errors import BenchError

ALL: Final = (*EVENTS, *UPDATE_EVENTS)


def run_events(names: Sequence[str], count: int, seconds: float) -> tuple[list[Outcome], list[str]]:
    """Return the outcomes of `count` events, and the messages of those after which nothing served."""
    outcomes, failures = [], []
    with contextlib.ExitStack() as held:
        bench = held.enter_context(open_bench(find_bench("arm64-booted")))
        maker = PackageMaker()
        target = bench.file.settings.target
        packages = {version: maker.make(MODEL, target, "ort", version) for version in (FIRST, SECOND)}
        machine = ServiceMachine(bench, packages, maker.public_key)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        fleet = Fleet(HostSide(bench), folder, maker.home)
        held.enter_context(fleet.up())
        updates = {
            name: InterruptedUpdate(fleet, packages[SECOND], target, interrupt)
            for name, interrupt in UPDATE_EVENTS.items()
        }
        events = {**EVENTS, **updates}
        end_s = time.monotonic() + seconds
        for number, event in enumerate(islice(cycle(names), count)):
            if time.monotonic() > end_s:
                break
            try:
                outcomes.append(try_event(machine, event, events[event], seed=number))
                print(f"{number + 1}: {outcomes[-1]}", file=sys.stderr, flush=True)
            except BenchError as error:
                failures.append(f"{event}: {error}")
                print(f"{number + 1}: {failures[-1]}", file=sys.stderr, flush=True)
    return outcomes, failures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=200, help="events; default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=14_400, help="begin none later; default: %(default)s"
    )
    parser.add_argument("--event", action="append", choices=ALL, metavar="NAME", help="default: all, in turn")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    outcomes, failures = run_events(arguments.event or ALL, arguments.count, arguments.seconds)
    print(
        "| event | times | right | in an installation or update | until it answers, s, at most"
        " | until systemd restarts it, s, at most |"
    )
    print("|---|---|---|---|---|---|")
    for event in ALL:
        of_event = [each for each in outcomes if each.event == event]
        if of_event:
            right = sum(each.is_right for each in of_event)
            restarts = [each.restart_s for each in of_event if each.restart_s is not None]
            restart = f"{max(restarts):.2f}" if restarts else "it was not to end, or booted"
            longest = max(each.seconds for each in of_event)
            middle = sum(each.expected.is_interrupted for each in of_event)
            print(f"| {event} | {len(of_event)} | {right} | {middle} | {longest:.0f} | {restart} |")
    print(*failures, sep="\n")
    write_json(arguments.json, [asdict(each) for each in outcomes])
    return 0 if outcomes and not failures and all(each.is_right for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
