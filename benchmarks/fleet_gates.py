"""How early a rollout stops a bad model, and how often a good one: simulated devices, the real decisions.

    scripts/python -m benchmarks.fleet_gates [--seeds 10] [--json FILE]

Everything is simulated but the decisions. It takes some ten minutes of two cores with 10 seeds.
Beside ours stands the rule of hawkBit 0.9 as its documentation states it: a group stops when 5 % of *all its
devices* have failed to install, and is good when 95 % of them have succeeded; nothing is known of the model.
"""

import functools
import math
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import make_parser, write_json
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN, Model, Simulation, simulate

from edgekit_fleet.rollouts.progress import AnswerEntry
from edgekit_fleet.rollouts.waves import DEFAULT_WAVES, default_minimum, plan_waves

FLEETS = (1_000, 10_000, 20_000)
CLEAN_DEVICES = 1_000
TWELVE = "2 x latency, 1 of 12"  # models of the release


def peer_exposure(run: Simulation, devices: int) -> int:
    """Return how many devices a group rule that knows only installs exposes to the model of `run`.

    The share of failed installs that our rollout saw is taken for that of the whole fleet.
    """
    outcomes = [entry.outcome for _, entry in run.log if isinstance(entry, AnswerEntry) and entry.outcome]
    failed = outcomes.count("failed") / max(len(outcomes), 1)
    exposed = 0
    for end in plan_waves(DEFAULT_WAVES, devices, 1):
        group = end - exposed
        if failed > 0.05:  # stops inside the group, when 5 % of all of it have failed
            return exposed + min(math.ceil(0.05 * group / failed), group)
        exposed = end
    return exposed


def peer_stops_clean(run: Simulation, devices: int) -> bool:
    """Return whether a group rule would stop the rollout of `run`: 5 % of a group failed to install."""
    failed = {
        entry.device for _, entry in run.log if isinstance(entry, AnswerEntry) and entry.outcome == "failed"
    }
    order, begin = list(run.progress.members), 0
    for end in plan_waves(DEFAULT_WAVES, devices, 1):
        if len(failed & set(order[begin:end])) >= 0.05 * (end - begin):
            return True
        begin = end
    return False


@dataclass(frozen=True)
class Run:
    """How one simulated rollout ended; the last two by the rule of the peer."""

    state: str
    exposed: int
    ended_at: float
    peer_exposed: int
    peer_stopped: bool


def run_one(seed: int, devices: int, model: Model, others: int) -> Run:
    run = simulate(seed, devices, model, others=others)
    return Run(
        run.progress.state,
        run.exposed,
        run.ended_at,
        peer_exposure(run, devices),
        peer_stops_clean(run, devices),
    )


def run_bad(pool: Executor, devices: int, name: str, seeds: int) -> dict[str, Any]:
    others = 11 if name == TWELVE else 0
    model = BAD_MODELS["2 x latency" if name == TWELVE else name]
    of_seed = functools.partial(run_one, devices=devices, model=model, others=others)
    runs = list(pool.map(of_seed, range(seeds)))
    worst = max(run.exposed for run in runs)
    return {
        "model": name,
        "devices": devices,
        "aborted": sum(run.state == "aborted" for run in runs),
        "paused": sum(run.state == "paused" for run in runs),
        "runs": len(runs),
        "minimum": default_minimum(devices),
        "mean_exposed": sum(run.exposed for run in runs) / len(runs),
        "worst_exposed": worst,
        "worst_share": worst / devices,
        "minutes": max(run.ended_at for run in runs) / 60,
        "peer_exposed": max(run.peer_exposed for run in runs),
    }


def run_clean(pool: Executor, count: int) -> dict[str, int]:
    of_seed = functools.partial(run_one, devices=CLEAN_DEVICES, model=CLEAN, others=0)
    runs = list(pool.map(of_seed, range(1_000, 1_000 + count)))
    return {
        "runs": len(runs),
        "aborted": sum(run.state == "aborted" for run in runs),
        "paused": sum(run.state == "paused" for run in runs),
        "finished": sum(run.state == "succeeded" for run in runs),
        "peer_aborted": sum(run.peer_stopped for run in runs),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean", type=int, default=200, help="rollouts of a clean release")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(
        f"{'model':24}{'devices':>8}{'aborted':>9}{'paused':>7}{'worst':>7}"
        f"{'share':>8}{'minutes':>9}{'peer rule':>11}"
    )
    with ProcessPoolExecutor() as pool:
        for devices in FLEETS:
            for name in (*BAD_MODELS, TWELVE):
                row = run_bad(pool, devices, name, options.seeds)
                rows.append(row)
                print(
                    f"{name:24}{devices:8}{row['aborted']:6}/{row['runs']}{row['paused']:7}"
                    f"{row['worst_exposed']:7}{row['worst_share']:8.2%}{row['minutes']:9.1f}"
                    f"{row['peer_exposed']:11}",
                    flush=True,
                )
        clean = run_clean(pool, options.clean)
    print(
        f"clean rollouts of {CLEAN_DEVICES} devices: {clean['aborted']} of {clean['runs']} stopped wrongly,"
        f" {clean['paused']} paused, {clean['finished']} finished; by the peer rule {clean['peer_aborted']}"
    )
    write_json(options.json, {"bad": rows, "clean": clean})


if __name__ == "__main__":
    main()
