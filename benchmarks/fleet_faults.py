"""Kills, lost writes, full disks and torn files over every transition of the agent and of the manager.

    scripts/python -m benchmarks.fleet_faults [--limit-s 270]

Four parts, each with its share of the time; `--part NAME...` runs some of them.

- `journal`: the agent's journal and slots, in this process: a kill, a full disk, a failed call, and every
  state that a power cut may leave, at every step that changes the disk. Then a fresh process must start a
  whole signed model, and a sample of devices must reach what is wanted.
- `steps`: an agent and the processes of its steps, killed or failed at each of these, over real HTTPS.
- `manager`: the manager at each write, sync and rename of Python and SQLite, in every transition. Then it
  must start again, finish, and lead every device to what the store wants: see `tests/faults`.
- `torn`: each file of the manager's folder cut to half, or emptied. Then the manager must start, or say in a
  sentence what is damaged.

Faults are tried in a random order that is always the same, until the time is over.
"""

import contextlib
import gc
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from benchmarks.results import make_parser, write_json
from tests.faults import journal_faults, manager_faults, step_faults
from tests.faults.disk_calls import KINDS
from tests.faults.processes import Outcome
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as make_maker


@contextlib.contextmanager
def _open_nothing(maker: PackageMaker, _most: int | None) -> Iterator[PackageMaker]:
    yield maker


PARTS = {
    # name -> what opens its bench, which parts may share; what runs it there, and its share of the time
    "journal": (_open_nothing, journal_faults.run, 0.4),
    "steps": (_open_nothing, step_faults.run, 0.15),
    "manager": (manager_faults.open_bench, manager_faults.run, 0.4),
    "torn": (manager_faults.open_bench, manager_faults.run_torn, 0.05),
}
LIMIT_S = 900.0


def _print(part: str, outcome: Outcome, took_s: float) -> None:
    total, of = sum(outcome.counts.values()), f" of {outcome.all}" * bool(outcome.all)
    print(f"\n{part}: {total}{of} faults in {took_s:.0f} s, {len(outcome.wrong)} with a bad end")
    kinds = sorted({kind for _, kind in outcome.counts}, key=lambda one: (one not in KINDS, one))
    print(f"{'':28}" + "".join(f"{kind:>13}" for kind in kinds) + f"{'bad':>6}")
    for transition in dict.fromkeys(name for name, _ in sorted(outcome.counts)):
        bad = sum(name == transition for name, _, _ in outcome.wrong)
        cells = "".join(f"{outcome.counts[transition, kind]:13}" for kind in kinds)
        print(f"{transition:28}{cells}{bad:6}")
    for line in outcome.wrong[:10]:
        print(*line, sep=": ")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS), help="these only")
    parser.add_argument("--most", type=int, help="faults of a part")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    gc.freeze()  # modules stay out of collections, of which each fork would copy what they touch
    gc.set_threshold(20_000)
    maker, benches, outcomes = make_maker.__wrapped__(), {}, {}
    s_per_share = arguments.limit_s / sum(PARTS[part][-1] for part in arguments.part)
    with contextlib.ExitStack() as opened:
        for part in arguments.part:
            open_bench, run, share = PARTS[part]
            begin_s = time.monotonic()
            if open_bench not in benches:
                benches[open_bench] = opened.enter_context(open_bench(maker, arguments.most))
            outcomes[part] = run(benches[open_bench], s_per_share * share, arguments.most)
            _print(part, outcomes[part], time.monotonic() - begin_s)
    total = sum(sum(one.counts.values()) for one in outcomes.values())
    wrong = [line for one in outcomes.values() for line in one.wrong]
    print(f"\n{total} faults, {len(wrong)} with a bad end")
    rows = [[part, *key, n] for part, one in outcomes.items() for key, n in sorted(one.counts.items())]
    write_json(arguments.json, {"faults": rows, "wrong": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
