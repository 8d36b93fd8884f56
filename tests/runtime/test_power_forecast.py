"""The forecast of waits against queues that are simulated, request by request."""

import random

import pytest

from edgekit_runtime.power.governor.forecast import Learned
from edgekit_runtime.power.governor.settings import Cost, Load, ModelSetting, Profile

RUN_S = 0.02
COSTS = {
    ModelSetting("m"): Cost(RUN_S / 2, 0.010, 0.9),
    ModelSetting("m", batch=4): Cost(RUN_S, 0.005, 0.9),
}


def simulate(batch: int, run_s: float, rate_hz: float, hold_s: float, requests: int = 40_000) -> float:
    """Return the 99th percentile of the latency of random arrivals, with runs that all take `run_s`."""
    draw, arrivals, at_s = random.Random(7), [], 0.0
    for _ in range(requests):
        at_s += draw.expovariate(rate_hz)
        arrivals.append(at_s)
    latencies: list[float] = []
    first, free_s = 0, 0.0
    while first + batch <= requests:
        start_s = max(free_s, min(arrivals[first + batch - 1], arrivals[first] + hold_s))
        taken = [came_s for came_s in arrivals[first : first + batch] if came_s <= start_s]
        free_s = start_s + run_s
        latencies += [free_s - came_s for came_s in taken]
        first += len(taken)
    return sorted(latencies)[int(0.99 * len(latencies))]


@pytest.mark.parametrize(
    ("batch", "busy", "hold_s", "least", "most"),
    [  # of the simulated percentile; its own error is a few percent at a busy engine
        *((1, busy, 0.0, 0.93, 1.08) for busy in (0.05, 0.3, 0.5, 0.7, 0.85)),
        *((4, busy, 0.05, 0.9, 1.15) for busy in (0.3, 0.5, 0.7, 0.85)),
    ],
)
def test_latency_of_random_arrivals_is_forecast_as_a_simulated_queue_shows_it(
    batch: int, busy: float, hold_s: float, least: float, most: float
) -> None:
    rate_hz = busy * batch / RUN_S
    setting = ModelSetting("m", batch)
    profile = Profile({setting: Cost(RUN_S, 0.01, 0.9)}, hold_s=hold_s)
    forecast = Learned().forecast(setting, Load(rate_hz), profile)
    assert least <= forecast.latency_s / simulate(batch, RUN_S, rate_hz, hold_s) <= most


def test_even_arrivals_wait_for_their_batch_and_no_engine() -> None:
    profile, load = Profile(COSTS, hold_s=0.03), Load(rate_hz=60.0, burstiness=0.0)
    assert Learned().forecast(ModelSetting("m"), load, profile).latency_s == RUN_S / 2
    assert Learned().forecast(ModelSetting("m", 4), load, profile).latency_s == pytest.approx(0.03 + RUN_S)


def test_batches_that_few_requests_share_are_forecast_to_draw_as_single_ones() -> None:
    setting = ModelSetting("m", batch=4)
    powers = [
        Learned().forecast(setting, Load(rate_hz), Profile(COSTS, hold_s=hold_s)).power_w / rate_hz
        for rate_hz, hold_s in ((1.0, 0.0), (20.0, 0.05), (100.0, 0.05))
    ]
    assert powers == pytest.approx([0.010, 0.0075 - 0.0075 / 9, 0.005])


def test_run_of_a_part_of_a_batch_is_not_taken_for_a_fast_full_one() -> None:
    setting, profile = ModelSetting("m", batch=4), Profile(COSTS)
    learned = Learned().learn_run(setting, RUN_S / 2, 1.0, profile)
    assert learned.run_s(setting, profile) == pytest.approx(RUN_S)
    assert Learned().learn_run(setting, RUN_S / 2, None, profile).run_s(setting, profile) < RUN_S
