"""How good is the governor's forecast of latency? Forecast over simulated 99th percentile, of every setting.

    scripts/python benchmarks/governor_forecast.py [--seconds 1500]
        [--seed 1]

A queue of its own, not the governor's: requests come evenly or at random, an engine takes what waits, up to a
batch, when the batch is full or the first request was held for long enough. Where the engine is busy for 92 %
of the time or more, the governor forecasts no latency, and nothing is shown.
"""

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median, quantiles
from typing import Final

from tests.runtime.power_device import make_profile

from edgekit_runtime.power.governor.forecast import Factor, Learned
from edgekit_runtime.power.governor.settings import Load, ModelSetting, Profile
from results import make_parser

# Deadline in seconds, scale of running times, requests a second.
_STREAMS: Final = (
    *((0.03, 0.4, rate_hz) for rate_hz in (10.0, 20.0)),
    *((0.1, 1.0, rate_hz) for rate_hz in (6.0, 12.0, 20.0, 30.0, 45.0)),
    (0.25, 1.0, 90.0),
)
_RANGES: Final = ((0.0, 0.3), (0.3, 0.6), (0.6, 0.92))  # share of the time for which the engine is busy
_OWN_PART: Final = 0.1  # of a full batch's time that a run takes however few requests are in it
_SPREAD: Final = 0.04  # of running times


@dataclass(frozen=True, slots=True)
class Lived:
    """What happened: 99th percentile and mean run, in seconds; share of the time; requests a run."""

    p99_s: float
    run_s: float
    busy: float
    fill: float


def live(arrivals: list[float], setting: ModelSetting, profile: Profile, chance: random.Random) -> Lived:
    hold_s = profile.hold_s if setting.batch > 1 else 0.0
    free_s, at, latencies, runs = 0.0, 0, [], []
    while at < len(arrivals):
        last = at + setting.batch - 1
        full_s = arrivals[last] if last < len(arrivals) else math.inf
        start_s = max(free_s, min(full_s, arrivals[at] + hold_s))
        end = at + 1
        while end < len(arrivals) and end - at < setting.batch and arrivals[end] <= start_s:
            end += 1
        part = _OWN_PART + (1 - _OWN_PART) * (end - at) / setting.batch
        runs.append(profile.costs[setting].latency_s * part * chance.lognormvariate(0, _SPREAD))
        free_s = start_s + runs[-1]
        latencies += [free_s - arrived_s for arrived_s in arrivals[at:end]]
        at = end
    return Lived(quantiles(latencies, n=100)[98], fmean(runs), sum(runs) / arrivals[-1], at / len(runs))


def arrive(rate_hz: float, seconds: float, chance: random.Random | None) -> list[float]:
    """Return when requests come: at random, or evenly where `chance` is None."""
    times, now_s = [], 0.0
    while now_s < seconds:
        now_s += 1 / rate_hz if chance is None else chance.expovariate(rate_hz)
        times.append(now_s)
    return times


def compare(seconds: float, seed: int) -> dict[tuple[bool, int, int], list[float]]:
    """Return forecast over lived p99, for each (at random, batch, number of the range of busy)."""
    ratios = defaultdict(list)
    for (deadline_s, scale, rate_hz), at_random in product(_STREAMS, (False, True)):
        profile = make_profile(deadline_s, scale)
        for setting in profile.costs:
            chance = random.Random(seed)  # noqa: S311  # a simulation, repeatable
            if rate_hz * profile.costs[setting].latency_s / setting.batch >= 1:
                continue  # never in time
            lived = live(arrive(rate_hz, seconds, chance if at_random else None), setting, profile, chance)
            stated_s = profile.of(setting, lived.fill).latency_s
            known = Learned(run=Factor(1.0, {setting: (lived.run_s / stated_s, 25.0)}))
            forecast = known.forecast(setting, Load(rate_hz, None, float(at_random)), profile)
            for number, (low, high) in enumerate(_RANGES):
                if low <= lived.busy < high and forecast.latency_s < math.inf:
                    ratios[at_random, setting.batch, number].append(forecast.latency_s / lived.p99_s)
    return ratios


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1500.0, help="simulated, of each setting")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    ratios = compare(arguments.seconds, arguments.seed)
    print("| requests | batch | engine busy under 30 % | 30 to 60 % | 60 to 92 % |\n|---|---|---|---|---|")
    for at_random, batch in sorted({key[:2] for key in ratios}):
        cells = []
        for number in range(len(_RANGES)):
            found = ratios[at_random, batch, number]
            cells.append(f"{min(found):.2f} / {median(found):.2f} / {max(found):.2f}" if found else "")
        print(f"| {'at random' if at_random else 'even'} | {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
