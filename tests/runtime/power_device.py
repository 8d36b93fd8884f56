"""A simulated device: a queue in front of an engine, power, heat, a governor of clocks, a battery, sensors.

Everything is invented, with orders of magnitude of a single-board computer: it shows how the governor
behaves, not how a device does. Power and energy are known twice: what the device draws, and what its
sensors say.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.runtime.power_tree import Tree

from edgekit_runtime.power.governor import Governor
from edgekit_runtime.power.sensors import Sensors, discover
from edgekit_runtime.power.settings import Cost, Decision, Limits, Load, Profile, Setting
from edgekit_runtime.power.sysfs import Sysfs

_CORE_W = 1.6
_RUNS = {"large": (0.060, 0.92), "medium": (0.034, 0.89), "small": (0.018, 0.84), "tiny": (0.008, 0.76)}
_BATCH_SAVING = 0.8  # time and energy of a request in a batch of four, to those of one alone


def make_profile(idle_w: float = 3.0) -> Profile:
    """Settings of four variants with their costs, as somebody would state them beforehand."""
    costs = {}
    for variant, (seconds, accuracy) in _RUNS.items():
        for threads in (1, 2, 4):
            for batch in (1, 4):
                run_s = seconds * threads**-0.8 * (1 if batch == 1 else batch * _BATCH_SAVING)
                energy_j = run_s * _CORE_W * threads / batch
                costs[Setting(variant, batch, threads)] = Cost(run_s, energy_j, accuracy)
    return Profile(costs, idle_w)


@dataclass(frozen=True, slots=True)
class World:
    """What happens to a device.

    Attributes:
        rate_hz: time -> requests a second.
        poisson: whether they come at random; else evenly, as from a camera.
        deadline_s: of a request.
        ambient_c: time -> temperature around it.
        noise: standard deviation of the power sensor, as a share.
        spikes: share of its readings that are nonsense.
        dropout: time -> whether the power sensor fails.
        battery_j: what the battery holds when full, or None without one.
        charge: of the battery at the start.
    """

    rate_hz: Callable[[float], float] = lambda _now_s: 30.0
    poisson: bool = False
    deadline_s: float = 0.05
    ambient_c: Callable[[float], float] = lambda _now_s: 25.0
    noise: float = 0.015
    spikes: float = 0.0
    dropout: Callable[[float], bool] = lambda _now_s: False
    battery_j: float | None = None
    charge: float = 1.0


@dataclass(slots=True)
class Second:
    """What really happened in one second."""

    power_w: float
    temperature_c: float
    charge: float
    answered: int = 0
    late: int = 0
    shed: int = 0
    accuracy: float = 0.0
    longest_run_s: float = 0.0
    arrivals: list[float] = field(default_factory=list)


class Device:
    """Steps second by second; its sensors are files."""

    def __init__(self, folder: Path, world: World, profile: Profile, seed: int = 0) -> None:
        self.world, self.profile = world, profile
        self.random = random.Random(seed)
        # What was stated is wrong: all settings draw more and run longer, each by its own share.
        self.energy = {one: 1.2 * self.random.lognormvariate(0, 0.1) for one in sorted(profile.costs)}
        self.run = {one: 1.05 * self.random.lognormvariate(0, 0.03) for one in sorted(profile.costs)}
        self.now_s, self.free_s, self.clock = 0.0, 0.0, 1.0
        self.throttled = False
        self.die_c = self.board_c = world.ambient_c(0.0) + 12.0
        self.charge = world.charge
        self.waiting: deque[float] = deque()
        self.next_s = 0.0
        self.owed = 0.0  # fraction of a request that is still to be admitted
        self.tree = Tree(folder)
        self.drawn_w = profile.idle_w
        self.show()
        self.sensors: Sensors = discover(Sysfs(folder))

    def step(self, decision: Decision) -> Second:
        """Live through one second."""
        second = Second(0.0, 0.0, 0.0)
        energy_j = self.profile.idle_w * (1 + 0.004 * (self.die_c - 40))
        self._arrive(decision.admit, second)
        energy_j += self._serve(decision.setting, second)
        self.now_s += 1.0
        self._warm(energy_j)
        if self.world.battery_j is not None:
            self.charge = max(0.0, self.charge - energy_j / self.world.battery_j)
        second.power_w, second.temperature_c, second.charge = energy_j, self.die_c, self.charge
        self.drawn_w = energy_j
        return second

    def load(self, second: Second) -> Load:
        """What a service would have counted in that second."""
        gaps = [after - before for before, after in zip(second.arrivals, second.arrivals[1:], strict=False)]
        mean = sum(gaps) / len(gaps) if gaps else 0.0
        variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) if gaps else 0.0
        return Load(
            rate_hz=float(len(second.arrivals)),
            run_s=second.longest_run_s or None,
            burstiness=variance / mean**2 if mean else 1.0,
            missed=second.late / second.answered if second.answered else 0.0,
        )

    def _arrive(self, admit: float, second: Second) -> None:
        end_s = self.now_s + 1.0
        while self.next_s < end_s:
            second.arrivals.append(self.next_s)
            self.owed += admit
            if self.owed >= 1.0:
                self.owed -= 1.0
                self.waiting.append(self.next_s)
            else:
                second.shed += 1
            rate_hz = max(1e-3, self.world.rate_hz(self.next_s))
            self.next_s += self.random.expovariate(rate_hz) if self.world.poisson else 1 / rate_hz

    def _serve(self, setting: Setting, second: Second) -> float:
        cost, energy_j, gained = self.profile.costs[setting], 0.0, 0.0
        patience_s = self.world.deadline_s / 3 if setting.batch > 1 else 0.0
        end_s = self.now_s + 1.0
        while self.waiting:
            full_s = self.waiting[setting.batch - 1] if len(self.waiting) >= setting.batch else math.inf
            start_s = max(self.free_s, min(full_s, self.waiting[0] + patience_s))
            if start_s >= end_s:
                break
            taken: list[float] = []
            while self.waiting and len(taken) < setting.batch and self.waiting[0] <= start_s:
                taken.append(self.waiting.popleft())
            run_s = cost.latency_s * self.run[setting] / self.clock * self.random.lognormvariate(0, 0.04)
            # What is stated is the time of a full batch; a small part of it does not depend on the filling.
            share = 1 - 0.9 * (setting.batch - len(taken)) / setting.batch
            run_s *= share
            self.free_s = start_s + run_s
            second.answered += len(taken)
            second.late += sum(self.free_s - arrived_s > self.world.deadline_s for arrived_s in taken)
            second.longest_run_s = max(second.longest_run_s, run_s)
            gained += len(taken) * cost.accuracy
            heat = 1 + 0.004 * (self.die_c - 40)
            energy_j += share * setting.batch * cost.energy_j * self.energy[setting] * self.clock**1.5 * heat
        second.accuracy = gained / second.answered if second.answered else 0.0
        return energy_j

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


def drive(
    device: Device,
    governor: Governor,
    seconds: int,
    limits: Callable[[float], Limits] | None = None,
) -> tuple[list[Second], list[Decision]]:
    """Let a governor run a device.

    Args:
        device: at its start.
        governor: fresh.
        seconds: to live through.
        limits: time -> limits, or None for those of the governor all the time.

    Returns:
        what happened, and the decision in force in each second.
    """
    load, lived, decisions = Load(rate_hz=device.world.rate_hz(0.0)), [], []
    for _ in range(seconds):
        if limits is not None:
            governor.limits = limits(device.now_s)
        device.show()
        governor.tick(device.now_s, device.sensors.read(device.now_s), load)
        decision = governor.state.decision
        assert decision is not None
        decisions.append(decision)
        lived.append(device.step(decision))
        load = device.load(lived[-1])
    return lived, decisions
