"""Does the governor hold its limits, and what does that cost? On a simulated device, not a real one.

    PYTHONPATH=device_runtime:toolkit:. .venv/bin/python benchmarks/governor.py [--only NAME ...] [--all]
        [--seeds 3] [--first-seed 0] [--json FILE] [--plot FILE.svg]

Each scenario runs once a seed under the governor and under every fixed setting. The device is
`tests/runtime/power_device.py`: its settings draw 20 % more than stated on average and each by its own
share, a run's time varies, power grows with temperature, clocks fall above 80 C, the sensors are noisy. What
is shown is what the device did, not what its sensors said:

- limit error: of power, the worst 30 s mean over the limit and under it (under: only where a more accurate
  setting was given up for the limit in more than a quarter of it); of temperature, the worst second; of a
  battery, energy used to energy allowed. "steady" leaves out the first 60 s and 60 s after a step of limit or
  load, "worst" leaves out nothing.
- in time: answered before the deadline, of all requests; what was shed counts as missed.
- accuracy: mean of the answers, those of variants as stated.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.runtime.power_device import Device, Second, World, drive, make_profile

from edgekit_runtime.power.governor import Governor
from edgekit_runtime.power.settings import BatteryLimit, Decision, Limits, Profile, Setting
from governor_plot import draw

_WINDOW_S, _SETTLE_S = 30, 60


@dataclass(frozen=True)
class Scenario:
    """One thing that happens to a device; `limits` is time -> limits."""

    name: str
    world: World
    limits: Callable[[float], Limits]
    seconds: int = 900
    steps_s: tuple[int, ...] = (0,)


@dataclass
class Run:
    """Figures of one run; limit errors are shares of the limit, None where they do not apply."""

    what: str
    steady_over: float
    steady_under: float | None
    worst_over: float
    in_time: float
    accuracy: float
    shed: float
    changes: int = 0
    power_w: list[float] = field(default_factory=list, repr=False)
    temperature_c: list[float] = field(default_factory=list, repr=False)

    @property
    def holds(self) -> bool:
        """Whether the limit holds within 5 % once steady, and 99 of 100 requests are in time."""
        return self.steady_over <= 0.05 and self.in_time >= 0.99


def cap(watts: float, deadline_s: float = 0.05) -> Limits:
    return Limits(power_w=watts, deadline_s=deadline_s)


SCENARIOS = (
    Scenario("power cap", World(), lambda _t: cap(6.0)),
    Scenario(
        "power cap steps",
        World(),
        lambda t: cap(8.0 if t < 300 else 5.0 if t < 600 else 7.0),
        steps_s=(0, 300, 600),
    ),
    Scenario(
        "heat wave",
        World(ambient_c=lambda t: 25.0 if t < 300 else 45.0),
        lambda _t: Limits(temperature_c=70.0, deadline_s=0.05),
        seconds=1500,
    ),
    Scenario(
        "battery floor",
        World(battery_j=13_500.0, charge=0.6),
        lambda _t: Limits(battery=BatteryLimit(0.2, 900.0), deadline_s=0.05),
    ),
    Scenario("noisy sensor", World(noise=0.1, spikes=0.02), lambda _t: cap(6.0)),
    Scenario(
        "sensor dropout",
        World(dropout=lambda t: 200 <= t < 500, ambient_c=lambda t: 25.0 if t < 300 else 35.0),
        lambda _t: cap(6.0),
    ),
    Scenario(
        "load steps, at random",
        World(rate_hz=lambda t: 15.0 if t < 300 else 45.0 if t < 600 else 25.0, poisson=True, deadline_s=0.1),
        lambda _t: cap(6.0, 0.1),
        steps_s=(0, 300, 600),
    ),
    Scenario(
        "crowd, batches pay",
        World(rate_hz=lambda _t: 90.0, poisson=True, deadline_s=0.25),
        lambda _t: cap(6.5, 0.25),
    ),
    Scenario("cap under what any setting needs", World(), lambda _t: cap(3.2)),
)


def live(
    scenario: Scenario, profile: Profile, seed: int, setting: Setting | None
) -> tuple[list[Second], list[Decision]]:
    """Run a scenario under the governor, or under one fixed setting."""
    with tempfile.TemporaryDirectory() as folder:
        device = Device(Path(folder), scenario.world, profile, seed)
        if setting is None:
            governor = Governor(profile, scenario.limits(0.0))
            return drive(device, governor, scenario.seconds, scenario.limits)
        decision = Decision(setting)
        return [device.step(decision) for _ in range(scenario.seconds)], [decision] * scenario.seconds


def judge(scenario: Scenario, what: str, lived: Sequence[Second], decisions: Sequence[Decision]) -> Run:
    """Return the figures of one run."""
    steady = [
        second
        for second in range(scenario.seconds)
        if all(not 0 <= second - step < _SETTLE_S for step in scenario.steps_s)
    ]
    over, under = _errors(scenario, lived, decisions)
    answered, late, shed = (sum(getattr(one, name) for one in lived) for name in ("answered", "late", "shed"))
    came = answered + shed
    calm = [over[second] for second in steady if over[second] is not None]
    below = [under[second] for second in steady if under[second] is not None]
    return Run(
        what,
        max(calm),
        min(below, default=None),
        max(value for value in over if value is not None),
        (answered - late) / came,
        sum(one.accuracy * one.answered for one in lived) / max(1, answered),
        shed / came,
        sum(one.setting != other.setting for one, other in pairwise(decisions)),
        [one.power_w for one in lived],
        [one.temperature_c for one in lived],
    )


def _errors(
    scenario: Scenario, lived: Sequence[Second], decisions: Sequence[Decision]
) -> tuple[list[float | None], list[float | None]]:
    """Errors over and under the limit at each second, None where there is no such error."""
    first = scenario.limits(0.0)
    count = len(lived)
    if first.temperature_c is not None:
        ratio = [one.temperature_c / first.temperature_c - 1 for one in lived]
        reached = next((second for second, value in enumerate(ratio) if value > -0.02), count)
        bound = [second >= reached and bool(decisions[second].reason) for second in range(count)]
        return list(ratio), [value if tied else None for value, tied in zip(ratio, bound, strict=True)]
    if first.battery is not None:
        allowed_j = (scenario.world.charge - first.battery.floor) * (scenario.world.battery_j or 0.0)
        error = sum(one.power_w for one in lived) / allowed_j - 1
        return [None] * (count - 1) + [error], [None] * (count - 1) + [error]
    over: list[float | None] = [None] * count
    under: list[float | None] = [None] * count
    for end in range(_WINDOW_S, count + 1):
        window = range(end - _WINDOW_S, end)
        limit_w = sum(scenario.limits(float(second)).power_w or 0.0 for second in window)
        over[end - 1] = sum(lived[second].power_w for second in window) / limit_w - 1
        if sum(bool(decisions[second].reason) for second in window) > _WINDOW_S / 4:
            under[end - 1] = over[end - 1]
    return over, under


def mean_of(runs: Sequence[Run]) -> Run:
    """The worst limit errors and the mean of the rest, over seeds."""
    unders = [run.steady_under for run in runs if run.steady_under is not None]
    count = len(runs)
    return Run(
        runs[0].what,
        max(run.steady_over for run in runs),
        min(unders, default=None),
        max(run.worst_over for run in runs),
        min(run.in_time for run in runs),
        sum(run.accuracy for run in runs) / count,
        sum(run.shed for run in runs) / count,
        round(sum(run.changes for run in runs) / count),
        runs[0].power_w,
        runs[0].temperature_c,
    )


def compare(scenario: Scenario, seeds: Sequence[int]) -> tuple[Run, list[Run]]:
    """Return the governor's figures and those of every fixed setting, best first."""
    profile = make_profile()

    def runs(setting: Setting | None) -> Run:
        name = (
            "governor"
            if setting is None
            else f"{setting.variant} x{setting.batch}, {setting.threads} threads"
        )
        return mean_of([judge(scenario, name, *live(scenario, profile, seed, setting)) for seed in seeds])

    fixed = sorted((runs(setting) for setting in profile.costs), key=lambda run: (-run.holds, -run.accuracy))
    return runs(None), fixed


def line(run: Run) -> str:
    under = "" if run.steady_under is None else f"{run.steady_under:+.1%}"
    return (
        f"| {run.what} | {run.steady_over:+.1%} | {under} | {run.worst_over:+.1%} | {run.in_time:.2%} |"
        f" {run.accuracy:.4f} | {run.shed:.1%} | {run.changes} | {'yes' if run.holds else 'no'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--all", action="store_true", help="print every fixed setting")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="power and temperature of all scenarios, as SVG")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    kept: list[tuple[Scenario, Run, list[Run]]] = []
    for scenario in SCENARIOS:
        if arguments.only and scenario.name not in arguments.only:
            continue
        governed, fixed = compare(scenario, seeds)
        kept.append((scenario, governed, fixed))
        held = sum(run.holds for run in fixed)
        print(f"\n{scenario.name} (simulated, {scenario.seconds} s, {arguments.seeds} seeds):", end=" ")
        print(f"{held} of {len(fixed)} fixed settings hold the limit and the deadline\n")
        print(
            "| | steady, over | steady, under | worst, over | in time | accuracy | shed | changes | holds |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        most_accurate = max(fixed, key=lambda run: (round(run.accuracy, 3), run.in_time))
        shown = (
            fixed if arguments.all else list({run.what: run for run in (fixed[0], most_accurate)}.values())
        )
        for run in (governed, *shown):
            print(line(run), flush=True)
    if arguments.json is not None:
        figures = {
            scenario.name: [asdict(run) for run in (governed, *fixed)] for scenario, governed, fixed in kept
        }
        arguments.json.write_text(json.dumps(figures))
    if arguments.plot is not None:
        arguments.plot.write_text(draw(kept))
    missed = [scenario.name for scenario, governed, _fixed in kept if not governed.holds]
    print(f"\ngovernor falls short in: {', '.join(missed) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
