"""A rollout over devices that exist only here: seeded, in one process, and as fast as it can be decided.

The devices differ from each other in speed, noise and use, hours differ from each other in load, and a few
devices are broken whatever they run. Nothing here knows a gate: it makes the figures that devices report.
"""

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from edgekit_fleet.rollouts.decide import decide
from edgekit_fleet.rollouts.gate_table import make_limits
from edgekit_fleet.rollouts.gates import Period, measure
from edgekit_fleet.rollouts.progress import (
    AnswerEntry,
    Decision,
    Entry,
    ModelSettings,
    Progress,
    Reading,
    RolloutSettings,
    StartEntry,
    apply,
    begin,
)
from edgekit_fleet.rollouts.waves import DEFAULT_WAVES, default_minimum, freeze_cohort, plan_waves

CLASSES = ("jetson-orin-nano", "rpi5", "x86-64")
MODEL = "digits"
STAGES = 3  # of figures that are made; a device takes hours to the fourth
NOW = 1_800_000_000.0
TICK_S = 30.0


@dataclass(frozen=True)
class Model:
    """How a new version behaves on a healthy device, relative to the old one."""

    agreement: float = 0.975
    latency: float = 1.0
    energy: float = 1.0
    errors: float = 0.0
    drift: float = 0.0
    install_failures: float = 0.0
    crash_share: float = 0.0
    not_finite_share: float = 0.0


CLEAN = Model()
BAD_MODELS = {
    "-5 points, no labels": Model(agreement=CLEAN.agreement - 0.05),
    "2 x latency": Model(latency=2.0),
    "2 x energy": Model(energy=2.0),
    "NaN": Model(not_finite_share=0.6),
    "crash loop": Model(crash_share=0.9),
    "30 % fail to install": Model(install_failures=0.3),
    "5 points more errors": Model(errors=0.05),
}


@dataclass(frozen=True)
class Device:
    name: str
    device_class: str
    speed: float
    noise: float
    requests_per_s: float
    is_offline: bool
    is_flaky: bool


@dataclass
class Simulation:
    """One rollout, from its start to its end or to `days`.

    Attributes:
        progress: at the end.
        log: all entries with their times.
        ended_at: seconds after the start.
        exposed: devices that were offered the release.
    """

    progress: Progress
    log: list[tuple[float, Entry]] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def exposed(self) -> int:
        return self.progress.started


def simulate(
    seed: int,
    devices: int,
    model: Model,
    *,
    waves: str = DEFAULT_WAVES,
    minimum: int | None = None,
    limits: Mapping[str, float] | None = None,
    others: int = 0,
    days: float = 30,
) -> Simulation:
    """Return what happens when `model`, and `others` more that are good, go out to so many devices."""
    draw = random.Random(seed)
    fleet = {device.name: device for device in _make_devices(draw, devices)}
    cohort = freeze_cohort(f"rollout-{seed}", {device.name: device.device_class for device in fleet.values()})
    minimum = default_minimum(devices) if minimum is None else minimum
    settings = RolloutSettings(
        waves=plan_waves(waves, devices, minimum),
        minimum=minimum,
        limits=limits or make_limits(),
        models={name: ModelSettings(classes=CLASSES) for name in (*_name_others(others), MODEL)},
    )
    start = StartEntry(
        settings=settings,
        devices=cohort,
        classes=tuple(fleet[device].device_class for device in cohort),
    )
    run = Simulation(begin(start, NOW), [(NOW, start)])
    events: list[tuple[float, int, AnswerEntry]] = []
    now, number = NOW, 0
    while now < NOW + days * 86_400:
        while events and events[0][0] <= now:
            _, _, answer = heapq.heappop(events)
            run.log.append((now, answer))
            apply(run.progress, answer, now)
        decision = decide(run.progress, now)
        if decision is None or run.progress.state == "paused":
            break  # nobody resumes it here
        if decision.action == "wait" or (decision.action == "ask" and decision == run.progress.last):
            now = max(now + TICK_S, events[0][0]) if events else now + 600.0
            continue
        run.log.append((now, decision))
        apply(run.progress, decision, now)
        if decision.action in ("start", "retry"):
            for device in decision.devices:
                for at, answer in _use(draw, fleet[device], model, now, settings):
                    number += 1
                    heapq.heappush(events, (at, number, answer))
    run.ended_at = now - NOW
    return run


def _make_devices(draw: random.Random, count: int) -> Iterator[Device]:
    for number in range(count):
        yield Device(
            name=f"device-{number:05}",
            device_class=draw.choice(CLASSES),
            speed=draw.lognormvariate(0.0, 0.4),
            noise=draw.uniform(0.02, 0.15),
            requests_per_s=draw.lognormvariate(0.0, 1.0),
            is_offline=draw.random() < 0.05,
            is_flaky=draw.random() < 0.0005,
        )


def _use(
    draw: random.Random, device: Device, model: Model, now: float, settings: RolloutSettings
) -> Iterator[tuple[float, AnswerEntry]]:
    """Yield what a device answers after it was offered the version, and when."""
    if device.is_offline:
        return
    at = now + draw.uniform(5, 60)
    if draw.random() < 0.005:
        yield at, AnswerEntry(device=device.name, outcome="failed", code="timeout")
        return
    if draw.random() < max(model.install_failures, 0.005):
        yield at, AnswerEntry(device=device.name, outcome="failed", code="self-test")
        return
    yield at, AnswerEntry(device=device.name, outcome="succeeded")
    used = at + settings.limits["min_requests"] / device.requests_per_s
    if device.is_flaky or draw.random() < model.crash_share:
        yield used, AnswerEntry(device=device.name, fault="crash-loop")
        return
    if draw.random() < model.not_finite_share:
        yield used, AnswerEntry(device=device.name, fault="not-finite")
        return
    for stage in range(STAGES):
        requests = settings.limits["min_requests"] * 10**stage
        readings = []
        for name in settings.models:
            found = _measure(draw, device, model if name == MODEL else CLEAN, requests)
            readings.append(Reading(model=name, stage=stage, measures=found))
        yield at + requests / device.requests_per_s, AnswerEntry(device=device.name, readings=tuple(readings))


def _name_others(count: int) -> list[str]:
    return [f"another{number}" for number in range(count)]


def _measure(draw: random.Random, device: Device, model: Model, requests: int) -> dict[str, float]:
    """Return what the device's figures say, compared with devices that still run the old version."""
    evening = draw.uniform(0.8, 1.6)  # all devices are slower at some hours
    controls = []
    for _ in range(9):
        speed = draw.lognormvariate(0, 0.4)
        loads = (1.0, evening)
        controls.append(tuple(_draw_period(draw, (speed, device.noise), CLEAN, load, 400) for load in loads))
    own = device.speed, device.noise
    before = _draw_period(draw, own, CLEAN, 1.0, 400)
    found = measure(before, _draw_period(draw, own, model, evening, requests), controls)
    return {**found, "disagreement": 1.0 - min(max(draw.gauss(model.agreement, 0.02), 0.0), 1.0)}


def _draw_period(
    draw: random.Random, device: tuple[float, float], model: Model, load: float, calls: int
) -> Period:
    """Return the figures of a period on a device of this speed and noise."""
    speed, noise = device
    return Period(
        requests=calls,
        values={
            "latency": 10 * speed * model.latency * load * draw.lognormvariate(0, noise),
            "energy": 5 * speed * model.energy * load * draw.lognormvariate(0, noise),
            "errors": _count_failures(draw, 0.002 + model.errors, calls) / calls,
            "drift": abs(draw.gauss(0.03, 0.02)) + model.drift,
        },
    )


def _count_failures(draw: random.Random, rate: float, calls: int) -> int:
    """Return how many calls fail, by the gaps between them."""
    failed, at = 0, 0
    while True:
        at += 1 + int(math.log(1.0 - draw.random()) / math.log(1.0 - rate))
        if at > calls:
            return failed
        failed += 1


def decisions(run: Simulation) -> list[Decision]:
    return [entry for _, entry in run.log if isinstance(entry, Decision)]
