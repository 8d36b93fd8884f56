"""Does the governor hold its limits, and what does that cost? On a simulated device, not a real one.

    scripts/python benchmarks/governor.py [--only NAME ...] [--all]
        [--governed] [--seeds 5] [--first-seed 0] [--plot FILE.svg]

Each scenario runs once a seed under the governor and under every fixed setting (of two models: every pair of
settings without batches, and with a governor for each that knows of no other). The device is
`tests/runtime/power_device.py`: its settings draw 20 % more than stated on average and each by its own
share, a run's time varies, models share cores, power grows with temperature, clocks fall above 80 C, the
sensors are noisy. What is shown is what the device did, not what its sensors said; over seeds, errors and "in
time" are the worst, the rest is the mean:

- limit error: of power, the worst 30 s mean over the limit and under it (under: a second in which no setting
  that is in time is more accurate than the one in force counts as no more than it drew, as nothing could
  use the rest: "in time" by the governor's own forecast, so what that wrongly rules out is not seen here but
  in the lowest means below the table); of temperature, the worst second; of a battery, energy used to
  energy allowed. "steady" leaves out the first 60 s and 60 s after a step of limit or load, "worst" leaves
  out nothing.
- in time: answered before the deadline, of all requests of the worst model; what was shed counts as missed.
- accuracy: mean of the answers of each model, those of variants as stated; of two models the mean.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from tests.runtime.power_device import IDLE_W, Device, Second, Stream, World, drive, make_profile

from edgekit_host.markup import Markup, el
from edgekit_host.plots.axes import Axis
from edgekit_host.plots.frame import Frame, text
from edgekit_runtime.power.governor.governor import Governor
from edgekit_runtime.power.governor.settings import BatteryLimit, Decision, DeviceLimits, ModelSetting, Seen
from edgekit_runtime.power.sensors.readings import Readings
from results import make_parser, print_head

_WINDOW_S, _SETTLE_S = 30, 60
_WIDTH, _STRIP, _LEFT, _RIGHT, _TOP = 760.0, 110.0, 60.0, 12.0, 22.0
_INNER = _STRIP - _TOP - 22.0
_SMOOTH_S = 30
_EVERY_S = 5
_STYLE = (
    "svg{font:12px system-ui,sans-serif;background:#fff}.governor{stroke:#0b62a4;stroke-width:1.8}"
    ".fixed{stroke:#c46a1b;stroke-width:1.2}.limit{stroke:#b00020;stroke-dasharray:5 3}"
    ".grid{stroke:#ccc}polyline{fill:none}text{fill:#222}"
)

Decisions: TypeAlias = dict[str, Decision]
Lived: TypeAlias = tuple[list[Second], list[Decisions]]


@dataclass(frozen=True)
class Scenario:
    """One thing that happens to a device; `limits` is time -> limits."""

    name: str
    world: World
    limits: Callable[[float], DeviceLimits]
    seconds: int = 900
    steps_s: tuple[int, ...] = (0,)


def one(deadline_s: float = 0.05, **stream: Any) -> dict[str, Stream]:
    """Return the requests to the only model of a device."""
    return {"model": Stream(make_profile(deadline_s), **stream)}


def two(rate_hz: Callable[[float], float] = lambda _t: 12.0) -> dict[str, Stream]:
    """Return the requests to a model that sees and to a smaller one that hears."""
    return {
        "ears": Stream(make_profile(0.03, scale=0.4), rate_hz=lambda _t: 20.0, poisson=True),
        "eyes": Stream(make_profile(0.1), rate_hz=rate_hz),
    }


SCENARIOS = (
    Scenario("power cap", World(), lambda _t: DeviceLimits(6.0)),
    Scenario(
        "power cap steps",
        World(),
        lambda t: DeviceLimits(8.0 if t < 300 else 5.0 if t < 600 else 7.0),
        steps_s=(0, 300, 600),
    ),
    Scenario(
        "heat wave",
        World(ambient_c=lambda t: 25.0 if t < 300 else 45.0),
        lambda _t: DeviceLimits(temperature_c=70.0),
        seconds=1500,
    ),
    Scenario(
        "battery floor",
        World(battery_j=13_500.0, charge=0.6),
        lambda _t: DeviceLimits(battery=BatteryLimit(0.2, 900.0)),
    ),
    Scenario("noisy sensor", World(noise=0.1, spikes=0.02), lambda _t: DeviceLimits(6.0)),
    Scenario(
        "sensor dropout",
        World(dropout=lambda t: 200 <= t < 500, ambient_c=lambda t: 25.0 if t < 300 else 35.0),
        lambda _t: DeviceLimits(6.0),
    ),
    Scenario(
        "load steps, at random",
        World(one(0.1, rate_hz=lambda t: 15.0 if t < 300 else 45.0 if t < 600 else 25.0, poisson=True)),
        lambda _t: DeviceLimits(6.0),
        steps_s=(0, 300, 600),
    ),
    Scenario(
        "crowd, batches pay",
        World(one(0.25, rate_hz=lambda _t: 90.0, poisson=True)),
        lambda _t: DeviceLimits(6.5),
    ),
    Scenario("two models", World(two()), lambda _t: DeviceLimits(5.5)),
    Scenario(
        "two models, load steps",
        World(two(lambda t: 6.0 if t < 300 else 20.0 if t < 600 else 12.0)),
        lambda _t: DeviceLimits(5.5),
        steps_s=(0, 300, 600),
    ),
    Scenario("cap under what any setting needs", World(), lambda _t: DeviceLimits(3.2)),
)


Way: TypeAlias = Callable[[Scenario, Device], Lived]


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
    lowest: float = 0.0  # steady and against the limit, whatever the reason
    changes: int = 0
    power_w: list[float] = field(default_factory=list, repr=False)
    temperature_c: list[float] = field(default_factory=list, repr=False)

    @property
    def holds(self) -> bool:
        """Whether the limit holds within 5 % once steady, and 99 of 100 requests are in time."""
        return self.steady_over <= 0.05 and self.in_time >= 0.99


def govern(scenario: Scenario, device: Device) -> Lived:
    return drive(device, Governor(scenario.limits(0.0), IDLE_W), scenario.seconds, scenario.limits)


@dataclass
class Apart:
    """A governor for each model, none of which knows of another."""

    limits: DeviceLimits
    governors: dict[str, Governor]

    def tick(self, now_s: float, readings: Readings, seen: Mapping[str, Seen]) -> Decisions:
        decisions: Decisions = {}
        for name, governor in self.governors.items():
            governor.limits = self.limits
            decisions |= governor.tick(now_s, readings, {name: seen[name]})
        return decisions


def govern_apart(scenario: Scenario, device: Device) -> Lived:
    limits = scenario.limits(0.0)
    apart = Apart(limits, {name: Governor(limits, IDLE_W) for name in device.engines})
    return drive(device, apart, scenario.seconds, scenario.limits)


def keep(settings: Mapping[str, ModelSetting]) -> Way:
    """Return a way to run a device in which nothing changes."""

    def run(scenario: Scenario, device: Device) -> Lived:
        decisions = {name: Decision(setting) for name, setting in settings.items()}
        return [device.step(decisions) for _ in range(scenario.seconds)], [decisions] * scenario.seconds

    return run


def list_fixed(scenario: Scenario) -> dict[str, Way]:
    """Return the ways to keep one setting for each model, by a name."""
    streams = scenario.world.streams
    choices = [
        [one for one in stream.profile.costs if len(streams) == 1 or one.batch == 1]
        for stream in streams.values()
    ]
    return {
        " + ".join(f"{one.variant} x{one.batch}, {one.threads} threads" for one in settings): keep(
            dict(zip(streams, settings, strict=True))
        )
        for settings in product(*choices)
    }


def judge(scenario: Scenario, what: str, lived: Sequence[Second], decisions: Sequence[Decisions]) -> Run:
    over, under = _errors(scenario, lived, decisions)
    steady = [
        second
        for second in range(scenario.seconds)
        if all(not 0 <= second - step < _SETTLE_S for step in scenario.steps_s)
    ]
    names = scenario.world.streams
    done = {name: [second.work[name] for second in lived] for name in names}
    came = {name: sum(one.answered + one.shed for one in done[name]) for name in names}
    calm = [value for second in steady if (value := over[second]) is not None]
    below = [value for second in steady if (value := under[second]) is not None]
    return Run(
        what,
        max(calm),
        min(below, default=None),
        max(value for value in over if value is not None),
        min(sum(one.answered - one.late for one in done[name]) / came[name] for name in names),
        fmean(
            sum(one.accuracy * one.answered for one in done[name])
            / max(1, sum(one.answered for one in done[name]))
            for name in names
        ),
        fmean(sum(one.shed for one in done[name]) / came[name] for name in names),
        min(calm),
        sum(one[name].setting != other[name].setting for one, other in pairwise(decisions) for name in names),
        [one.power_w for one in lived],
        [one.temperature_c for one in lived],
    )


def _errors(
    scenario: Scenario, lived: Sequence[Second], decisions: Sequence[Decisions]
) -> tuple[list[float | None], list[float | None]]:
    """Errors over and under the limit at each second, None where there is no such error."""
    first = scenario.limits(0.0)
    count = len(lived)
    gives_way = [any(decision.reason for decision in one.values()) for one in decisions]
    if first.temperature_c is not None:
        ratio = [one.temperature_c / first.temperature_c - 1 for one in lived]
        reached = next((second for second, value in enumerate(ratio) if value > -0.02), count)
        return list(ratio), [
            value if second >= reached and gives_way[second] else None for second, value in enumerate(ratio)
        ]
    if first.battery is not None:
        allowed_j = (scenario.world.charge - first.battery.floor) * (scenario.world.battery_j or 0.0)
        error = sum(one.power_w for one in lived) / allowed_j - 1
        return [None] * (count - 1) + [error], [None] * (count - 1) + [error]
    over: list[float | None] = [None] * count
    under: list[float | None] = [None] * count
    for end in range(_WINDOW_S, count + 1):
        window = range(end - _WINDOW_S, end)
        limits_w = {second: scenario.limits(float(second)).power_w or 0.0 for second in window}
        used_w = sum(lived[second].power_w for second in window)
        over[end - 1] = used_w / sum(limits_w.values()) - 1
        if any(gives_way[second] for second in window):
            # Where the best setting in time draws less than the limit, what is left cannot be used.
            usable_w = sum(
                limit_w if gives_way[second] else min(limit_w, lived[second].power_w)
                for second, limit_w in limits_w.items()
            )
            under[end - 1] = used_w / usable_w - 1
    return over, under


def run_all(scenario: Scenario, what: str, way: Way, seeds: Sequence[int]) -> Run:
    """Return the worst errors and the means of the rest, over seeds; the curves are those of the first."""
    runs = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            lived = way(scenario, Device(Path(folder), scenario.world, seed))
        runs.append(judge(scenario, what, *lived))
    return Run(
        what,
        max(run.steady_over for run in runs),
        min((run.steady_under for run in runs if run.steady_under is not None), default=None),
        max(run.worst_over for run in runs),
        min(run.in_time for run in runs),
        fmean(run.accuracy for run in runs),
        fmean(run.shed for run in runs),
        min(run.lowest for run in runs),
        round(fmean(run.changes for run in runs)),
        runs[0].power_w,
        runs[0].temperature_c,
    )


def compare(scenario: Scenario, seeds: Sequence[int]) -> tuple[list[Run], list[Run]]:
    """Return the figures of the governor (or governors), and those of what is fixed, best first."""
    governed = [run_all(scenario, "governor", govern, seeds)]
    if len(scenario.world.streams) > 1:
        governed.append(run_all(scenario, "a governor each", govern_apart, seeds))
    fixed = [run_all(scenario, what, way, seeds) for what, way in list_fixed(scenario).items()]
    return governed, sorted(fixed, key=lambda run: (-run.holds, -run.accuracy))


def choose_most_accurate(fixed: Sequence[Run]) -> Run:
    """Return what runs without a governor."""
    return max(fixed, key=lambda run: (round(run.accuracy, 3), run.in_time))


def line(scenario: str, name: str, run: Run) -> str:
    """Return a row as Markdown; docs/benchmarks/power.md has a part of its columns."""
    under = "" if run.steady_under is None else f" / {run.steady_under:+.1%}"
    return (
        f"| {scenario} | {name} | {run.steady_over:+.1%}{under} | {run.worst_over:+.1%} | {run.in_time:.2%} |"
        f" {run.accuracy:.4f} | {run.shed:.1%} | {run.changes} |"
    )


def show(scenario: Scenario, governed: Sequence[Run], fixed: Sequence[Run], *, everything: bool) -> None:
    held = sum(run.holds for run in fixed)
    title = f"{scenario.name} ({held} of {len(fixed)} fixed hold)" if fixed else scenario.name
    rows = [(run.what, run) for run in governed]
    if everything:
        rows += [(run.what, run) for run in fixed]
    elif fixed:
        if held:
            rows.append((f"best fixed: {fixed[0].what}", fixed[0]))
        accurate = choose_most_accurate(fixed)
        rows.append((f"most accurate: {accurate.what}", accurate))
    for place, (name, run) in enumerate(rows):
        print(line("" if place else title, name, run), flush=True)


def draw(kept: Sequence[tuple[Any, Any, Any]]) -> str:
    """Return the SVG."""
    strips = [_strip(index, *one) for index, one in enumerate(kept)]
    height = _STRIP * len(kept) + 10
    return el(
        "svg",
        el("title", "The governor on a simulated device"),
        el("style", Markup(_STYLE)),
        *strips,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}",
        width=_WIDTH,
        height=height,
        role="img",
    )


def _strip(index: int, scenario: Any, governed: Any, most_accurate: Any) -> Markup:
    of_heat = scenario.limits(0.0).temperature_c is not None
    runs = [(run.temperature_c if of_heat else _smooth(run.power_w)) for run in (most_accurate, governed)]
    limits = [_limit(scenario, second) for second in range(scenario.seconds)]
    values = [value for value in (*runs[0], *runs[1], *limits) if value is not None]
    frame = Frame(
        x=Axis(0, scenario.seconds),
        y=Axis(min(values), max(values)),
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_TOP + _INNER,
    )
    unit = "C" if of_heat else "W, mean of 30 s"
    ends = [(value, f"{value:.1f}") for value in (frame.y.low, frame.y.high)]
    return el(
        "g",
        text(_LEFT, 14, f"{scenario.name} ({unit}); fixed: {most_accurate.what}", None),
        *frame.grid([(scenario.seconds - 20, f"{scenario.seconds} s")], ends),
        *(
            frame.trace(_points(series), style)
            for series, style in ((runs[0], "fixed"), (limits, "limit"), (runs[1], "governor"))
        ),
        transform=f"translate(0 {_STRIP * index:.0f})",
    )


def _points(series: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(second, value) for second, value in list(enumerate(series))[::_EVERY_S] if value is not None]


def _limit(scenario: Any, second: int) -> float | None:
    limits = scenario.limits(float(second))
    value: float | None = limits.temperature_c if limits.power_w is None else limits.power_w
    return value


def _smooth(values: Sequence[float]) -> list[float | None]:
    return [
        None if second < _SMOOTH_S - 1 else sum(values[second - _SMOOTH_S + 1 : second + 1]) / _SMOOTH_S
        for second in range(len(values))
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--all", action="store_true", help="print every fixed setting")
    parser.add_argument("--governed", action="store_true", help="leave the fixed settings out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="power and temperature of all scenarios, as SVG")
    arguments = parser.parse_args()
    if arguments.governed and arguments.plot is not None:
        parser.error("--plot shows a fixed setting, which --governed leaves out")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    kept: list[tuple[Scenario, list[Run], list[Run]]] = []
    print_head(
        "simulated scenario | run | error, steady: over / under | worst, over | in time | accuracy | shed"
        " | changes"
    )
    for scenario in SCENARIOS:
        if arguments.only and scenario.name not in arguments.only:
            continue
        if arguments.governed:
            governed, fixed = [run_all(scenario, "governor", govern, seeds)], list[Run]()
        else:
            governed, fixed = compare(scenario, seeds)
        kept.append((scenario, governed, fixed))
        show(scenario, governed, fixed, everything=arguments.all)
    if arguments.plot is not None:
        arguments.plot.write_text(
            draw([(one, governed[0], choose_most_accurate(fixed)) for one, governed, fixed in kept])
        )
    missed = [scenario.name for scenario, governed, _fixed in kept if not governed[0].holds]
    for scenario, governed, _fixed in kept:
        if scenario.limits(0.0).power_w is not None:
            print(f"{scenario.name}: lowest mean, whatever the reason: {governed[0].lowest:+.1%}")
    print(f"\ngovernor falls short in: {', '.join(missed) or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
