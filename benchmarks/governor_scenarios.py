"""What happens to the simulated device of `governor.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.runtime.power_device import Stream, World, make_profile

from edgekit_runtime.power.governor.settings import BatteryLimit, DeviceLimits


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
