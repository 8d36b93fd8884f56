"""The service on the device: an update under load, power cuts in an update, and a longer run."""

import contextlib
import json
import random
import shlex
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from edgekit_hil.benches.device import Device
from edgekit_hil.benches.opening import Bench
from edgekit_hil.tests.bench_target import OPEN_LIMIT_S, BenchTarget
from edgekit_hil.tests.conftest import Recorder
from edgekit_hil.tests.models import PackageMaker
from edgekit_hil.tests.programs import read_program
from edgekit_runtime.errors import BenchError

_MODEL: Final = "mnist5k_dscnn"
_VERSIONS: Final = ("1.0.0", "1.0.1")
_MOST_GROWTH_BYTES: Final = 16 << 20
_LIMIT_C: Final = 70
_HOT_CLOCK: Final = 0.4
_GOVERNOR_LIMIT_S: Final = 20.0
_HEAT_SETTINGS: Final = """\
[power]
sysfs = "{sysfs}"
period_s = 0.2
window_s = 0.0
temperature_c = {limit_c}
[models.{model}.governor]
threads = [1]
"""


class ServedDevice:
    """A device with version 1.0.0 installed, and 1.0.1 beside it as a file.

    Attributes:
        device: the device.
        engine: engine of the packages.
        old, new: paths of the packages on the device.
    """

    def __init__(self, device: Device, packages: PackageMaker, target: BenchTarget) -> None:
        self.device, self.engine = device, target.engine
        package_paths = [packages.make(_MODEL, target.name, self.engine, version) for version in _VERSIONS]
        self.old, self.new = (
            device.put(path, f"{index}.edgepkg") for index, path in enumerate(package_paths)
        )
        device.trust(packages.public_key)
        self.install(self.old)

    def install(self, package: str) -> dict[str, Any]:
        """Return what the installation of a package there prints."""
        return self.device.edgekit("install", package, limit_s=OPEN_LIMIT_S)

    @contextlib.contextmanager
    def serve(self, *options: str) -> Iterator[int]:
        """Run the service with further options of `serve`; returns its process id."""
        words = shlex.join(["-m", "edgekit_runtime.cli", "serve", "--port", "0", *options])
        pid = self.device.start(f"{self.device.python} {words}", "serve.log")
        deadline = time.monotonic() + OPEN_LIMIT_S
        code = f"from edgekit_runtime import Client; print(Client().ready({_MODEL!r}))"
        while self.device.try_run(f'{self.device.python} -c "{code}"').output != "True":
            if time.monotonic() > deadline or self.device.try_run(f"kill -0 {pid}").exit_code:
                raise BenchError(f"the service is not ready: {self.device.run('tail -5 serve.log')}")
        yield pid
        self.device.stop(pid)

    @contextlib.contextmanager
    def load(self) -> Iterator[dict[str, Any]]:
        """Send requests during the block; after it, the mapping has their counts."""
        result: dict[str, Any] = {}
        device = self.device
        device.run(f"cat >load.py <<'END_OF_PROGRAM'\n{read_program('load')}END_OF_PROGRAM")
        pid = device.start(f"{device.python} load.py {_MODEL} stop {self.old} {self.new}", "load.json")
        # Where a Python is emulated, it takes many seconds to begin.
        wait = f"while [ ! -e begun ] && kill -0 {pid}; do sleep 0.1; done 2>/dev/null; sleep 1"
        device.run(wait, OPEN_LIMIT_S)
        yield result
        device.run("touch stop")
        device.wait(pid)
        text = device.run("cat load.json")
        try:
            result.update(json.loads(text.splitlines()[-1]))
        except (ValueError, IndexError) as cause:
            raise BenchError(f"the load ended early: {text[-500:]}") from cause

    def read_opened(self) -> str | None:
        """Return the version that is opened next."""
        (model,) = self.device.edgekit("status")["models"]
        opens: str | None = model["opens"]
        return opens


@pytest.fixture
def served(device: Device, packages: PackageMaker, target: BenchTarget) -> ServedDevice:
    """Return the device with a version installed."""
    return ServedDevice(device, packages, target)


def test_swap_under_load_loses_no_request(served: ServedDevice, bench: Bench, evidence: Recorder) -> None:
    """While requests come without a pause, an update and a rollback answer each of them right."""
    measuring = contextlib.nullcontext([]) if bench.meter is None else bench.meter.measure()
    with served.serve(), served.load() as result, measuring as watts:
        updated = served.install(served.new)
        back = served.device.edgekit("rollback", _MODEL)

    if watts:
        evidence.curve("power over an update and a rollback", ("s", "W"), watts)
    assert updated["switched"]
    assert served.read_opened() == _VERSIONS[0], back
    assert result["errors"] == []
    assert len(result["seconds"]) > 10
    method = (
        f"all of {len(result['seconds'])} requests, {served.engine}, Unix socket, an update and a rollback"
    )
    evidence("longest answer during a swap", 1e3 * max(result["seconds"]), "ms", method)


def test_power_cut_in_an_update_leaves_a_version_that_works(
    served: ServedDevice, bench: Bench, evidence: Recorder, request: pytest.FixtureRequest
) -> None:
    """Cut at random moments of an update (a figure says how), one version opens and computes right."""
    if bench.power is None:
        pytest.skip(f"bench '{bench.file.settings.name}' has no power switch")
    device, moments = served.device, random.Random(15)  # noqa: S311
    device.run("cp -r state state.before && sync")
    for _ in range(2):  # the first one may build an engine, which is kept
        device.run("rm -rf state && cp -r state.before state && sync")
        begun_s = time.monotonic()
        served.install(served.new)
        whole_s = time.monotonic() - begun_s
    opened = []
    cuts = request.config.getoption("--power-cuts")
    for _ in range(cuts):
        device.run("rm -rf state && cp -r state.before state && sync")
        device.start(f"{device.python} -m edgekit_runtime.cli install {served.new}", "install.log")
        time.sleep(moments.uniform(0, whole_s))
        bench.cut_power()
        device.forget_processes()
        opened.append(served.read_opened())
        remote = served.old if opened[-1] == _VERSIONS[0] else served.new
        self_test = device.run_python(read_program("selftest"), remote, served.engine, limit_s=OPEN_LIMIT_S)
        checks = json.loads(self_test)
        assert opened[-1] in _VERSIONS
        assert all(passed for _, passed, *_ in checks)
    served.install(served.new)
    assert served.read_opened() == _VERSIONS[1]
    method = f"{bench.power_label}, at random moments, {served.engine}"
    evidence("power cuts around an update", cuts, "cuts", method)
    evidence("of them, the new version opened", opened.count(_VERSIONS[1]), "cuts", "edgekit-device status")


def test_hot_device_refuses_what_it_must_and_takes_all_again_once_cool(
    served: ServedDevice, bench: Bench, evidence: Recorder
) -> None:
    """While its zone (a file stands in) reads 90 C it refuses some requests; at 40 C it takes all again."""
    if not bench.file.settings.has_time:
        pytest.skip(
            f"on bench '{bench.file.settings.name}' durations mean nothing, and limits are held by them"
        )
    device = served.device
    zone = "sys/class/thermal/thermal_zone0"  # no test heats a board: this stands in for its zone
    device.run(f"mkdir -p {zone} && echo cpu >{zone}/type && echo 40000 >{zone}/temp")
    settings = _HEAT_SETTINGS.format(sysfs=f"{device.folder}/sys", limit_c=_LIMIT_C, model=_MODEL)
    device.run(f"cat >service.toml <<'END'\n{settings}END")

    with served.serve("--config", "service.toml"), served.load() as result:
        _watch_governor(device, "above", 1.0)
        _throttle(bench, _HOT_CLOCK)
        device.run(f"echo {_LIMIT_C + 20}000 >{zone}/temp")
        admitted = _watch_governor(device, "below", 0.9)
        _throttle(bench, 1.0)
        device.run(f"echo 40000 >{zone}/temp")
        _watch_governor(device, "above", 1.0)

    assert result["errors"] == []
    assert result["refused"] > 0
    clock = f", clock at {_HOT_CLOCK:.0%}" if hasattr(bench.command, "throttle") else ""
    method = f"governor with a limit of {_LIMIT_C} C; the zone is a file that says {_LIMIT_C + 20} C{clock}"
    method += f", {served.engine}"
    evidence("share of the requests that a hot device takes", admitted, "", method)
    points = [(at_s, 1e3 * took_s) for at_s, took_s in zip(result["at_s"], result["seconds"], strict=True)]
    evidence.curve("answers of a device that gets hot and cools", ("s", "ms"), points)


def _throttle(bench: Bench, clock_share: float) -> None:
    """Lower the clock of the processor, on a bench that can."""
    throttle = getattr(bench.command, "throttle", None)
    if throttle is not None:
        throttle(clock_share)


def _watch_governor(device: Device, side: str, share: float) -> float:
    """Return the share of the requests that the governor admits, once it is on that side of `share`."""
    arguments = (_MODEL, side, str(share), str(_GOVERNOR_LIMIT_S))
    return float(device.run_python(read_program("governor"), *arguments, limit_s=2 * _GOVERNOR_LIMIT_S))


def test_soak_answers_every_request_and_memory_stays(
    served: ServedDevice, evidence: Recorder, request: pytest.FixtureRequest
) -> None:
    """Under steady load every answer is right, and the service's memory does not grow."""
    soak_s = request.config.getoption("--soak-seconds")
    with served.serve() as pid, served.load() as result:
        before = _read_rss(served.device, pid)
        served.device.run(f"sleep {soak_s}", soak_s + 60)
        after = _read_rss(served.device, pid)

    times_ms = [1e3 * duration_s for duration_s in result["seconds"]]
    method = f"{len(times_ms)} requests in turn over {soak_s} s, {served.engine}"
    evidence("median answer in the soak", statistics.median(times_ms), "ms", method)
    evidence("99th percentile in the soak", statistics.quantiles(times_ms, n=100)[-1], "ms", method)
    evidence(
        "growth of memory in the soak", (after - before) / 1e6, "MB", f"VmRSS of the service over {soak_s} s"
    )
    assert result["errors"] == []
    assert after - before <= _MOST_GROWTH_BYTES


def _read_rss(device: Device, pid: int) -> int:
    return int(device.run(f"grep VmRSS /proc/{pid}/status").split()[1]) << 10
