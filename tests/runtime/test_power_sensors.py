import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
from tests.runtime.power_tree import Tree

from edgekit_runtime.power import sensors
from edgekit_runtime.power.sensors.discovery import discover
from edgekit_runtime.power.sensors.readings import Readings
from edgekit_runtime.power.sensors.sysfs import Sysfs


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


def read(tree: Tree, *, times: int = 1, vcgencmd: str | None = None) -> Readings:
    sensors = discover(Sysfs(tree.root, vcgencmd))
    for second in range(times):
        readings = sensors.read(float(second))
    return readings


def write_program(path: Path, throttled: str, adc: str) -> str:
    path.write_text(f"#!/bin/sh\ncase $1 in get_throttled) {throttled};; pmic_read_adc) {adc};; esac\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_jetson_orin_power_is_that_of_the_input_rail(tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5008, 1520)
    tree.rail(2, "VDD_CPU_GPU_CV", 5008, 400)
    tree.rail(3, "VDD_SOC", 5008, 300)
    readings = read(tree)
    assert readings.power_w == pytest.approx(5.008 * 1.52)
    assert readings.values["ina3221/VDD_SOC"] == pytest.approx(5.008 * 0.3)


def test_board_without_input_rail_adds_up_rails_and_leaves_out_what_is_not_connected(tree: Tree) -> None:
    tree.rail(1, "VDD_GPU_SOC", 12000, 500)
    tree.rail(2, "VDD_CPU_CV", 12000, 250)
    tree.rail(3, "NC", 12000, 9000)
    tree.write("class/hwmon/hwmon3/in7_label", "sum of shunt voltages")
    assert read(tree).power_w == pytest.approx(9.0)


def test_rails_behind_the_i2c_driver_alone_are_found(tree: Tree) -> None:
    folder = "bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon1"
    for name, value in (("in1_label", "VDD_IN"), ("in1_input", 5000), ("curr1_input", 1000)):
        tree.write(f"{folder}/{name}", value)
    assert read(tree).power_w == pytest.approx(5.0)


def test_rails_of_the_older_driver_are_milliwatts(tree: Tree) -> None:
    folder = "bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    tree.write(f"{folder}/rail_name_0", "POM_5V_IN")
    tree.write(f"{folder}/in_power0_input", 2345)
    assert read(tree).power_w == pytest.approx(2.345)


def test_switched_off_channel_is_left_out(tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5000, 1000)
    tree.write("class/hwmon/hwmon3/in1_enable", 0)
    assert read(tree).power_w is None


def test_counters_give_power_from_the_second_reading_on(tree: Tree) -> None:
    tree.counter("intel-rapl:0", "package-0", 1_000_000)
    tree.counter("intel-rapl:0:0", "core", 500_000)  # part of the package: not added
    tree.counter("intel-rapl:0:1", "dram", 2_000_000)
    sensors = discover(Sysfs(tree.root))
    assert sensors.read(0.0).power_w is None
    tree.counter("intel-rapl:0", "package-0", 9_000_000)
    tree.counter("intel-rapl:0:1", "dram", 4_000_000)
    readings = sensors.read(2.0)
    assert (readings.power_w, readings.interval_j) == (pytest.approx(5.0), pytest.approx(10.0))


def test_counters_only_for_root_are_told_as_such(tree: Tree) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    tree.counter("intel-rapl:0", "package-0", 1)
    (tree.root / "class/powercap/intel-rapl:0/energy_uj").chmod(0)
    sensors = discover(Sysfs(tree.root))
    missing = {family.name: family.missing for family in sensors.families}
    assert "only root may read" in missing["rapl"]


def test_battery_with_power_gives_charge_discharge_and_capacity(tree: Tree) -> None:
    tree.battery(capacity=50, energy_now=24_000_000, energy_full=50_000_000, power_now=7_500_000)
    battery = read(tree).battery
    assert battery is not None
    assert battery.charge == pytest.approx(0.48)
    assert battery.discharge_w == pytest.approx(7.5)
    assert battery.capacity_j == pytest.approx(180_000)


def test_battery_with_current_alone_uses_the_voltage_whatever_the_sign(tree: Tree) -> None:
    tree.battery(capacity=50, current_now=-2_000_000, voltage_now=4_000_000, charge_full=5_000_000)
    battery = read(tree).battery
    assert battery is not None
    assert battery.discharge_w == pytest.approx(8.0)
    assert battery.capacity_j == pytest.approx(72_000)


def test_charging_battery_discharges_negatively_and_is_no_power_of_the_device(tree: Tree) -> None:
    tree.battery(capacity=50, status="Charging", power_now=7_500_000)
    readings = read(tree)
    assert readings.battery is not None
    assert readings.battery.discharge_w == pytest.approx(-7.5)
    assert readings.power_w is None


def test_battery_of_a_mouse_is_not_the_device(tree: Tree) -> None:
    tree.battery(capacity=50, scope="Device")
    assert read(tree).battery is None


def test_hottest_computing_zone_counts(tree: Tree) -> None:
    tree.zone(0, "cpu-thermal", 51_250)
    tree.zone(1, "gpu-thermal", 48_000)
    tree.zone(2, "PMIC-Die", 100_000)  # old Jetsons: always 100
    tree.zone(3, "iwlwifi_1", 70_000)
    assert read(tree).temperature_c == pytest.approx(51.25)


def test_zone_that_sleeps_at_minus_256_is_passed_over(tree: Tree) -> None:
    tree.zone(0, "cpu-thermal", 51_250)
    tree.zone(1, "gpu-thermal", -256_000)
    readings = read(tree)
    assert readings.temperature_c == pytest.approx(51.25)
    assert readings.values["thermal/gpu-thermal"] is None


def test_two_zones_of_one_name_are_told_apart(tree: Tree) -> None:
    tree.zone(0, "x86_pkg_temp", 40_000)
    tree.zone(1, "x86_pkg_temp", 41_000)
    assert {"thermal/x86_pkg_temp@0", "thermal/x86_pkg_temp@1"} <= set(read(tree).values)


@pytest.mark.parametrize(("text", "bits"), [("50005", 0x50005), ("0x0", 0), ("throttled=0x4", 4)])
def test_throttling_bits_are_hexadecimal(tree: Tree, text: str, bits: int) -> None:
    tree.write("devices/platform/soc/soc:firmware/get_throttled", text)
    assert read(tree).throttle_bits == bits


def test_pi_without_the_file_is_asked_through_its_tool(tree: Tree, tmp_path: Path) -> None:
    adc = (
        "printf ' VDD_CORE_A current(7)=2.50000000A\\n EXT5V_V volt(24)=5.10000000V\\n"
        " VDD_CORE_V volt(15)=0.80000000V\\n 3V3_SYS_A current(1)=0.1A\\n 3V3_SYS_V volt(9)=3.3V\\n'"
    )
    program = write_program(tmp_path / "vcgencmd", "echo throttled=0x50000", adc)
    readings = read(tree, vcgencmd=program)
    assert readings.throttle_bits == 0x50000
    assert readings.power_w == pytest.approx(2.0 + 0.33)


def test_pi_tool_that_fails_is_no_reading(tree: Tree, tmp_path: Path) -> None:
    program = write_program(tmp_path / "vcgencmd", "exit 1", "exit 1")
    readings = read(tree, vcgencmd=program)
    assert (readings.throttle_bits, readings.power_w) == (None, None)


def test_clock_cap_is_that_of_the_cluster_held_down_most(tree: Tree) -> None:
    for policy, cap in ((0, 1_800_000), (4, 1_200_000)):
        folder = f"devices/system/cpu/cpufreq/policy{policy}"
        tree.write(f"{folder}/cpuinfo_max_freq", 2_400_000)
        tree.write(f"{folder}/scaling_max_freq", cap)
    assert read(tree).clock_share == pytest.approx(0.5)


def test_empty_tree_reads_nothing_and_says_why(tree: Tree) -> None:
    sensors = discover(Sysfs(tree.root))
    readings = sensors.read(0.0)
    assert readings == Readings(at_s=0.0)
    assert all(family.missing for family in sensors.families)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "-5",
        "99999999",
        "nan",
        "1e3",
        "0x10",
        "5000 mA",
        "٣٤",
        "9" * 5000,
        "\x00",
        "1_000",
        "\N{MINUS SIGN}3",
    ],
)
def test_nonsense_in_a_rail_is_no_reading(tree: Tree, value: str) -> None:
    tree.rail(1, "VDD_IN", 5000, 1000)
    tree.write("class/hwmon/hwmon3/curr1_input", value)
    assert read(tree).power_w is None


def test_bytes_that_are_no_text_are_no_reading(tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5000, 1000)
    (tree.root / "class/hwmon/hwmon3/curr1_input").write_bytes(b"\xff\xfe12")
    assert read(tree).power_w is None


def test_attribute_that_became_a_folder_is_no_reading(tree: Tree) -> None:
    tree.zone(0, "cpu-thermal", 50_000)
    sensors = discover(Sysfs(tree.root))
    path = tree.root / "class/thermal/thermal_zone0/temp"
    path.unlink()
    path.mkdir()
    assert sensors.read(0.0).temperature_c is None


def test_pipe_in_the_place_of_an_attribute_does_not_block(tree: Tree) -> None:
    tree.zone(0, "cpu-thermal", 50_000)
    path = tree.root / "class/thermal/thermal_zone0/temp"
    path.unlink()
    os.mkfifo(path)
    assert read(tree).temperature_c is None


def test_fault_is_logged_once_and_a_sensor_that_comes_back_is_read_again(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    tree.zone(0, "cpu-thermal", 50_000)
    sensors = discover(Sysfs(tree.root))
    path = tree.root / "class/thermal/thermal_zone0/temp"
    path.unlink()
    with caplog.at_level(logging.WARNING):
        for second in range(5):
            assert sensors.read(float(second)).temperature_c is None
        tree.zone(0, "cpu-thermal", 52_000)
        assert sensors.read(6.0).temperature_c == pytest.approx(52.0)
        path.unlink()
        sensors.read(7.0)
    assert len(caplog.records) == 1
    assert "thermal/cpu-thermal" in caplog.text


def test_sum_of_rails_with_one_missing_is_missing(tree: Tree) -> None:
    tree.rail(1, "VDD_GPU_SOC", 12000, 500)
    tree.rail(2, "VDD_CPU_CV", 12000, 250)
    tree.write("class/hwmon/hwmon3/curr2_input", "x")
    readings = read(tree)
    assert readings.power_w is None
    assert readings.values["ina3221/VDD_GPU_SOC"] == pytest.approx(6.0)


def test_rail_that_says_less_than_nothing_is_no_reading_and_its_reason_is_kept(tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5000, -1000)
    sensors = discover(Sysfs(tree.root))
    readings = sensors.read(0.0)
    assert (readings.power_w, readings.interval_j) == (None, None)
    assert sensors.probes[0].fault == "-5 power_w, expected 0 to 2000"


def test_counter_that_turns_around_goes_on_counting(tree: Tree) -> None:
    range_uj = 65_532_610_987
    tree.counter("intel-rapl:0", "package-0", range_uj - 3_000_000, range_uj)
    sensors = discover(Sysfs(tree.root))
    sensors.read(0.0)
    tree.counter("intel-rapl:0", "package-0", 4_000_000, range_uj)
    readings = sensors.read(1.0)
    assert (readings.power_w, readings.interval_j) == (pytest.approx(7.0), pytest.approx(7.0))


def test_counter_over_its_range_is_no_reading_and_the_next_one_bridges_it(tree: Tree) -> None:
    tree.counter("intel-rapl:0", "package-0", 1_000_000)
    sensors = discover(Sysfs(tree.root))
    sensors.read(0.0)
    tree.counter("intel-rapl:0", "package-0", 300_000_000_000)
    assert sensors.read(1.0).power_w is None
    tree.counter("intel-rapl:0", "package-0", 9_000_000)
    readings = sensors.read(2.0)
    assert (readings.interval_j, readings.interval_s) == (pytest.approx(8.0), 2.0)


def test_zone_that_vanishes_leaves_the_others(tree: Tree) -> None:
    tree.zone(0, "cpu-thermal", 60_000)
    tree.zone(1, "gpu-thermal", 50_000)
    sensors = discover(Sysfs(tree.root))
    assert sensors.read(0.0).temperature_c == pytest.approx(60.0)
    shutil.rmtree(tree.root / "class/thermal/thermal_zone0")
    assert sensors.read(1.0).temperature_c == pytest.approx(50.0)
    shutil.rmtree(tree.root / "class/thermal/thermal_zone1")
    assert sensors.read(2.0).temperature_c is None


def test_battery_that_is_taken_out_and_put_back_is_read_again(tree: Tree) -> None:
    tree.battery(energy_now=24_000_000, energy_full=50_000_000, power_now=7_500_000)
    sensors = discover(Sysfs(tree.root))
    assert sensors.read(0.0).power_w == pytest.approx(7.5)
    shutil.rmtree(tree.root / "class/power_supply/BAT0")
    gone = sensors.read(1.0)
    assert (gone.battery, gone.power_w, gone.interval_j) == (None, None, None)
    tree.battery(energy_now=23_000_000, energy_full=50_000_000, power_now=6_000_000)
    back = sensors.read(2.0)
    assert back.battery is not None
    assert (back.battery.charge, back.power_w) == (pytest.approx(0.46), pytest.approx(6.0))
    assert back.interval_j is None  # nobody knows what was drawn in between


def test_battery_whose_charger_is_plugged_in_and_out_gives_power_only_without_it(tree: Tree) -> None:
    tree.battery(capacity=50, power_now=7_500_000)
    sensors = discover(Sysfs(tree.root))
    seen = []
    for second, status in enumerate(("Discharging", "Charging", "Full", "Discharging")):
        tree.battery(capacity=50, power_now=0 if status == "Full" else 7_500_000, status=status)
        seen.append(sensors.read(float(second)).power_w)
    assert seen == [7.5, None, None, 7.5]


FURTHER_FAMILY = """
from edgekit_runtime.power.sensors.family import Family
from edgekit_runtime.power.sensors.power_source import PowerSource
from edgekit_runtime.power.sensors.probe import Probe
from edgekit_runtime.power.sensors.sysfs import read_number


def find_sensors(sysfs):
    probes = tuple(
        Probe(f"hwmon/{path.parent.name}", "power_w", lambda _now_s, path=path: read_number(path) * 1e-6)
        for path in sysfs.find("class/hwmon/hwmon*/power1_input")
    )
    names = tuple(probe.name for probe in probes)
    sources = (PowerSource(scope="the monitored rails", names=names, counts=False, rank=1),) if probes else ()
    return Family(name="hwmon", probes=probes, sources=sources)
"""


def test_further_power_sensor_is_a_file(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "further_hwmon.py").write_text(FURTHER_FAMILY)
    monkeypatch.setattr(sensors, "__path__", [*sensors.__path__, str(tmp_path)])
    tree.write("class/hwmon/hwmon7/power1_input", 4_200_000)
    tree.battery(capacity=50, power_now=9_000_000)
    discovered = discover(Sysfs(tree.root))
    assert discovered.read(0.0).power_w == pytest.approx(4.2)
    assert discovered.source is not None and discovered.source.scope == "the monitored rails"
