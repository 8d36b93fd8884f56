"""How early a rollout stops a bad model, and how often a good one: simulated devices, the real decisions.

    PYTHONPATH=device_runtime:fleet:. .venv/bin/python -m benchmarks.fleet_gates [--seeds 10] [--json FILE]

Everything is simulated but the decisions. About 4 minutes of one core with 10 seeds; it stops after 600 s.
Beside ours stands the rule of hawkBit 0.9 as its documentation states it: a group stops when 5 % of *all its
devices* have failed to install, and is good when 95 % of them have succeeded; nothing is known of the model.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN, Simulation, simulate

from edgekit_fleet.rollouts.progress import Answered
from edgekit_fleet.rollouts.waves import DEFAULT_WAVES, default_minimum, plan_waves

FLEETS = (1_000, 10_000, 20_000)
CLEAN_RUNS, CLEAN_DEVICES = 200, 1_000
LIMIT_S = 600.0


def peer_exposure(run: Simulation, devices: int) -> int:
    """Return how many devices a group rule that knows only installs exposes to the model of `run`.

    The share of failed installs that our rollout saw is taken for that of the whole fleet.
    """
    outcomes = [entry.outcome for _, entry in run.log if isinstance(entry, Answered) and entry.outcome]
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
        entry.device for _, entry in run.log if isinstance(entry, Answered) and entry.outcome == "failed"
    }
    order, begin = list(run.progress.members), 0
    for end in plan_waves(DEFAULT_WAVES, devices, 1):
        if len(failed & set(order[begin:end])) >= 0.05 * (end - begin):
            return True
        begin = end
    return False


def run_clean(begin: float) -> dict[str, int]:
    """Return how rollouts of a clean release end, as counts."""
    counts = dict.fromkeys(("runs", "aborted", "paused", "finished", "peer_aborted"), 0)
    for seed in range(CLEAN_RUNS):
        if time.monotonic() - begin > LIMIT_S:
            break
        run = simulate(1_000 + seed, CLEAN_DEVICES, CLEAN)
        counts["runs"] += 1
        counts["aborted"] += run.progress.state == "aborted"
        counts["paused"] += run.progress.state == "paused"
        counts["finished"] += run.progress.state == "succeeded"
        counts["peer_aborted"] += peer_stops_clean(run, CLEAN_DEVICES)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin, rows = time.monotonic(), []
    print(
        f"{'model':24}{'devices':>8}{'aborted':>9}{'paused':>7}{'worst':>7}"
        f"{'share':>8}{'minutes':>9}{'peer rule':>11}"
    )
    for devices in FLEETS:
        for name, model in BAD_MODELS.items():
            if time.monotonic() - begin > LIMIT_S:
                sys.exit(f"stopped after {LIMIT_S:.0f} s; take fewer --seeds")
            runs = [simulate(seed, devices, model) for seed in range(options.seeds)]
            worst = max(run.exposed for run in runs)
            row = {
                "model": name,
                "devices": devices,
                "aborted": sum(run.progress.state == "aborted" for run in runs),
                "paused": sum(run.progress.state == "paused" for run in runs),
                "runs": len(runs),
                "minimum": default_minimum(devices),
                "mean_exposed": sum(run.exposed for run in runs) / len(runs),
                "worst_exposed": worst,
                "worst_share": worst / devices,
                "minutes": max(run.ended_at for run in runs) / 60,
                "peer_exposed": max(peer_exposure(run, devices) for run in runs),
            }
            rows.append(row)
            print(
                f"{name:24}{devices:8}{row['aborted']:6}/{len(runs)}{row['paused']:7}{worst:7}"
                f"{worst / devices:8.2%}{row['minutes']:9.1f}{row['peer_exposed']:11}"
            )
    clean = run_clean(begin)
    print(
        f"clean rollouts of {CLEAN_DEVICES} devices: {clean['aborted']} of {clean['runs']} stopped wrongly,"
        f" {clean['paused']} paused, {clean['finished']} finished; by the peer rule {clean['peer_aborted']}"
    )
    if options.json:
        options.json.write_text(json.dumps({"bad": rows, "clean": clean}, indent=1) + "\n")


if __name__ == "__main__":
    main()
