"""A simulated device: engines with queues that share its cores, power, heat, clocks, a battery, sensors.

Everything is invented, with orders of magnitude of a single-board computer: it shows how the governor
behaves, not how a device does. Power and energy are known twice: what the device draws, and what its
sensors say.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from tests.runtime.power_tree import Tree

from edgekit_runtime.power.governor.settings import (
    Cost,
    Decision,
    DeviceLimits,
    Load,
    ModelSetting,
    Profile,
    Seen,
)
from edgekit_runtime.power.sensors.discovery import Sensors, discover
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.power.sensors.sysfs import Sysfs

_CORE_W, _CORES = 1.6, 4
IDLE_W = 3.0
_RUNS = {"large": (0.060, 0.92), "medium": (0.034, 0.89), "small": (0.018, 0.84), "tiny": (0.008, 0.76)}
_BATCH_SAVING = 0.8  # time and energy of a request in a batch of four, to those of one alone


def make_profile(deadline_s: float = 0.05, scale: float = 1.0) -> Profile:
    """Settings of four variants with their costs, as somebody would state them beforehand.

    Args:
        deadline_s: of the model.
        scale: of its running times, for a smaller or larger model.
    """
    costs = {}
    for variant, (seconds, accuracy) in _RUNS.items():
        for threads in (1, 2, 4):
            for batch in (1, 4):
                run_s = scale * seconds * threads**-0.8 * (1 if batch == 1 else batch * _BATCH_SAVING)
                energy_j = run_s * _CORE_W * threads / batch
                costs[ModelSetting(variant, batch, threads)] = Cost(run_s, energy_j, accuracy)
    return Profile(costs, deadline_s, hold_s=deadline_s / 3)


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests to one model.

    Attributes:
        profile: of the model, with the deadline of its requests.
        rate_hz: time -> requests a second.
        poisson: whether they come at random; else evenly, as from a camera.
    """

    profile: Profile = field(default_factory=make_profile)
    rate_hz: Callable[[float], float] = lambda _now_s: 30.0
    poisson: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """What happens to a device.

    Attributes:
        streams: requests to each model, by its name.
        ambient_c: time -> temperature around it.
        noise: standard deviation of the power sensor, as a share.
        spikes: share of its readings that are nonsense.
        dropout: time -> whether the power sensor fails.
        stuck: time -> whether the power sensor repeats what it said last.
        battery_j: what the battery holds when full, or None without one.
        charge: of the battery at the start.
    """

    streams: Mapping[str, Stream] = field(default_factory=lambda: {"model": Stream()})
    ambient_c: Callable[[float], float] = lambda _now_s: 25.0
    noise: float = 0.015
    spikes: float = 0.0
    dropout: Callable[[float], bool] = lambda _now_s: False
    stuck: Callable[[float], bool] = lambda _now_s: False
    battery_j: float | None = None
    charge: float = 1.0


@dataclass(slots=True)
class Work:
    """What one model really did in one second."""

    answered: int = 0
    late: int = 0
    shed: int = 0
    accuracy: float = 0.0
    busy_s: float = 0.0
    runs: int = 0
    arrivals: list[float] = field(default_factory=list)

    def to_load(self) -> Load:
        """Return what a service would have counted."""
        gaps = [after - before for before, after in pairwise(self.arrivals)]
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) if gaps else 0.0
        return Load(
            rate_hz=float(len(self.arrivals)),
            run_s=self.busy_s / self.runs if self.runs else None,
            burstiness=variance / mean**2 if mean else 1.0,
            missed=self.late / self.answered if self.answered else 0.0,
            fill=self.answered / self.runs if self.runs else None,
        )


@dataclass(slots=True)
class Second:
    """What really happened in one second, to the device and to each model."""

    power_w: float
    temperature_c: float
    charge: float
    work: dict[str, Work]


class Engine:
    """A queue in front of a model that runs one batch at a time."""

    def __init__(self, stream: Stream, draw: random.Random) -> None:
        self.stream, self.random = stream, draw
        # What was stated is wrong: all settings draw more and run longer, each by its own share.
        settings = sorted(stream.profile.costs)
        self.energy = {one: 1.2 * draw.lognormvariate(0, 0.1) for one in settings}
        self.run = {one: 1.05 * draw.lognormvariate(0, 0.03) for one in settings}
        self.waiting: deque[float] = deque()
        self.free_s = self.next_s = 0.0
        self.owed = 0.0  # fraction of a request that is still to be admitted

    def step(self, now_s: float, decision: Decision, pace: float, draw: float) -> tuple[Work, float]:
        """Live through one second.

        Args:
            now_s: its begin.
            decision: in force.
            pace: share of its full speed at which the device computes.
            draw: energy of a request, over that at full speed and 40 C.

        Returns:
            what was done, and joules.
        """
        work, setting = Work(), decision.setting
        self._arrive(now_s + 1.0, decision.admit, work)
        cost, energy_j, gained = self.stream.profile.costs[setting], 0.0, 0.0
        deadline_s = self.stream.profile.deadline_s or math.inf
        patience_s = self.stream.profile.hold_s if setting.batch > 1 else 0.0
        while self.waiting:
            full_s = self.waiting[setting.batch - 1] if len(self.waiting) >= setting.batch else math.inf
            start_s = max(self.free_s, min(full_s, self.waiting[0] + patience_s))
            if start_s >= now_s + 1.0:
                break
            taken: list[float] = []
            while self.waiting and len(taken) < setting.batch and self.waiting[0] <= start_s:
                taken.append(self.waiting.popleft())
            run_s = cost.latency_s * self.run[setting] / pace * self.random.lognormvariate(0, 0.04)
            # What is stated is the time of a full batch; a small part of it does not depend on the filling.
            share = 1 - 0.9 * (setting.batch - len(taken)) / setting.batch
            run_s *= share
            self.free_s = start_s + run_s
            work.answered += len(taken)
            work.late += sum(self.free_s - arrived_s > deadline_s for arrived_s in taken)
            work.runs += 1
            work.busy_s += run_s
            gained += len(taken) * cost.accuracy
            energy_j += share * setting.batch * cost.energy_j * self.energy[setting] * draw
        work.accuracy = gained / work.answered if work.answered else 0.0
        return work, energy_j

    def _arrive(self, end_s: float, admit: float, work: Work) -> None:
        while self.next_s < end_s:
            work.arrivals.append(self.next_s)
            self.owed += admit
            if self.owed >= 1.0:
                self.owed -= 1.0
                self.waiting.append(self.next_s)
            else:
                work.shed += 1
            rate_hz = max(1e-3, self.stream.rate_hz(self.next_s))
            self.next_s += self.random.expovariate(rate_hz) if self.stream.poisson else 1 / rate_hz


class Device:
    """Steps second by second; its sensors are files."""

    def __init__(self, folder: Path, world: World, seed: int = 0) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.engines = {name: Engine(stream, self.random) for name, stream in world.streams.items()}
        self.now_s, self.clock = 0.0, 1.0
        self.throttled = False
        self.die_c = self.board_c = world.ambient_c(0.0) + 12.0
        self.charge = world.charge
        self.used: dict[str, float] = dict.fromkeys(self.engines, 0.0)  # cores, in the second before
        self.tree = Tree(folder)
        self.drawn_w = IDLE_W
        self.shown_w = 0.0
        self.show()
        self.sensors: Sensors = discover(Sysfs(folder))

    def step(self, decisions: Mapping[str, Decision]) -> Second:
        """Live through one second."""
        heat = 1 + 0.004 * (self.die_c - 40)
        energy_j = IDLE_W * heat
        second = Second(0.0, 0.0, 0.0, {})
        for name, engine in self.engines.items():
            # Models that run at once share the cores.
            wanted = decisions[name].setting.threads + sum(
                used for other, used in self.used.items() if other != name
            )
            pace = self.clock * min(1.0, _CORES / wanted)
            work, drawn_j = engine.step(self.now_s, decisions[name], pace, self.clock**1.5 * heat)
            second.work[name] = work
            energy_j += drawn_j
        self.used = {
            name: decisions[name].setting.threads * min(1.0, work.busy_s)
            for name, work in second.work.items()
        }
        self.now_s += 1.0
        self._warm(energy_j)
        if self.world.battery_j is not None:
            self.charge = max(0.0, self.charge - energy_j / self.world.battery_j)
        second.power_w, second.temperature_c, second.charge = energy_j, self.die_c, self.charge
        self.drawn_w = energy_j
        return second

    def _warm(self, power_w: float) -> None:
        for _ in range(4):  # steps of a quarter of a second: the die's time constant is 16 s
            to_board_w = (self.die_c - self.board_c) / 2.0
            to_air_w = (self.board_c - self.world.ambient_c(self.now_s)) / 3.5
            self.die_c += 0.25 * (power_w - to_board_w) / 8.0
            self.board_c += 0.25 * (to_board_w - to_air_w) / 60.0
        if self.die_c > 80.0:
            self.throttled = True
        elif self.die_c < 74.0:
            self.throttled = False
        step = -0.1 if self.throttled else 0.1
        self.clock = min(1.0, max(0.5, self.clock + step))

    def show(self) -> None:
        """Write what the sensors say now."""
        shown_w = self.drawn_w * self.random.gauss(1.0, self.world.noise)
        if self.random.random() < self.world.spikes:
            shown_w *= self.random.choice((0.0, 5.0))
        if self.world.stuck(self.now_s):
            shown_w = self.shown_w
        self.shown_w = shown_w
        if self.now_s == 0:
            self.tree.rail(1, "VDD_IN", 5000, round(shown_w * 200))
            self.tree.zone(0, "cpu-thermal", 25000)
        current = "" if self.world.dropout(self.now_s) else round(shown_w * 200)
        self.tree.write("class/hwmon/hwmon3/curr1_input", current)
        self.tree.write("class/thermal/thermal_zone0/temp", round(self.die_c * 2) * 500)
        if self.world.battery_j is not None:
            full_uwh = self.world.battery_j / 3.6e-3
            self.tree.battery(
                capacity=round(self.charge * 100),
                energy_full=round(full_uwh),
                energy_now=round(math.floor(self.charge * 200) / 200 * full_uwh),
                power_now=round(max(0.0, shown_w) * 1e6),
            )


class Governing(Protocol):
    """A governor, or several."""

    limits: DeviceLimits

    def tick(self, now_s: float, readings: Readings, seen: Mapping[str, Seen]) -> dict[str, Decision]:
        """As `Governor.tick`."""


def drive(
    device: Device,
    governor: Governing,
    seconds: int,
    limits: Callable[[float], DeviceLimits] | None = None,
) -> tuple[list[Second], list[dict[str, Decision]]]:
    """Let a governor run a device.

    Args:
        device: at its start.
        governor: fresh.
        seconds: to live through.
        limits: time -> limits, or None for those of the governor all the time.

    Returns:
        what happened, and the decisions in force in each second.
    """
    streams = device.world.streams
    loads = {name: Load(rate_hz=stream.rate_hz(0.0)) for name, stream in streams.items()}
    lived: list[Second] = []
    decisions: list[dict[str, Decision]] = []
    in_force: dict[str, Decision] = {}
    for _ in range(seconds):
        if limits is not None:
            governor.limits = limits(device.now_s)
        device.show()
        seen = {name: Seen(stream.profile, loads[name]) for name, stream in streams.items()}
        in_force |= governor.tick(device.now_s, device.sensors.read(device.now_s), seen)
        decisions.append(dict(in_force))
        lived.append(device.step(in_force))
        loads = {name: work.to_load() for name, work in lived[-1].work.items()}
    return lived, decisions
