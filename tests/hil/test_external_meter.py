"""The driver of an external meter: its readings, and what it does when the meter gives none."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from labgrid import Target
from tests.hil.external_meter import ExternalMeter

from edgekit_hil.drivers.meter import CommandMeterDriver
from edgekit_runtime.errors import BenchError

NONSENSE = [
    ("", "printed '', expected one number, the watts"),
    ("ready", "printed 'ready', expected one number"),
    ("4.5 W", "printed '4.5 W', expected one number"),
    ("4.5\n4.6", r"printed '4.5\\n4.6', expected one number"),
    ("nan", "printed 'nan', expected one number"),
    ("inf", "the meter reads inf W, expected 0 to 1000 W"),
    ("-4.5", "the meter reads -4.5 W, expected 0 to 1000 W"),
    ("4500", "the meter reads 4500 W, expected 0 to 1000 W"),
]


@pytest.fixture
def meter(tmp_path: Path) -> ExternalMeter:
    return ExternalMeter(tmp_path, "4.5\n")


@contextlib.contextmanager
def activated(meter: ExternalMeter) -> Iterator[CommandMeterDriver]:
    target = Target("main")
    driver = CommandMeterDriver(target, "meter", **meter.drivers["CommandMeterDriver"])
    target.activate(driver)
    yield driver
    target.deactivate(driver)


def test_readings_follow_the_meter_from_the_begin_of_the_work_to_its_end(meter: ExternalMeter) -> None:
    with activated(meter) as driver, driver.measure() as readings:
        meter.wait_read()
        meter.show("9")
        meter.wait_read()

    seconds, watts = zip(*readings, strict=True)
    assert (seconds[0], list(seconds)) == (0.0, sorted(seconds))
    assert (watts[0], watts[-1], set(watts)) == (4.5, 9.0, {4.5, 9.0})


def test_work_that_is_over_at_once_has_a_reading(tmp_path: Path) -> None:
    meter = ExternalMeter(tmp_path, "4.5", interval_s=60)
    with activated(meter) as driver, driver.measure() as readings:
        pass

    assert readings == [(0.0, 4.5)]


@pytest.mark.parametrize(("printed", "message"), NONSENSE)
def test_meter_that_prints_no_power_is_not_activated(
    meter: ExternalMeter, printed: str, message: str
) -> None:
    meter.show(printed)

    with pytest.raises(BenchError, match=message), activated(meter):
        pass


@pytest.mark.parametrize(("printed", "message"), NONSENSE)
def test_measurement_in_which_the_meter_prints_no_power_fails(
    meter: ExternalMeter, printed: str, message: str
) -> None:
    with activated(meter) as driver:
        with pytest.raises(BenchError, match=f"after [0-9]+ readings: .*{message}"), driver.measure():
            meter.show(printed)
            meter.wait_failed()

        meter.show("5")
        with driver.measure() as readings:  # the meter is in order again
            pass
    assert readings == [(0.0, 5.0)]


def test_measurement_in_which_the_meter_vanishes_fails(meter: ExternalMeter) -> None:
    message = "the meter's command ended with 1: cat: .*No such file"
    with activated(meter) as driver:
        with pytest.raises(BenchError, match=f"after [0-9]+ readings: {message}"), driver.measure():
            meter.wait_read()
            meter.vanish()
            meter.wait_failed()

        with pytest.raises(BenchError, match=message), driver.measure():
            pytest.fail("work that nothing measures has begun")


def test_measurement_in_which_the_meter_hangs_fails_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    meter = ExternalMeter(tmp_path, "4.5", limit_s=3)
    message = "did not end within 3 s"
    with activated(meter) as driver, pytest.raises(BenchError, match=message), driver.measure():
        meter.hang()
        meter.wait_failed()

    left = subprocess.run(["pgrep", "-f", f"cat {tmp_path}"], check=False, capture_output=True)
    assert left.stdout == b""


def test_error_of_the_work_is_said_before_that_of_the_meter(meter: ExternalMeter) -> None:
    with activated(meter) as driver, pytest.raises(ZeroDivisionError), driver.measure():
        meter.vanish()
        meter.wait_failed()
        raise ZeroDivisionError
