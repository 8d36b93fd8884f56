"""Meter and power switch of a bench: a fake tree of the kernel, and commands in place of a switch."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.hil.external_meter import ExternalMeter
from tests.hil.ssh_board import SshBoard, run_ssh_board
from tests.runtime.power_tree import Tree
from tests.waiting import wait_for
from yaml import safe_dump, safe_load

from edgekit_hil.benches.bench_file import read_bench
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_hil.benches.device import Device, describe
from edgekit_hil.benches.opening import Bench, open_bench
from edgekit_hil.tests import test_figures
from edgekit_hil.tests.bench_target import BenchTarget
from edgekit_hil.tests.models import Promise
from edgekit_host.evidence import Figure
from edgekit_runtime.errors import BenchError, BenchUnavailableError


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshBoard]:
    with run_ssh_board(tmp_path_factory.mktemp("board")) as board:
        yield board


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


@contextlib.contextmanager
def opened(board: SshBoard, path: Path, drivers: dict[str, Any]) -> Iterator[Bench]:
    with open_bench(read_bench(board.write_bench(path, drivers=drivers))) as bench:
        yield bench


def test_meter_gives_the_watts_of_the_boards_input(board: SshBoard, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "sys")
    tree.rail(1, "VDD_IN", 5000, 2000)
    tree.rail(2, "VDD_CPU_GPU_CV", 5000, 300)
    drivers = {"SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")}}
    with opened(board, tmp_path / "bench.yaml", drivers) as bench:
        with bench.meter.measure() as readings:
            (printed,) = (board.home / ".edgekit-bench").glob("watts.*/watts")
            wait_for(lambda: printed.read_text().count("power_w") > 1, "two readings")

        assert "ina3221/VDD_IN" in bench.meter_text
    assert [watts for _, watts in readings] == [10.0] * len(readings)
    assert len(readings) >= 2
    seconds = [second for second, _ in readings]
    assert (seconds[0], seconds) == (0.0, sorted(seconds))  # by the clock of the device


def test_work_that_is_over_at_once_has_a_reading_too(board: SshBoard, tmp_path: Path) -> None:
    """An update may be shorter than the second that sensors need for their first reading."""
    Tree(tmp_path / "sys").rail(1, "VDD_IN", 5000, 2000)
    drivers = {"SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")}}
    with opened(board, tmp_path / "bench.yaml", drivers) as bench, bench.meter.measure() as readings:
        pass

    assert readings[0] == (0.0, 10.0)


def test_device_without_a_meter_says_what_is_missing(board: SshBoard, tmp_path: Path) -> None:
    Tree(tmp_path / "sys").zone(0, "cpu-thermal", 50_000)
    drivers = {"SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")}}
    with opened(board, tmp_path / "bench.yaml", drivers) as bench:
        assert bench.meter is None
        assert "the device's sensors measure no power" in bench.meter_text


def test_bench_measures_by_an_external_meter(board: SshBoard, tmp_path: Path) -> None:
    meter = ExternalMeter(tmp_path, "4.5\n")
    with opened(board, tmp_path / "bench.yaml", meter.drivers) as bench:
        with bench.meter.measure() as readings:
            meter.wait_read()

        assert bench.meter_text == "board with its supply"
    assert {watts for _, watts in readings} == {4.5}


def test_external_meter_that_gives_no_power_leaves_the_bench_without_a_meter(
    board: SshBoard, tmp_path: Path
) -> None:
    meter = ExternalMeter(tmp_path, "ready")
    with opened(board, tmp_path / "bench.yaml", meter.drivers) as bench:
        assert bench.meter is None
        assert "none: the meter's command printed 'ready', expected one number" in bench.meter_text


OWN_METER = """
import contextlib
import attr
from labgrid.driver import Driver
from labgrid.factory import target_factory
from edgekit_hil.drivers.meter import MeterProtocol

@target_factory.reg_driver
@attr.s(eq=False)
class OwnMeter(Driver, MeterProtocol):
    scope = "board, by a meter of mine"

    @contextlib.contextmanager
    def measure(self):
        readings = []
        yield readings
        readings += [(0.0, 7.0), (1.0, 8.0)]
"""


def test_driver_of_the_user_is_the_meter_of_its_bench(board: SshBoard, tmp_path: Path) -> None:
    (tmp_path / "own_meter.py").write_text(OWN_METER)
    with opened(board, tmp_path / "bench.yaml", {"OwnMeter": {}}) as bench:
        with bench.meter.measure() as readings:
            pass

        assert bench.meter_text == "board, by a meter of mine"
    assert readings == [(0.0, 7.0), (1.0, 8.0)]


def test_sensors_that_vanish_in_a_measurement_are_refused(board: SshBoard, tmp_path: Path) -> None:
    Tree(tmp_path / "sys").rail(1, "VDD_IN", 5000, 2000)
    drivers = {"SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")}}
    with (
        opened(board, tmp_path / "bench.yaml", drivers) as bench,
        pytest.raises(BenchError, match="the device's sensors gave no power"),
        bench.meter.measure(),
    ):
        shutil.rmtree(tmp_path / "sys")
        (printed,) = (board.home / ".edgekit-bench").glob("watts.*/watts")
        wait_for(lambda: '"power_w": null' in printed.read_text(), "a reading without power")


def make_switch(board: SshBoard, tmp_path: Path) -> dict[str, Any]:
    """Return a switch that kills what the device runs for us, and changes what it says of its boot."""
    off = f"pkill -9 -P {board.server_pid}; echo off >>{tmp_path}/marks; echo second >{tmp_path}/boot_id"
    return {"cmd_off": f"sh -c '{off}'", "cmd_on": f"sh -c 'echo on >>{tmp_path}/marks'", "delay": 0.1}


def test_after_a_power_cut_the_same_device_and_its_meter_answer_again(
    board: SshBoard, tmp_path: Path
) -> None:
    (tmp_path / "boot_id").write_text("first\n")
    Tree(tmp_path / "sys").rail(1, "VDD_IN", 5000, 2000)
    drivers = {
        "SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")},
        "ExternalPowerDriver": make_switch(board, tmp_path),
    }
    with (
        opened(board, tmp_path / "bench.yaml", drivers) as bench,
        bench.open_folder("cut", "a test") as device,
    ):
        device.run("echo kept >kept")

        replace(bench, boot_id=str(tmp_path / "boot_id")).cut_power()

        assert device.run("cat kept") == "kept"
        assert (tmp_path / "marks").read_text().split() == ["off", "on"]
        assert bench.power_label == "ExternalPowerDriver"
        with bench.meter.measure() as readings:
            pass
        assert {watts for _, watts in readings} == {10.0}


def test_power_is_on_again_after_a_switch_that_failed_half_way(board: SshBoard, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    power = {"cmd_off": f"sh -c 'echo off >>{marks}; exit 1'", "cmd_on": f"sh -c 'echo on >>{marks}'"}
    with opened(board, tmp_path / "bench.yaml", {"ExternalPowerDriver": power}) as bench:
        with pytest.raises(subprocess.CalledProcessError):
            bench.cut_power()

        assert marks.read_text().split() == ["off", "on"]


def test_switch_that_cuts_no_power_is_found_out(board: SshBoard, tmp_path: Path) -> None:
    """As with another outlet, or a hub that cannot switch its ports: the device simply goes on."""
    power = {"cmd_off": "true", "cmd_on": "true", "delay": 0.1}
    with (
        opened(board, tmp_path / "bench.yaml", {"ExternalPowerDriver": power}) as bench,
        pytest.raises(BenchError, match="bench 'stand-in' did not cut the device's power: it has not booted"),
    ):
        bench.cut_power()


def test_password_of_a_switch_stays_out_of_what_is_said() -> None:
    error = OSError("401 for url: http://me:secret@10.0.0.5/rpc/Switch.Set?id=0, see http://10.0.0.5/a@b")

    assert describe(error) == "401 for url: http://10.0.0.5/rpc/Switch.Set?id=0, see http://10.0.0.5/a@b"


def test_device_that_stays_away_after_a_power_cut_breaks_the_bench(tmp_path: Path) -> None:
    with run_ssh_board(tmp_path / "own") as board:
        power = {"cmd_off": f"kill -9 {board.server_pid}", "cmd_on": "true", "delay": 0.1}
        with opened(board, tmp_path / "bench.yaml", {"ExternalPowerDriver": power}) as bench:
            with pytest.raises(Exception, match="no answer for 1 s after the power came back"):
                replace(bench, boot_limit_s=1).cut_power()
            bench.lock.mark_broken("no answer")

        assert "no answer" in (BenchLock.of(bench.file).read_reason() or "")


class EnergyTest:
    """The test of energy on a stand-in: packages promise 28 mJ, an inference takes 2 ms.

    Attributes:
        figures: figures that it has recorded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *works: Callable[[], None]) -> None:
        """Prepare it.

        Args:
            monkeypatch: for what it does on the device.
            works: what happens while the package is tried once, and while inferences are measured.
        """
        self.figures: list[Figure] = []
        self._works = iter(works)
        monkeypatch.setattr(test_figures, "measure", self._measure)
        monkeypatch.setattr(test_figures, "POWER_S", 3)
        monkeypatch.setattr(Device, "edgekit", lambda *_: {})

    def run(self, bench: Bench, key: Path) -> None:
        """Run it."""

        class Packages:
            public_key = key
            make = staticmethod(lambda *_: key)
            read_promise = staticmethod(lambda *_: Promise(14.0 * 2.0, "modelled"))

        figures = self.figures

        class Recorded:
            curve = staticmethod(lambda *_: None)

            def __call__(
                self, name: str, value: float, unit: str, method: str, predicted: Any = None
            ) -> None:
                figures.append(
                    Figure(name=name, value=value, unit=unit, method=method, test="", predicted=predicted)
                )

        with bench.open_folder("energy", "a test") as device:
            target = BenchTarget.of(bench)
            parts: tuple[Any, ...] = (bench, device, Packages(), target, Recorded())
            test_figures.test_energy_of_an_inference_is_recorded(*parts)

    def _measure(self, *_: object) -> dict[str, list[float]]:
        next(self._works)()
        return {"seconds": [0.002]}


@pytest.mark.parametrize("rail", ["VDD_IN", "VDD_CPU", None])
def test_energy_is_compared_with_its_promise_if_the_meter_reads_the_whole_board(
    board: SshBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rail: str | None
) -> None:
    """A promise of energy is of the whole board; the power of an engine's build is not that of inferences."""
    tree, external, is_external = Tree(tmp_path / "sys"), ExternalMeter(tmp_path, "4"), rail is None

    def draw(watts: int) -> None:
        tree.rail(1, rail or "unused", 1000 * watts, 1000)
        external.show(str(watts))

    def is_mostly_busy(printed: str) -> bool:
        return printed.count('"power_w": 14.0') > printed.count('"power_w": 4.0')

    def build() -> None:
        draw(30)
        time.sleep(3)
        draw(4)

    def infer() -> None:
        draw(14)
        if is_external:
            external.wait_read(40)
        else:
            (printed,) = (board.home / ".edgekit-bench").glob("watts.*/watts")
            wait_for(lambda: is_mostly_busy(printed.read_text()), "more readings under load than at rest")

    draw(4)  # at rest; 14 W under load, as x86-64.toml says
    energy = EnergyTest(monkeypatch, build, infer)
    sensors = {"SensorsDriver": {"python": str(board.python), "sysfs": str(tmp_path / "sys")}}
    drivers = external.drivers if is_external else sensors
    with opened(board, tmp_path / "bench.yaml", drivers) as bench:
        energy.run(bench, board.key)

    whole, above = energy.figures
    assert whole.value == pytest.approx(28.0)
    if rail == "VDD_CPU":
        assert (whole.name, whole.predicted) == ("energy of mnist5k_dscnn on ort, with rest", None)
    else:
        assert whole.name == "energy of mnist5k_dscnn on ort, whole board"
        assert whole.error == pytest.approx(0.0, abs=1e-6)
    assert (above.value, above.predicted) == (pytest.approx(20.0), None)
    assert ("board with its supply" in whole.method) == is_external


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (ExternalMeter.vanish, BenchError, "after [0-9]+ readings: the meter's command ended with 1"),
        (lambda meter: meter.show("nan"), BenchError, "after [0-9]+ readings: .* printed 'nan'"),
        (lambda meter: meter.show("4000"), BenchError, "after [0-9]+ readings: the meter reads 4000 W"),
        (None, AssertionError, r"assert 4\.0 > 4\.0"),
    ],
    ids=["vanished", "no number", "milliwatts", "stands still"],
)
def test_energy_by_a_meter_that_fails_in_the_measurement_is_not_recorded(
    board: SshBoard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[ExternalMeter], None] | None,
    error: type[Exception],
    message: str,
) -> None:
    meter = ExternalMeter(tmp_path, "4")

    def work() -> None:
        if spoil is not None:
            spoil(meter)
            meter.wait_failed()

    energy = EnergyTest(monkeypatch, lambda: None, work)
    with (
        opened(board, tmp_path / "bench.yaml", meter.drivers) as bench,
        pytest.raises(error, match=message),
    ):
        energy.run(bench, board.key)

    assert BenchLock.of(bench.file).read_reason() is None  # the device is in order
    assert energy.figures == []


@pytest.mark.parametrize(
    ("resource", "driver", "error", "message"),
    [
        (
            {"USBPowerPort": {"match": {"sys_name": "99-99:1.0"}, "index": 1}},
            "USBPowerDriver",
            BenchUnavailableError,
            "its power switch does not work: Not all resources are available",
        ),
        (
            {"NetworkPowerPort": {"model": "teapot", "host": "10.0.0.1", "index": "0"}},
            "NetworkPowerDriver",
            BenchError,
            "labgrid refuses it: No module named 'labgrid.driver.power.teapot'",
        ),
    ],
)
def test_switch_that_does_not_work_is_refused_with_the_reason(
    board: SshBoard,
    tmp_path: Path,
    resource: dict[str, Any],
    driver: str,
    error: type[Exception],
    message: str,
) -> None:
    path = board.write_bench(tmp_path / "bench.yaml")
    document = safe_load(path.read_text())
    document["targets"]["main"]["resources"].update(resource)
    document["targets"]["main"]["drivers"][driver] = {}
    document["edgekit"]["kind"] = "real"
    path.write_text(safe_dump(document))

    with pytest.raises(error, match=message), open_bench(read_bench(path)):
        pass

    assert BenchLock.of(read_bench(path)).describe() is None  # the refusal has not broken the bench
