"""Energy and limits in a running service: a fake tree of `/sys`, real variants, real requests."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.runtime.power_tree import Tree
from tests.service.service_parts import Background, Running, X, make_config, running
from tests.service.wiring_parts import changed, metrics, statistics, with_variant, write
from tests.waiting import wait_for

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import GovernorOptions, ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.resources import ModelMemory, Power
from edgekit_runtime.service.serving.loader import load, unload

# Answers of the two variants to X.
ACCURATE, FRUGAL = X @ WEIGHT, 2 * X @ WEIGHT
_SCORES = {"score": {"metric": "top1", "value": 0.9}}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


@contextmanager
def serve(
    maker: PackageMaker, tree: Tree, options: ModelOptions, *, repeats: int = 200, **limits: float
) -> Iterator[Running]:
    folder = tree.root.parent / "packages"
    folder.mkdir()
    # A fraction of a millisecond a run, or more, against a few microseconds of the other variant.
    frugal, variant = with_variant(changed(maker, repeats=repeats), "frugal", 2.0)
    write(frugal, folder, "1.0.0", variants=(variant,), figures=_SCORES)
    power = Power(sysfs=str(tree.root), period_s=0.05, window_s=0.0, **limits)
    config = make_config(folder.parent, models={"linear": options}, power=power)
    with running(config, PackageFiles([folder], maker.trust)) as service:
        service.call(service.service.watch)
        yield service


class Traffic(Background):
    """Asks without end, and notes which variant answered.

    Without a pause it asks more often the faster the answers come. The governor then stays with a fast
    variant, since a slower one could not answer as many requests.
    """

    def __init__(self, service: Running, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self.failures: list[str] = []
        self.counts = {"accurate": 0, "frugal": 0, "refused": 0}
        self._service = service
        super().__init__()

    def work(self) -> None:
        with Client(self._service.socket_path) as client:
            while not self.is_over.is_set():
                try:
                    y = client.infer("linear", {"x": X})["y"]
                except EdgekitError as error:
                    self.counts["refused"] += 1
                    if "to hold a limit" not in str(error):
                        self.failures.append(str(error))
                    time.sleep(0.001)
                    continue
                self._count(y)
                self.is_over.wait(self._pause_s)

    def _count(self, y: Any) -> None:
        if np.array_equal(y, ACCURATE):
            self.counts["accurate"] += 1
        elif np.array_equal(y, FRUGAL):
            self.counts["frugal"] += 1
        else:
            self.failures.append(str(y))


def setting(service: Running) -> dict[str, Any]:
    found: dict[str, Any] = statistics(service)["governor"]
    return found


GOVERNED = ModelOptions(governor=GovernorOptions())


class Zone(Background):
    """A thermal zone that moves by a tenth of a degree; one that never moves counts as stuck."""

    def __init__(self, tree: Tree) -> None:
        self.millidegrees = 40_000
        self._tree = tree
        super().__init__()

    def work(self) -> None:
        for swing in itertools.cycle((0, 100)):
            self._tree.zone(0, "cpu", self.millidegrees + swing)
            if self.is_over.wait(0.05):
                return


@pytest.mark.parametrize("isolated", [None, pytest.param(True, marks=pytest.mark.long)])
def test_hot_device_is_served_in_another_way_and_no_request_fails(
    maker: PackageMaker, tree: Tree, isolated: bool | None
) -> None:
    tree.zone(0, "cpu", 40_000)
    options = dataclasses.replace(GOVERNED, isolated=isolated)
    with (
        Zone(tree) as zone,
        serve(maker, tree, options, temperature_c=70.0) as service,
        Traffic(service, pause_s=0.005) as traffic,
    ):
        wait_for(lambda: traffic.counts["accurate"] > 100 and setting(service)["variant"] == "default")
        wait_for(lambda: 'edgekit_temperature_celsius{zone="thermal/cpu"} 40.' in metrics(service))
        zone.millidegrees = 95_000
        wait_for(lambda: setting(service)["admit"] < 1 or setting(service)["variant"] == "frugal")
        wait_for(lambda: 'zone="thermal/cpu"} 95.' in metrics(service))
        assert 'edgekit_governor_setting{model="linear",version="1.0.0"' in metrics(service)
        assert traffic.failures == []


class Device(Background):
    """Lets the board's rail follow what the engine does: 2 W, and 6 W more while it runs.

    Of an engine that never rests the power swings: a sensor that never moves counts as stuck.
    """

    def __init__(self, service: Running, tree: Tree) -> None:
        self._service, self._tree = service, tree
        self.power_w = 0.0
        super().__init__()

    def work(self) -> None:
        busy_s, at_s = self._busy_s(), time.monotonic()
        for busy_w in itertools.cycle((6.0, 5.9)):
            if self.is_over.wait(0.05):
                return
            before_s, began_s = busy_s, at_s
            busy_s, at_s = self._busy_s(), time.monotonic()
            self.power_w = 2.0 + busy_w * min(1.0, (busy_s - before_s) / (at_s - began_s))
            new = self._tree.write("new", round(self.power_w * 200))
            new.replace(self._tree.root / "class/hwmon/hwmon3/curr1_input")

    def _busy_s(self) -> float:
        runs = self._service.service.registry.models.find("linear", None).metrics.runs
        return sum(run.infer_s for run in list(runs.values()))


def test_limit_of_power_is_held_by_another_variant_under_load(maker: PackageMaker, tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5000, 400)
    # Runs of milliseconds: what lies between two of them is short on any machine, and the limit is exceeded.
    limits = {"power_w": 4.0, "idle_w": 2.0}
    with (
        serve(maker, tree, GOVERNED, repeats=4500, **limits) as service,
        Device(service, tree) as device,
    ):
        wait_for(lambda: 'edgekit_power_watts{sensor="device"} 2.0' in metrics(service))
        wait_for(lambda: setting(service)["variant"] == "default")
        with Client(service.socket_path) as client:
            np.testing.assert_array_equal(client.infer("linear", {"x": X})["y"], ACCURATE)
        with Traffic(service) as traffic:
            wait_for(lambda: traffic.counts["frugal"] > 200 and device.power_w < 4.0)
            assert "edgekit_governor_setting{" in metrics(service)
            assert "edgekit_governor_admitted_ratio{" in metrics(service)
            assert setting(service)["changes"] > 0
        assert traffic.failures == []


def test_limit_without_its_sensor_is_logged_at_the_start(
    maker: PackageMaker, tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    tree.zone(0, "cpu", 40_000)
    with serve(maker, tree, GOVERNED, power_w=4.0, temperature_c=70.0, battery_floor=0.2) as service:
        wait_for(lambda: 'edgekit_temperature_celsius{zone="thermal/cpu"} 40.0' in metrics(service))
    warnings = [record.message for record in caplog.records if record.message.startswith("no ")]
    assert warnings == [
        "no power sensor: power_w is kept by estimates alone",
        "no battery sensor: battery_floor has no effect",
    ]
    assert not any("limits hold" in record.message for record in caplog.records)


def test_batches_of_a_governed_model_are_those_that_it_may_choose(maker: PackageMaker, tree: Tree) -> None:
    tree.zone(0, "cpu", 40_000)
    options = ModelOptions(
        scheduling=SchedulingLimits(max_batch=4),
        governor=GovernorOptions(batches=(1, 4), threads=(1, 2)),
    )
    with serve(maker, tree, options, temperature_c=70.0) as service, Traffic(service) as traffic:
        wait_for(lambda: sum(traffic.counts.values()) > 200)
        found = setting(service)
        assert (found["batch"] in (1, 4), found["threads"] in (1, 2)) == (True, True)
        ways = service.call(lambda: service.service.registry.models.find("linear", None).loaded.settings)
        assert {(way.variant, way.threads) for way in ways} == {
            *(("default", 1), ("default", 2)),
            *(("frugal", 1), ("frugal", 2)),
        }
        assert traffic.failures == []


def test_energy_of_a_request_is_said_where_it_is_measured(maker: PackageMaker, tree: Tree) -> None:
    tree.rail(1, "VDD_IN", 5000, 400)
    with serve(maker, tree, ModelOptions()) as service:
        time.sleep(0.6)  # idle, of which the meter wants to see some
        assert "edgekit_request_energy_joules" not in metrics(service)
        with Traffic(service) as traffic:
            tree.rail(1, "VDD_IN", 5000, 1000)
            wait_for(lambda: "edgekit_request_energy_joules{" in metrics(service))
            wait_for(lambda: 'edgekit_energy_joules_total{model="linear"}' in metrics(service))
        assert traffic.failures == []


def test_device_without_sensors_serves_and_says_no_energy(maker: PackageMaker, tree: Tree) -> None:
    tree.root.mkdir()
    with serve(maker, tree, GOVERNED, power_w=4.0) as service, Traffic(service) as traffic:
        wait_for(lambda: traffic.counts["accurate"] + traffic.counts["frugal"] > 300)
        text = metrics(service)
        for family in ("edgekit_power", "edgekit_temperature", "edgekit_request_energy"):
            assert family not in text
        assert traffic.failures == []


def test_battery_and_throttling_are_among_the_metrics(maker: PackageMaker, tree: Tree) -> None:
    tree.battery(energy_now=600_000, energy_full=1_000_000, power_now=3_000_000)
    tree.write("devices/platform/soc/soc:firmware/get_throttled", "0x4")
    with serve(maker, tree, ModelOptions()) as service:
        wait_for(lambda: "edgekit_battery_charge_ratio 0.6" in metrics(service))
        assert "edgekit_throttled 1.0" in metrics(service)


def test_sensor_that_vanishes_leaves_the_metrics(maker: PackageMaker, tree: Tree) -> None:
    tree.zone(0, "cpu", 40_000)
    with serve(maker, tree, ModelOptions()) as service:
        wait_for(lambda: "edgekit_temperature_celsius" in metrics(service))
        (tree.root / "class/thermal/thermal_zone0/temp").unlink()
        wait_for(lambda: "edgekit_temperature_celsius" not in metrics(service))


@pytest.mark.parametrize("isolated", [None, pytest.param(True, marks=pytest.mark.long)])
def test_variant_that_the_governor_is_to_choose_and_is_not_there_is_said(
    maker: PackageMaker, tree: Tree, isolated: bool | None
) -> None:
    tree.root.mkdir()
    governor = GovernorOptions(variants=("none",))
    options = ModelOptions(governor=governor, isolated=isolated)
    with serve(maker, tree, options) as service:
        (line,) = service.do(service.service.registry.index())
        assert "has no variant 'none'" in line.reason


@pytest.mark.parametrize("is_normed", [False, True])
def test_batches_are_such_as_every_variant_can_take(
    maker: PackageMaker, tmp_path: Path, is_normed: bool
) -> None:
    made, variant = with_variant(maker, "frugal", 2.0, is_normed=is_normed)
    path = write(made, tmp_path, "1.0.0", variants=(variant,))
    options = ModelOptions(governor=GovernorOptions(), scheduling=SchedulingLimits(max_batch=4))
    with read_package(path, maker.trust) as package:
        loaded = load(package, options)
    unload([session for way in loaded.settings for session in way.instances])
    assert loaded.scheduling.max_batch == (1 if is_normed else 4)


def test_memory_cap_counts_all_that_a_governor_keeps_open(maker: PackageMaker, packages: Path) -> None:
    stated = {"memory_estimate": {"bytes_above_engine": 1000}}
    double, variant = with_variant(maker, "double", 2.0)
    variants = (dataclasses.replace(variant, figures={"memory_estimate": {"bytes_above_engine": 500}}),)
    write(double, packages, "1.0.0", name="governed", variants=variants, figures=stated)
    write(maker, packages, "1.0.0", name="plain", figures=stated)
    governed = ModelOptions(governor=GovernorOptions(threads=(1, 2)))
    for max_bytes, ready in ((4000, ["governed", "plain"]), (3999, ["governed"]), (2999, ["plain"])):
        cap = ModelMemory(max_bytes=max_bytes)
        config = make_config(packages.parent, models={"governed": governed}, memory=cap)
        with running(config, PackageFiles([packages], maker.trust)) as service:
            lines = service.do(service.service.registry.index())
            assert [line.name for line in lines if line.state == "READY"] == ready
