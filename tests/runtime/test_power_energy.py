import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.power_tree import Tree
from tests.waiting import wait_for

from edgekit_runtime.power.governor.loads import LoadMeter
from edgekit_runtime.power.governor.settings import Load
from edgekit_runtime.power.sensors.discovery import discover
from edgekit_runtime.power.sensors.energy_meter import EnergyMeter, EnergyShare, Work
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.rapl import EnergyCounter
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.power.sensors.sampling import Sampling
from edgekit_runtime.power.sensors.sysfs import Sysfs


@given(
    st.integers(2, 2**48).flatmap(
        lambda size: st.tuples(
            st.just(size), st.integers(0, size - 1), st.lists(st.integers(0, size - 1), max_size=30)
        )
    )
)
def test_counter_that_wraps_around_adds_up_to_what_was_counted(case: tuple[int, int, list[int]]) -> None:
    size, start, steps = case
    counter, counted, total_j = EnergyCounter(size), start, 0.0
    counter.add(counted)
    for step in steps:
        counted = (counted + step) % size
        total_j = counter.add(counted)
    assert total_j == pytest.approx(sum(steps) * 1e-6)


def test_counter_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to 100"):
        EnergyCounter(100).add(101)


def test_rails_are_joined_by_straight_lines() -> None:
    source = PowerSource(scope="board", names=("a",), counts=False, rank=0)
    source.measure({"a": 2.0}, 0.0)
    assert source.measure({"a": 4.0}, 2.0).energy_j == pytest.approx(6.0)


@pytest.mark.parametrize("gap_s", [11.0, 0.0, -1.0])
def test_gap_or_clock_that_stands_is_no_energy(gap_s: float) -> None:
    source = PowerSource(scope="board", names=("a",), counts=False, rank=0)
    source.measure({"a": 2.0}, 100.0)
    assert source.measure({"a": 4.0}, 100.0 + gap_s).energy_j is None


def test_missing_reading_breaks_a_line_but_not_a_counter() -> None:
    rail = PowerSource(scope="board", names=("a",), counts=False, rank=0)
    counter = PowerSource(scope="processor", names=("a",), counts=True, rank=0)
    for value, now_s in ((10.0, 0.0), (None, 1.0)):
        rail.measure({"a": value}, now_s)
        counter.measure({"a": value}, now_s)
    assert rail.measure({"a": 16.0}, 2.0).energy_j is None
    after = counter.measure({"a": 16.0}, 2.0)
    assert (after.energy_j, after.power_w, after.seconds) == (6.0, 3.0, 2.0)


def test_counter_that_began_anew_is_no_energy() -> None:
    counter, source = (
        EnergyCounter(262_000_000_000),
        PowerSource(scope="processor", names=("a",), counts=True, rank=0),
    )
    for counted, now_s in ((5_000_000, 0.0), (10_000_000, 1.0)):
        source.measure({"a": counter.add(counted)}, now_s)
    assert source.measure({"a": counter.add(0)}, 2.0).energy_j is None
    assert source.measure({"a": counter.add(4_000_000)}, 3.0).energy_j == pytest.approx(4.0)


def second(at_s: float, joules: float | None) -> Readings:
    return Readings(at_s=at_s, power_w=joules, interval_j=joules, interval_s=1.0)


def learn_idle(meter: EnergyMeter, watts: float) -> None:
    for at_s in range(5):
        meter.add(second(float(at_s), watts), {})


def test_energy_above_idle_is_shared_by_busy_time() -> None:
    meter = EnergyMeter()
    learn_idle(meter, 3.0)
    now = meter.add(second(10.0, 7.0), {"a": Work(0.6, 30), "b": Work(0.2, 2)})
    assert now == {"a": EnergyShare(pytest.approx(3.0), 30), "b": EnergyShare(pytest.approx(1.0), 2)}
    assert now["b"].per_request_j == pytest.approx(1.0 / 2)
    assert meter.request_j("a") == pytest.approx(3.0 / 30)
    assert meter.request_j("b") == pytest.approx(1.0 / 2)


@pytest.mark.parametrize("joules", [None, 5.0], ids=["no sensor", "never idle"])
def test_energy_that_was_not_measured_is_none(joules: float | None) -> None:
    meter = EnergyMeter()
    for at_s in range(10):
        meter.add(second(float(at_s), joules), {"a": Work(0.5, 10)})
    assert meter.request_j("a") is None


def test_idle_power_follows_slowly_as_the_device_warms() -> None:
    meter = EnergyMeter()
    learn_idle(meter, 3.0)
    meter.add(second(5.0, 4.0), {})
    assert meter.idle_w == pytest.approx(3.1)  # a tenth of the way
    learn_idle(meter, 4.0)
    assert meter.idle_w is not None
    assert 3.4 < meter.idle_w < 4.0


def test_same_readings_twice_count_once_with_the_work_of_both() -> None:
    meter = EnergyMeter()
    learn_idle(meter, 3.0)
    stale = second(4.0, 3.0)
    meter.add(stale, {"a": Work(0.5, 10)})
    meter.add(second(5.0, 5.0), {"a": Work(0.5, 10)})
    assert meter.request_j("a") == pytest.approx(2.0 / 20)


def test_sampling_reads_on_its_own_thread(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.zone(0, "cpu-thermal", 50_000)
    sampling = Sampling(discover(Sysfs(tmp_path)), period_s=0.001)
    sampling.start()
    wait_for(lambda: sampling.latest.temperature_c is not None, "a reading")
    assert sampling.latest.temperature_c == pytest.approx(50.0)
    sampling.stop()
    wait_for(
        lambda: all(thread.name != "edgekit-sensors" for thread in threading.enumerate()),
        "the end of the thread",
    )


def test_even_arrivals_have_no_bursts_and_random_ones_have_some() -> None:
    random = np.random.default_rng(7)
    for counts, low, high in (
        ([30] * 40, 0.0, 0.0),
        (random.poisson(30, 40).tolist(), 0.5, 1.7),
    ):
        meter, came, load = LoadMeter(), 0, Load()
        meter.measure(0.0, arrived=0, answered=0, late=0)
        for at_s, count in enumerate(counts, 1):
            came += count
            load = meter.measure(float(at_s), arrived=came, answered=came, late=0)
        assert low <= load.burstiness <= high
        assert load.rate_hz == counts[-1]


def test_load_is_that_since_the_last_call() -> None:
    meter = LoadMeter()
    assert meter.measure(10.0, arrived=1000, answered=900, late=50) == Load()
    load = meter.measure(12.0, arrived=1100, answered=980, late=58, run_s=0.01)
    assert (load.rate_hz, load.missed, load.run_s) == (50.0, pytest.approx(0.1), 0.01)
